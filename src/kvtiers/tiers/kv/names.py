"""What keys of the server are called: ``<prefix>:<namespace id>:<digest hex>-g<group>``.

No name has braces, so that a cluster spreads the chunks of a namespace over all of its slots.
"""

import re

from kvtiers.chunks import Key, key_digest, key_group, make_key
from kvtiers.tiers.places import Part

_CHUNK = re.compile(rb"((?:[0-9a-f]{2})*)-g(0|[1-9][0-9]{0,9})")
_MANIFEST = b"manifest"
_NAMESPACE = re.compile(rb"([0-9a-f]{32}):.*", re.DOTALL)
TRIAL = "trial-"
"""How the rest of a prefix begins below which a measurement stores; it leaves by itself."""


class Names:
    """Of one namespace under one prefix."""

    def __init__(self, prefix: str, namespace_id: str) -> None:
        self._start = f"{prefix}:{namespace_id}:".encode()
        self.manifest = self._start + _MANIFEST
        self.pattern = self._start + b"*"
        """What ``SCAN`` is to match."""

    def __repr__(self) -> str:
        return self._start.decode().rstrip(":")

    def of(self, key: Key) -> bytes:
        """The name of a chunk."""
        return b"%b%b-g%d" % (self._start, key_digest(key).hex().encode(), key_group(key))

    def key(self, name: bytes) -> Key | None:
        """The chunk of that name; None if it is no chunk's."""
        if not name.startswith(self._start):
            return None
        match = _CHUNK.fullmatch(name, len(self._start))
        if match is None or int(match[2]) >= 1 << 32:
            return None
        return make_key(bytes.fromhex(match[1].decode()), int(match[2]))


def part_of(prefix: str, name: bytes) -> tuple[str, Part]:
    """Whose a name below ``prefix:`` is, and what for; of no namespace: an empty id."""
    rest = name.removeprefix(f"{prefix}:".encode())
    match = _NAMESPACE.fullmatch(rest)
    if match is None:
        return "", Part.TRIAL if rest.startswith(TRIAL.encode()) else Part.FOREIGN
    namespace_id = match[1].decode()
    names = Names(prefix, namespace_id)
    if name == names.manifest:
        return namespace_id, Part.OTHER
    return namespace_id, Part.FOREIGN if names.key(name) is None else Part.CHUNKS
