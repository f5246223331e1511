"""What servers and redis-py say goes wrong, in our family: which kind, and what to do about it."""

import ssl
from collections.abc import Iterator, Mapping

from redis import exceptions as redis

from kvtiers.errors import ConfigError, Kind, KVTiersError, Retry
from kvtiers.tiers.options import bad_option

_NEVER = Retry.NEVER
_MAY = Retry.MAY

_SAID: Mapping[str, tuple[Kind, str]] = {
    "OOM": (
        Kind.FULL,
        "its memory is full, and it evicts nothing: set allkeys-lru there",
    ),
    "READONLY": (Kind.IO, "it is a replica, which takes nothing: name its primary, or Sentinel"),
    "MISCONF": (Kind.IO, "it takes nothing while it cannot save to its disk: see to the disk"),
    "NOREPLICAS": (Kind.IO, "it takes nothing while it has too few replicas: see to them"),
    "LOADING": (Kind.IO, "it is loading its data, and will answer"),
    "BUSY": (Kind.IO, "a script keeps it busy: wait, or SCRIPT KILL"),
    "MASTERDOWN": (Kind.IO, "it is a replica that has lost its primary: see to the primary"),
    "CLUSTERDOWN": (Kind.IO, "some slots of its cluster have no server: see to the cluster"),
    "TRYAGAIN": (Kind.IO, "the slot is on its way to another server"),
    "MOVED": (Kind.IO, "it is of a cluster: write redis+cluster:// in the url"),
    "ASK": (Kind.IO, "it is of a cluster: write redis+cluster:// in the url"),
    "NOAUTH": (Kind.IO, "it asks who we are: give password_file or password_env"),
    "WRONGPASS": (Kind.IO, "it does not accept the user or the password"),
    "NOPERM": (Kind.IO, "the user may not do that: allow it with ACL SETUSER"),
    "WRONGTYPE": (Kind.CORRUPT, "what lies there is no string, so nothing that kvtiers stored"),
}
"""By the first word of what a server says."""

_WORDS: Mapping[type[Exception], str] = {
    redis.OutOfMemoryError: "OOM",
    redis.ReadOnlyError: "READONLY",
    redis.BusyLoadingError: "LOADING",
    redis.MasterDownError: "MASTERDOWN",
    redis.ClusterDownError: "CLUSTERDOWN",
    redis.TryAgainError: "TRYAGAIN",
    redis.MovedError: "MOVED",
    redis.AskError: "ASK",
    redis.NoPermissionError: "NOPERM",
    redis.AuthenticationError: "WRONGPASS",
}
"""The word that redis-py took away from what it made this of; the most special type first."""

_OUR_DOING = ("NOAUTH", "WRONGPASS", "NOPERM", "MOVED", "ASK")
"""Words that speak against the configuration."""


def word_of(error: BaseException) -> str:
    """The first word of what the server said; empty if it said nothing."""
    text = str(error)
    first = text.partition(" ")[0]
    if first in _SAID:
        return first
    if isinstance(error, redis.AuthenticationError) and "required" in text.lower():
        return "NOAUTH"
    return next((word for kind, word in _WORDS.items() if isinstance(error, kind)), "")


def explained(error: BaseException, operation: str, where: str) -> KVTiersError:
    """The same as a KVTiersError. ``where`` names the server."""
    if isinstance(error, KVTiersError):
        return error.with_traceback(None)  # its frames hold on to memory of the caller
    word = word_of(error)
    if word:
        kind, what = _SAID[word]
        return _failure(f"{where} says {word}: {what}", kind, _NEVER, operation)
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return _failure(
            f"{where} did not answer in time: is it alive, and the network?",
            Kind.TIMEOUT,
            _NEVER,
            operation,
        )
    if isinstance(error, redis.ResponseError):
        said = str(error)[:200]
        return _failure(f"{where} refuses to {operation}: {said}", Kind.IO, _NEVER, operation)
    if isinstance(error, redis.InvalidResponse):
        what = f"{error}"[:200]
        return _failure(
            f"{where} says what no such server would, is it one? {what}", Kind.IO, _NEVER, operation
        )
    refused = any(isinstance(e, ConnectionRefusedError | FileNotFoundError) for e in _chain(error))
    what = "nobody listens there" if refused else f"{error}"[:200] or type(error).__name__
    retry = _NEVER if refused else _MAY
    return _failure(f"{where} cannot be reached: {what}", Kind.IO, retry, operation)


def refusal(error: BaseException, where: str) -> ConfigError | None:
    """Why the tier must not be built, if the configuration is to blame: waiting mends nothing."""
    for each in _chain(error):
        word = word_of(each)
        if word in _OUR_DOING:
            key = "url" if word in ("MOVED", "ASK") else "password_file"
            return bad_option(key, f"is wrong or missing: {where} says {word}: {_SAID[word][1]}")
        if isinstance(each, ssl.SSLCertVerificationError):
            return bad_option(
                "tls_ca_file",
                f"does not vouch for {where} ({each.verify_message}): give certificates that do",
            )
        if isinstance(each, ssl.SSLError):
            return bad_option("url", f"says rediss://, but {where} does not speak TLS as we do")
        if isinstance(each, redis.ResponseError) and "cluster support disabled" in str(each):
            return bad_option("url", f"leads to {where}, which is of no cluster: write redis://")
        if isinstance(each, redis.InvalidResponse):
            return bad_option("url", f"leads to {where}, which is no Redis or Valkey server")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _failure(what: str, kind: Kind, retry: Retry, operation: str) -> KVTiersError:
    return KVTiersError(what, kind=kind, retry=retry, operation=operation)
