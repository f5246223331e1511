"""What configures the ``kv`` tier, and where its secrets are."""

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Literal

from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.options import RunnerOptions, bad_option, require

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MAX_SECRET_BYTES = 4096
_MAX_TTL_S = 1e9
"""Servers count milliseconds since 1970 in 63 bits, and refuse what has no room there."""
_MAX_TIMEOUT_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class KvOptions(RunnerOptions):
    """Options of the ``kv`` tier."""

    url: str = dataclasses.field(repr=False)
    """``redis://host:6379/0``, ``unix:///path/to/socket``, ``redis+cluster://host,host`` or
    ``redis+sentinel://host,host/service``; ``rediss`` is TLS, and ``valkey`` is another word for
    ``redis``. It may say ``user:password@``, but vLLM logs its configuration: better below."""
    username: str | None = None
    """Who logs in, where the server has users (ACL)."""
    password_env: str | None = None
    """The variable of the environment that holds the password."""
    password_file: str | None = None
    """The file whose first line is the password."""
    sentinel_username: str | None = None
    """Who logs in to Sentinel. Not set: nobody needs to."""
    sentinel_password_env: str | None = None
    """As ``password_env``, for Sentinel."""
    sentinel_password_file: str | None = None
    """As ``password_file``, for Sentinel."""
    tls_ca_file: str | None = None
    """Certificates of who may vouch for the server (PEM). Not set: those that the system trusts."""
    tls_cert_file: str | None = None
    """A certificate to show to the server (PEM), if it asks for one."""
    tls_key_file: str | None = None
    """Its private key (PEM)."""
    tls_check_hostname: bool = True
    """Whether a certificate must name the host of the url. Nodes of a cluster and what Sentinel
    names are reached by the addresses that they announce."""
    prefix: str = "kvtiers"
    """How the names of all keys begin, so that others can use the same server."""
    ttl_s: float | None = None
    """After it a chunk that nobody used is removed by the server. Not set: it stays until memory
    is short."""
    capacity_bytes: int | None = None
    """Nothing is stored while the servers together use more memory than that. Not set: their
    ``maxmemory`` is the bound. Needs the right to say ``INFO``."""
    connect_timeout_s: float = 1.0
    """How long connecting may take."""
    timeout_s: float = 5.0
    """For how long a server may say nothing while it is asked, or take nothing."""
    max_batch_bytes: int = 8 << 20
    """Chunks are sent and asked for together, up to so many bytes or one chunk."""
    n_read_threads: int = 4
    n_write_threads: int = 4
    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"
    """What tier filters and KV events call it: of this node, or of another or shared."""
    enable_kv_events: bool = False
    """Whether chunks stored in it and removed from it appear among the engine's KV events."""

    def __post_init__(self) -> None:
        super().__post_init__()
        address = parse_address(self.url)
        self._refuse_logins(address.username, address.password)
        self._refuse_tls(address.tls)
        for key in ("sentinel_username", "sentinel_password_env", "sentinel_password_file"):
            given = getattr(self, key) is not None
            require(
                address.topology == "sentinel" or not given,
                key,
                f"is given, but {address} asks no Sentinel: leave it out",
            )
        require(
            _PREFIX.fullmatch(self.prefix) is not None,
            "prefix",
            f"is {self.prefix!a}: give up to 64 letters, digits or any of _ . : -",
        )
        require(
            self.ttl_s is None or 1 <= self.ttl_s <= _MAX_TTL_S,
            "ttl_s",
            f"is {self.ttl_s}: give 1 or more, and at most {_MAX_TTL_S:.0f}",
        )
        for name in ("capacity_bytes", "max_batch_bytes"):
            value = getattr(self, name)
            require(value is None or value > 0, name, f"is {value}: give more than 0")
        for name in ("connect_timeout_s", "timeout_s"):
            value = getattr(self, name)
            require(
                0 < value <= _MAX_TIMEOUT_S,
                name,
                f"is {value}: give more than 0, and at most {_MAX_TIMEOUT_S:.0f}",
            )

    def _refuse_logins(self, username: str | None, password: str | None) -> None:
        require(
            username is None or self.username is None,
            "username",
            "is given, and the url has one, too: leave one out",
        )
        for who in ("", "sentinel_"):
            env, file = f"{who}password_env", f"{who}password_file"
            given = [key for key in (env, file) if getattr(self, key) is not None]
            require(len(given) < 2, env, f"and {file} are both given: leave one out")
            require(
                not (given and password is not None) or bool(who),
                given[0] if given else env,
                "is given, and the url has a password, too: leave one out",
            )

    def _refuse_tls(self, tls: bool) -> None:
        for key in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            path = getattr(self, key)
            require(tls or path is None, key, "is given, but the url is not rediss://: write that")
            require(
                path is None or os.access(path, os.R_OK),
                key,
                f"is {path}, which cannot be read: is it there, and may this user read it?",
            )
        require(
            (self.tls_cert_file is None) == (self.tls_key_file is None),
            "tls_key_file",
            "and tls_cert_file go together: give both, or neither",
        )


def secret(options: KvOptions, who: str = "") -> str | None:
    """The password that the environment or a file holds; ``who`` is empty or ``sentinel_``.

    Raises ConfigError if it is not there.
    """
    variable = getattr(options, key := f"{who}password_env")
    if variable is not None:
        value = os.environ.get(variable, "")
        require(bool(value), key, f"is {variable}, which is not set in the environment: set it")
        return value
    path = getattr(options, key := f"{who}password_file")
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            value = file.readline(_MAX_SECRET_BYTES).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is no text"
        raise bad_option(key, f"is {path}, which cannot be read: {reason}") from None
    require(bool(value), key, f"is {path}, whose first line is empty: write the password there")
    return value
