"""Where servers are: a URL, read once.

::

    redis://[user[:password]@]host[:6379][/db]          one server
    unix://[user[:password]@]/path/to/socket[?db=2]     one server, on this machine
    redis+cluster://host[:6379][,host[:6379]...]        a cluster, found through any of these
    redis+sentinel://host[:26379][,host...]/service[/db]    whoever Sentinel says leads the service

``rediss`` instead of ``redis`` is TLS; ``valkey`` and ``valkeys`` are other words for the two.
"""

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtiers.errors import ConfigError
from kvtiers.tiers.options import bad_option

Topology = Literal["single", "cluster", "sentinel"]
Host = tuple[str, int]

_PORT = 6379
_SENTINEL_PORT = 26379
_SCHEME = re.compile(r"(redis|valkey)(s?)(?:\+(cluster|sentinel))?|unix")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:,/@?#\s]+)(?::([0-9]{1,5}))?")
SCHEMES = "redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://"


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL says."""

    topology: Topology
    hosts: tuple[Host, ...]
    """To begin with: of Sentinels where the topology is that; none where ``path`` is given."""
    tls: bool = False
    path: str = ""
    """A socket of this machine."""
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """The URL without who logs in, for people and logs."""
        if self.path:
            return f"unix://{self.path}" + (f"?db={self.db}" if self.db else "")
        scheme = "rediss" if self.tls else "redis"
        if self.topology != "single":
            scheme += f"+{self.topology}"
        hosts = ",".join(map(host_and_port, self.hosts))
        service = f"/{self.service}" if self.service else ""
        return f"{scheme}://{hosts}{service}" + (f"/{self.db}" if self.db else "")


def host_and_port(host: Host) -> str:
    """As a URL has it."""
    name, port = host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def parse_address(url: str) -> Address:
    """Read a URL. Raises ConfigError about ``url``, without a word of what may be a password."""
    scheme, mark, _ = url.partition("://")
    matched = _SCHEME.fullmatch(scheme)
    if not mark or matched is None:
        said = f"begins with {scheme!a}" if mark else "is no URL"
        raise bad_option("url", f"{said}: write one that begins with {SCHEMES}")
    try:
        split = urlsplit(url)
    except ValueError:
        raise _wrong("it cannot be read", matched) from None
    if split.fragment:
        raise _wrong("it has a #, which is written %23 in a password", matched)
    login, _, place = split.netloc.rpartition("@")
    user, _, password = login.partition(":")
    who = unquote(user) or None, unquote(password) or None
    if scheme == "unix":
        return _unix(place, split.path, _database(split.query, matched), who, matched)
    if split.query:
        raise _wrong("it has a ?, and options stand beside the url", matched)
    topology: Topology = matched[3] or "single"  # type: ignore[assignment]
    hosts = _hosts(place, _SENTINEL_PORT if topology == "sentinel" else _PORT, matched)
    if topology == "single" and len(hosts) > 1:
        raise _wrong("it names several servers: write redis+cluster:// or redis+sentinel://")
    service, db = _path(topology, split.path, matched)
    return Address(topology, hosts, bool(matched[2]), "", service, db, *who)


def _unix(
    host: str, path: str, db: int, who: tuple[str | None, str | None], matched: re.Match[str]
) -> Address:
    if host or not path.strip("/"):
        raise _wrong("it names no socket", matched)
    return Address("single", (), False, unquote(path), "", db, *who)


def _hosts(place: str, port: int, matched: re.Match[str]) -> tuple[Host, ...]:
    found = []
    for each in place.split(","):
        host = _HOST.fullmatch(each)
        if host is None or not 0 < int(host[2] or port) < 1 << 16:
            raise _wrong("it names no server, or not as host or host:port", matched)
        found.append((host[1].strip("[]"), int(host[2] or port)))
    return tuple(found)


def _path(topology: Topology, path: str, matched: re.Match[str]) -> tuple[str, int]:
    """The service and the number of the database."""
    words = [unquote(word) for word in path.strip("/").split("/") if word]
    service = ""
    if topology == "sentinel":
        if not words:
            raise _wrong("it names no service", matched)
        service = words.pop(0)
    if not words:
        return service, 0
    if topology == "cluster" or len(words) > 1 or not words[0].isdecimal():
        what = "a cluster has no databases" if topology == "cluster" else "a database is a number"
        raise _wrong(what, matched)
    return service, int(words[0])


def _database(query: str, matched: re.Match[str]) -> int:
    pairs = parse_qsl(query, keep_blank_values=True)
    if not pairs:
        return 0
    if len(pairs) > 1 or pairs[0][0] != "db" or not pairs[0][1].isdecimal():
        raise _wrong("after ? there may be db=NUMBER, and options stand beside the url", matched)
    return int(pairs[0][1])


_EXAMPLES = {
    None: "redis://host:6379/0",
    "cluster": "redis+cluster://host:6379,other:6379",
    "sentinel": "redis+sentinel://host:26379,other:26379/service",
}


def _wrong(what: str, matched: re.Match[str] | None = None) -> ConfigError:
    example = _EXAMPLES[matched[3] if matched else None]
    if matched is not None and matched[0] == "unix":
        example = "unix:///run/valkey.sock?db=0"
    return bad_option("url", f"is not understood: {what}; write one like {example}")
