"""What a chunk consists of, as a record of at most 64 bytes a block and 4 a token.

All integers are little-endian. A record is, after the CRC-32 of what follows the CRC:

========  =====================================================================
4 bytes   CRC-32
4         length of the whole record
2         index of the KV-cache group
1         flags: 1, there is a parent; 2, the last hash is the end of the key
2         number of hashes
4         tokens of a block
4         position of the first token in the sequence
8         parent: the hash of the block before
16        the last 16 bytes of the digest in the chunk's key
8 each    hashes of the blocks; with flag 2 without the last one
4 each    tokens
the rest  MessagePack of [LoRA id, LoRA name, extra keys per block], if there are any
========  =====================================================================
"""

import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvtiers.chunks import Key, key_digest, key_group

_CRC_BYTES = 4
_HEAD = struct.Struct("<IHBHIIQ16s")
"""Without the CRC."""
HEAD_BYTES = _CRC_BYTES + _HEAD.size
_HAS_PARENT, _LAST_IS_KEY = 1, 2
MAX_RECORD_BYTES = 1 << 24
"""A length above it is damage."""


class Description(NamedTuple):
    """The blocks of one chunk, in order."""

    parent: int | None
    """Hash of the block before; None: a sequence starts here."""
    hashes: Sequence[int]
    tokens: Sequence[int]
    """``block_size`` for each hash; below 2**32."""
    block_size: int
    start: int
    """Position of the first token in its sequence."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    """Per block what its hash covers beside tokens, untagged; None: nothing for any block."""


class Record(NamedTuple):
    """A description and whose it is."""

    tail: bytes
    """The last 16 bytes of the digest in the key."""
    group: int
    description: Description


class Damaged(ValueError):
    """Bytes are no record."""


def tail_of(key: Key) -> bytes:
    """By what a record knows its key."""
    return key_digest(key)[-16:].rjust(16, b"\0")


def encode(key: Key, d: Description) -> bytes:
    """The record of a chunk. Raises ValueError if it is not sound: a token that is no u32, say."""
    if not d.hashes or len(d.tokens) != d.block_size * len(d.hashes):
        raise ValueError(f"{len(d.hashes)} blocks of {d.block_size} have {len(d.tokens)} tokens")
    tail = tail_of(key)
    flags = 0 if d.parent is None else _HAS_PARENT
    hashes = d.hashes
    if int.from_bytes(tail[-8:], "big") == hashes[-1]:
        flags |= _LAST_IS_KEY
        hashes = hashes[:-1]
    rest = b""
    if d.lora_id is not None or d.lora_name is not None or d.extra_keys is not None:
        rest = msgspec.msgpack.encode([d.lora_id, d.lora_name, d.extra_keys])
    try:
        body = _packed("Q", hashes) + _packed("I", d.tokens) + rest
        size = HEAD_BYTES + len(body)
        if size > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {size} bytes could not be read again")
        start, parent, count = d.start, d.parent or 0, len(d.hashes)
        group = key_group(key)
        head = _HEAD.pack(size, group, flags, count, d.block_size, start, parent, tail)
    except (OverflowError, struct.error) as e:
        raise ValueError(f"a number does not fit its place: {e}") from e
    checked = head + body
    return zlib.crc32(checked).to_bytes(_CRC_BYTES, "little") + checked


def length(head: bytes) -> int:
    """Bytes of the record that begins so. Raises Damaged."""
    if len(head) < HEAD_BYTES:
        raise Damaged("it ends within a head")
    size = int.from_bytes(head[4:8], "little")
    if not HEAD_BYTES <= size <= MAX_RECORD_BYTES:
        raise Damaged(f"a record of {size} bytes")
    return size


def decode(record: bytes) -> Record:
    """What a record says. Raises Damaged unless it is whole."""
    size = length(record[:HEAD_BYTES])
    if len(record) != size or zlib.crc32(record[4:]) != int.from_bytes(record[:4], "little"):
        raise Damaged("the checksum is another")
    try:
        return _decoded(record, size)
    except (ValueError, TypeError, msgspec.DecodeError) as e:
        raise Damaged(f"its parts do not fit together: {e}") from e


def _decoded(record: bytes, size: int) -> Record:
    _, group, flags, count, block_size, start, parent, tail = _HEAD.unpack_from(record, _CRC_BYTES)
    stored = count - bool(flags & _LAST_IS_KEY)
    at = HEAD_BYTES + 8 * stored
    end = at + 4 * count * block_size
    if not count or end > size:
        raise ValueError(f"{count} blocks of {block_size} tokens in {size} bytes")
    hashes = _unpacked("Q", record[HEAD_BYTES:at])
    if flags & _LAST_IS_KEY:
        hashes.append(int.from_bytes(tail[-8:], "big"))
    rest = msgspec.msgpack.decode(record[end:]) if end < size else (None, None, None)
    tokens = _unpacked("I", record[at:end])
    known = parent if flags & _HAS_PARENT else None
    return Record(tail, group, Description(known, hashes, tokens, block_size, start, *rest))


def _packed(kind: str, values: Sequence[int]) -> bytes:
    if not values:
        return b""
    packed = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(kind: str, data: bytes) -> list[int]:
    values = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
