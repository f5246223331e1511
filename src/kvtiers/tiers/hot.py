"""The hot list: which chunks to have in host memory before anybody asks.

A JSON document: ``{"format": "kvtiers-warm", "version": 1, "prefixes": [{"namespace": ID,
"keys": [HEX, ...]}, ...]}``. The hottest come first; within a prefix, its beginning.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import Key
from kvtiers.errors import ConfigError
from kvtiers.tiers.whole import whole_file

FORMAT = "kvtiers-warm"
VERSION = 1

_MAX_BYTES = 256 << 20
_LEAST_KEY = 4
"""Bytes of the group's index, with which every key ends."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """Chunks of one namespace, in the order in which they are worth having."""

    namespace: str
    keys: tuple[Key, ...]


def write_hot_list(path: str, prefixes: Sequence[HotPrefix]) -> None:
    """Write ``path`` whole or not at all. Raises KVTiersError."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "prefixes": [
            {"namespace": p.namespace, "keys": [k.hex() for k in p.keys]} for p in prefixes
        ],
    }
    with whole_file(path) as file:
        file.write(json.dumps(document, indent=1).encode() + b"\n")


def read_hot_list(path: str) -> list[HotPrefix]:
    """What ``path`` says. Raises ConfigError, naming the file, if it is no hot list."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path!a} cannot be read: {e.strerror}") from None
    try:
        document: Any = json.loads(text) if len(text) <= _MAX_BYTES else None
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError
        return list(_prefixes(document["prefixes"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(
            f"{path!a} is no hot list of version {VERSION}: write it with kvtiers warm"
        ) from None


def _prefixes(listed: Any) -> Iterator[HotPrefix]:
    for each in listed:
        keys = tuple(Key(bytes.fromhex(key)) for key in each["keys"])
        if not isinstance(each["namespace"], str) or any(len(k) < _LEAST_KEY for k in keys):
            raise ValueError
        yield HotPrefix(each["namespace"], keys)
