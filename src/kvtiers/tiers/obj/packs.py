"""The format of a pack: an object with many small chunks. Pure.

It begins with its front, which says where they lie; behind it come their records
(:mod:`kvtiers.tiers.record`: the identity page, then the payload), each at an offset that is a
multiple of ``PAGE_BYTES`` if payloads are. Little-endian, zero where nothing is said::

    0   8  magic "KVTpack\\0"       16  16  namespace id
    8   2  format version          32   8  length of the pack
    10  2  zero                    40   .  entries
    12  4  number of entries       end-8 8 XXH3-64 of the front before it

An entry is offset (8 bytes), length of the record (8), length of the key (2), the key. Length 0
means that the chunk is gone: it was deleted, and no pack with an earlier name has it any more.

The front comes first because what lists packs knows the length of the front from their names and
reads it with one request for a range; it does not depend on metadata, of which stores keep 2 KiB
and do not list any, nor on ranges from the end, which Azure does not have.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES, Key, round_up
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers import record

VERSION = 1
MAX_PACK_BYTES = 64 << 20
"""No pack is made longer, unless one chunk is."""
MAX_FRONT_BYTES = 16 << 20
"""No front is longer: not of so many chunks of one byte with the longest keys."""
MAX_GONE = 16384
"""No pack says of more chunks that they are gone."""

_MAGIC = b"KVTpack\0"
_HEAD = struct.Struct("<8sHHI16sQ")
_ENTRY = struct.Struct("<QQH")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a chunk lies in a pack."""

    key: Key
    offset: int
    """Of its record, from the beginning of the pack."""
    length: int
    """Of its record in bytes; 0: it is gone."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the chunk."""
        return max(0, self.length - PAGE_BYTES)


def front_pages(keys: Sequence[Key]) -> int:
    """How many pages the front of a pack with these chunks takes."""
    entries = sum(_ENTRY.size + len(key) for key in keys)
    return round_up(_HEAD.size + entries + _CHECKSUM.size) // PAGE_BYTES


def lay_out(keys: Sequence[Key], payload_sizes: Sequence[int]) -> list[Packed]:
    """Where the records of these chunks lie, one behind the other."""
    at = front_pages(keys) * PAGE_BYTES
    entries = []
    for key, size in zip(keys, payload_sizes, strict=True):
        entries.append(Packed(key, at, PAGE_BYTES + size))
        at += PAGE_BYTES + size
    return entries


def gone(keys: Sequence[Key]) -> list[Packed]:
    """The entries that say of these chunks that they are gone."""
    return [Packed(key, 0, 0) for key in keys]


def pack_front(namespace_id: str, entries: Sequence[Packed]) -> bytes:
    """The front of a pack with these chunks. ``namespace_id`` is 32 hex digits.

    Raises KVTiersError (``Kind.UNSUPPORTED``) for a key above ``record.MAX_KEY_BYTES``.
    """
    length = front_pages([entry.key for entry in entries]) * PAGE_BYTES
    end = max((e.offset + e.length for e in entries), default=0)
    whole = max(length, end)
    head = _HEAD.pack(_MAGIC, VERSION, 0, len(entries), bytes.fromhex(namespace_id), whole)
    body = (head + b"".join(map(_row, entries))).ljust(length - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def _row(entry: Packed) -> bytes:
    if len(entry.key) > record.MAX_KEY_BYTES:
        raise record.key_too_long(entry.key)
    return _ENTRY.pack(entry.offset, entry.length, len(entry.key)) + entry.key


def parse_front(front: bytes | memoryview, namespace_id: str) -> list[Packed] | KVTiersError:
    """What a front says, or why (``Kind.CORRUPT``) it says nothing."""
    front = bytes(front)
    if len(front) > MAX_FRONT_BYTES:
        return _corrupt("its front is longer than any")
    if len(front) < PAGE_BYTES or len(front) % PAGE_BYTES:
        return _corrupt(f"its front is short: {len(front)} bytes")
    magic, version, _, count, namespace, whole = _HEAD.unpack_from(front)
    if magic != _MAGIC:
        return _corrupt("it is no pack of kvtiers, or its front is damaged")
    if version != VERSION:
        return _corrupt(
            f"it has format version {version}, this kvtiers reads version {VERSION}: "
            "use the kvtiers that wrote it or delete it"
        )
    body = front[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(front[-_CHECKSUM.size :])[0] != xxh3_64_intdigest(body):
        return _corrupt("its front is damaged: the checksum differs")
    if namespace.hex() != namespace_id:
        return _corrupt(f"it is of the foreign namespace {namespace.hex()}")
    entries = _entries(body, count)
    if entries is None or any(e.length and _outside(e, len(front), whole) for e in entries):
        return _corrupt("its front contradicts itself")
    return entries


def _outside(entry: Packed, front: int, whole: int) -> bool:
    end = entry.offset + entry.length
    return entry.length < PAGE_BYTES or entry.offset < front or end > whole


def _entries(body: bytes, count: int) -> list[Packed] | None:
    at, found = _HEAD.size, []
    for _ in range(count):
        if at + _ENTRY.size > len(body):
            return None
        offset, length, key_bytes = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        if at + key_bytes > len(body):
            return None
        found.append(Packed(Key(body[at : at + key_bytes]), offset, length))
        at += key_bytes
    return found


def _corrupt(what: str) -> KVTiersError:
    return KVTiersError(f"a pack cannot be used: {what}", kind=Kind.CORRUPT, operation="read")
