"""Requests to a bucket, by ``obstore`` (the Rust crate ``object_store``).

The one place that knows ``obstore``; it is imported when a client is opened. Its calls block, and
let go of the interpreter's lock while they do.
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from kvtiers.errors import Kind, KVTiersError, Retry, closed
from kvtiers.tiers.lanes import start_daemon
from kvtiers.tiers.obj.failures import error_of
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.options import bad_option

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_LIST_AT_ONCE = 1000
_PIECE_BYTES = 64 << 10


class Stored(NamedTuple):
    """One object as a listing shows it."""

    name: str
    bytes: int
    modified_at: float
    """Seconds since the epoch, by the clock of the service."""


class Client:
    """Requests to one bucket; names are relative to a prefix. Any thread; every method blocks.

    Methods raise KVTiersError: ``VANISHED`` for an object that is not there, ``CORRUPT`` for one
    that ends before what was asked for begins, ``FULL``, ``TIMEOUT``, ``IO`` or ``CLOSED``.
    """

    def __init__(self, store: Any, where: str) -> None:
        """``store`` is one of ``obstore.store``; ``where`` is what people call it."""
        self._obs = _obstore()
        self.store = store
        self.where = where

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it is not there."""
        with self._asking("look-up", name) as store:
            try:
                return int(_call(self._obs.head, store, name)["size"])
            except FileNotFoundError:
                return None

    def get(self, name: str, most: int, start: int = 0) -> memoryview:
        """``most`` bytes of an object from ``start`` on, or as many as there are.

        Not by ``get_ranges`` of obstore, which panics where an object is shorter than asked for.
        """
        with self._asking("read", name) as store:
            found = _call(self._obs.get_range, store, name, start=start, length=most)
            return memoryview(found)

    def get_into(self, name: str, targets: Sequence[memoryview]) -> int:
        """Fill these with an object, one behind the other; its length in bytes, or some number that
        is too large, if it is longer than they are. What it leaves over may hold anything.

        It comes in pieces, of which each is copied while it is still in the processor's cache.
        """
        with self._asking("read", name) as store:
            return int(_call(self._pour, store, name, targets))

    def _pour(self, store: Any, name: str, targets: Sequence[memoryview]) -> int:
        left, at = list(targets), 0
        for piece in self._obs.get(store, name).stream(min_chunk_size=_PIECE_BYTES):
            data = memoryview(piece)
            at += data.nbytes
            while data.nbytes and left:
                n = min(data.nbytes, left[0].nbytes)
                left[0][:n] = data[:n]
                data, left[0] = data[n:], left[0][n:]
                if not left[0].nbytes:
                    del left[0]
            if data.nbytes:
                break
        return at

    def put(self, name: str, parts: Sequence[memoryview | bytes]) -> None:
        """Make an object of these parts, one behind the other; it is seen whole or not at all.

        One that is there is replaced. Nothing of ``parts`` is in use afterwards.
        """
        with self._asking("write", name) as store:
            _call(self._obs.put, store, name, list(parts), use_multipart=False)

    def delete(self, names: Sequence[str]) -> None:
        """Delete these; one that is not there is no error."""
        if not names:
            return
        with self._asking("delete", names[0]) as store:
            try:
                _call(self._obs.delete, store, list(names))
            except FileNotFoundError:  # as some services answer to one of many
                for name in names:
                    with suppress(FileNotFoundError):
                        _call(self._obs.delete, store, name)

    def objects(self, below: str = "", after: str = "") -> Iterator[list[Stored]]:
        """Objects whose names begin with ``below`` and a slash, those after a name, in order.

        Up to a thousand at a time, each with one request. Raises KVTiersError (``IO``) for a name
        that is no path, and where the service says again what it said before.
        """
        begun: set[str] = set()
        with self._asking("list", below) as store:
            pages = self._obs.list(
                store, below or None, offset=after or None, chunk_size=_LIST_AT_ONCE
            )
        while True:
            with self._asking("list", below):
                page = _call(next, pages, None)
            if not page:
                return
            if page[0]["path"] in begun:
                raise _no_end(f"{self.where}/{below}")
            begun.add(page[0]["path"])
            yield [
                Stored(found["path"], found["size"], found["last_modified"].timestamp())
                for found in page
            ]

    def folders(self) -> list[str]:
        """The first parts of all names, where there is more than one part."""
        with self._asking("list", "") as store:
            found = _call(self._obs.list_with_delimiter, store, None)
        return sorted(found["common_prefixes"])

    def close(self) -> None:
        """Let go of all connections that are not in use; whatever is asked from now on is refused.

        Listings that are under way end before their next page.
        """
        self.store = None

    @contextmanager
    def _asking(self, operation: str, name: str) -> Iterator[Any]:
        store = self.store
        if store is None:
            raise closed(self.where, operation)
        try:
            yield store
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as e:  # a panic of the library is none of Exception
            raise error_of(e, operation, f"{self.where}/{name}") from None

    def __repr__(self) -> str:
        return f"<Client {self.where}>"


