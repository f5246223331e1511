"""What objects are called, below the prefix of a tier. Pure.

::

    <namespace>/manifest.json
    <namespace>/<2 hex>/<digest hex>-g<group>.kvc            a chunk from PACK_BELOW_BYTES on
    <namespace>/packs/<12 hex ms>-<8 hex>-<front pages>.kvp  smaller ones; see packs.py

The names of chunks are those of ``fs``. Names of packs sort by the time at which they were made,
so that what is new is found by listing from a name on; and they say how long the front is, so that
it takes one request to read it.
"""

import re
from dataclasses import dataclass

from kvtiers.chunks import Key
from kvtiers.tiers.fs import names as fs_names
from kvtiers.tiers.places import Part

PACK_BELOW_BYTES = 256 << 10
"""Chunks of at least so many bytes have an object of their own. Engines that share a prefix agree
on it, since the length of a chunk says where to look for it: it is part of the format."""

MANIFEST = fs_names.MANIFEST
TRIAL = fs_names.TRIAL
"""So begins what a measurement writes."""
PACKS = "packs"

_PACK = re.compile(r"([0-9a-f]{12})-([0-9a-f]{8})-([1-9][0-9]{0,5})\.kvp")
_MAX_MS = (1 << 48) - 1


def manifest_name(namespace_id: str) -> str:
    """The object that says what a namespace is."""
    return f"{namespace_id}/{MANIFEST}"


def chunk_name(namespace_id: str, key: Key) -> str:
    """The object of a chunk that is not packed."""
    return f"{namespace_id}/{fs_names.chunk_path(key)}"


def key_of(namespace_id: str, name: str) -> Key | None:
    """The chunk that an object of this name holds; None if it is no chunk of that namespace."""
    folders = name.split("/")
    if len(folders) != 3 or folders[0] != namespace_id:
        return None
    return fs_names.key_at(folders[1], folders[2])


def is_namespace(name: str) -> bool:
    """Whether what lies below this name is a namespace."""
    return fs_names.is_namespace(name)


def is_ours(folder: str) -> bool:
    """Whether what lies below this name is a namespace or of a measurement."""
    return is_namespace(folder) or folder.startswith(TRIAL)


def part_of(name: str) -> tuple[str, Part]:
    """Whose an object is, and what for; of no namespace: an empty id."""
    first, _, rest = name.partition("/")
    if first.startswith(TRIAL) and rest:
        return "", Part.TRIAL
    if not (is_namespace(first) and rest):
        return "", Part.FOREIGN
    is_chunk = key_of(first, name) is not None or pack_at(first, name) is not None
    return first, Part.CHUNKS if is_chunk else Part.OTHER


def packs_below(namespace_id: str) -> str:
    """What the names of all packs of a namespace begin with, up to a slash."""
    return f"{namespace_id}/{PACKS}"


@dataclass(frozen=True, slots=True, order=True)
class PackName:
    """The name of a pack. The later one has the last word on the chunks that both name."""

    time_ms: int
    """Milliseconds since the epoch, by the clock of its writer; more if it knew a later one."""
    nonce: int
    """32 random bits."""
    front_pages: int
    """Length of its front in pages."""

    def __str__(self) -> str:
        return f"{self.time_ms:012x}-{self.nonce:08x}-{self.front_pages}.kvp"

    def below(self, namespace_id: str) -> str:
        """The object of this pack."""
        return f"{packs_below(namespace_id)}/{self}"


def pack_at(namespace_id: str, name: str) -> PackName | None:
    """The pack that an object of this name is; None if it is none of that namespace."""
    folder, _, last = name.rpartition("/")
    match = _PACK.fullmatch(last)
    if match is None or folder != packs_below(namespace_id):
        return None
    return PackName(int(match[1], 16), int(match[2], 16), int(match[3]))


def packs_since(namespace_id: str, time_ms: int) -> str:
    """A name that sorts before every pack of that time and later, and after all earlier ones."""
    return f"{packs_below(namespace_id)}/{min(max(time_ms, 0), _MAX_MS):012x}"


def next_time_ms(now_s: float, newest: PackName | None) -> int:
    """The time in the name of a new pack: later than ``newest``, whoever's clock is behind."""
    now = max(0, int(now_s * 1000))
    return min(_MAX_MS, now if newest is None else max(now, newest.time_ms + 1))
