"""Headers that a proxy passes on: all but those of one connection (RFC 9110, 7.6.1). Pure."""

from collections.abc import Iterable

Pairs = list[tuple[str, str]]

_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_OF_THE_BODY = {"host", "content-length", "content-type", "content-encoding", "expect"}
"""Of a request: its body is written anew."""


def to_worker(headers: Iterable[tuple[str, str]]) -> Pairs:
    """Those of a client's request; what describes its body is left to who sends it."""
    return [(name, value) for name, value in _end_to_end(headers) if _low(name) not in _OF_THE_BODY]


def to_client(headers: Iterable[tuple[str, str]]) -> Pairs:
    """Those of a worker's answer, whose body is passed on as it is."""
    return _end_to_end(headers)


def _end_to_end(headers: Iterable[tuple[str, str]]) -> Pairs:
    pairs = list(headers)
    named = {
        word.strip().lower()
        for name, value in pairs
        if _low(name) == "connection"
        for word in value.split(",")
    }
    return [(name, value) for name, value in pairs if _low(name) not in _HOP | named]


def _low(name: str) -> str:
    return name.lower()