def open_client(options: ObjOptions) -> Client:
    """A client for what the options name. No request is made yet. Raises ConfigError."""
    stores = _obstore().store
    where = options.where
    config: dict[str, Any] = {
        "prefix": where.prefix or None,
        "client_options": _client_options(options),
        "retry_config": _retry_config(options),
    }
    if where.scheme == "s3":
        config |= _s3_options(options)
    kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[where.scheme]
    try:
        store = kind(where.bucket, **config)
    except Exception as e:
        unnamed = "Account must be specified" in str(e)
        said = "set AZURE_STORAGE_ACCOUNT_NAME" if unnamed else type(e).__name__
        raise bad_option("url", f"is {where}, which cannot be opened: {said}") from None
    return Client(store, str(where))


def _s3_options(options: ObjOptions) -> dict[str, Any]:
    endpoint = options.endpoint
    if endpoint is not None:
        endpoint = endpoint.rstrip("/")
        if options.virtual_hosted:
            endpoint = _with_bucket(endpoint, options.where.bucket)
    config: dict[str, Any] = {
        "endpoint": endpoint,
        "region": options.region,
        "access_key_id": options.access_key_id,
        "secret_access_key": options.secret_access_key,
        "session_token": options.session_token,
    }
    found = {key: value for key, value in config.items() if value is not None}
    if options.profile is not None:
        found["credential_provider"] = _profile(options.profile)
    # What is read is verified to the last byte, so that a digest for the signature finds nothing
    # new; it costs more than all the rest of a write.
    return {
        **found,
        "virtual_hosted_style_request": options.virtual_hosted,
        "unsigned_payload": True,
    }


def _call(request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``request`` returns. The main thread, which hears of Ctrl-C, has another one wait."""
    if threading.current_thread() is not threading.main_thread():
        return request(*args, **kwargs)
    answer: Future[Any] = Future()
    start_daemon(partial(_answer, answer, partial(request, *args, **kwargs)), "kvtiers-request")
    try:
        return answer.result()
    finally:
        del answer  # else what it raised holds it, and the connections, until there is a collection


def _answer(answer: "Future[Any]", request: Callable[[], Any]) -> None:
    try:
        answer.set_result(request())
    except BaseException as e:
        answer.set_exception(e.with_traceback(None))


def _no_end(where: str) -> KVTiersError:
    return KVTiersError(
        f"list of {where} failed: the server lists the same objects again and again",
        kind=Kind.IO,
        retry=Retry.EXHAUSTED,
        operation="list",
    )


def _with_bucket(endpoint: str, bucket: str) -> str:
    split = urlsplit(endpoint)
    if split.netloc.startswith(f"{bucket}."):
        return endpoint
    return urlunsplit(split._replace(netloc=f"{bucket}.{split.netloc}"))


def _client_options(options: ObjOptions) -> dict[str, Any]:
    found: dict[str, Any] = {
        "allow_http": options.allow_http,
        "timeout": timedelta(seconds=options.request_timeout_s),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "user_agent": "kvtiers",
    }
    if options.ca_bundle is not None:
        found["root_certificate"] = _certificates(options.ca_bundle)
    return found


def _retry_config(options: ObjOptions) -> dict[str, Any]:
    return {
        "max_retries": options.max_retries,
        "retry_timeout": timedelta(seconds=options.request_timeout_s),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
            "base": 2,
        },
    }


def _certificates(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            found = file.read()
    except OSError as e:
        raise bad_option("ca_bundle", f"is {path}, which cannot be read: {e.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise bad_option("ca_bundle", f"is {path}, which has no certificate (PEM) in it")
    return found


def _profile(name: str) -> Any:
    try:
        boto3 = importlib.import_module("boto3")
        auth = importlib.import_module("obstore.auth.boto3")
    except ImportError:
        raise bad_option(
            "profile", f"is {name}, and profiles are read by boto3: pip install boto3"
        ) from None
    try:
        return auth.Boto3CredentialProvider(boto3.Session(profile_name=name))
    except Exception as e:
        raise bad_option(
            "profile", f"is {name}, which gives no credentials ({type(e).__name__})"
        ) from None


def _obstore() -> Any:
    try:
        found = importlib.import_module("obstore")
        importlib.import_module("obstore.store")
    except ImportError:
        raise bad_option(
            "type", 'is "obj", which needs obstore: pip install "kvtiers[obj]"'
        ) from None
    return found
