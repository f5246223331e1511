"""The identity page in front of every stored chunk.

One page of ``PAGE_BYTES``, little-endian, zero where nothing is said::

    0   8  magic "KVTchunk"        24   8  XXH3-64 of the payload
    8   2  format version          32  16  namespace id
    10  2  length of the key       48   .  key
    12  4  zero
    16  8  length of the payload   4088 8  XXH3-64 of bytes 0..4088 of this page

XXH3 finds accidents (bit rot, torn or swapped files), not forgery. A reader of format N also
reads N-1; there is only one format yet. Magic and version keep their place in every format.
"""

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError

VERSION = 1
MAX_KEY_BYTES = 512

_MAGIC = b"KVTchunk"
_FIELDS = struct.Struct("<8sHHIQQ16s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = PAGE_BYTES - _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Record:
    """What an intact identity page says."""

    namespace_id: str
    key: Key
    payload_bytes: int
    payload_xxh3: int


def pack(key: Key, namespace_id: str, payload: memoryview | bytes) -> bytes:
    """The identity page of ``payload``. ``namespace_id`` is 32 hex digits.

    Raises KVTiersError (``Kind.UNSUPPORTED``) for a key above ``MAX_KEY_BYTES``.
    """
    body = _start(key, namespace_id, payload).ljust(_CHECKSUM_AT, b"\0")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def shorten(page: bytes, key: Key) -> bytes:
    """The page of ``key`` without its zeros, for a medium that has no pages."""
    return page[: _FIELDS.size + len(key)] + page[_CHECKSUM_AT:]


def shortened_bytes(key: Key) -> int:
    """How long ``shorten`` makes the page of ``key``."""
    return _FIELDS.size + len(key) + _CHECKSUM.size


def lengthen(shortened: bytes) -> bytes:
    """The page that was shortened; if it was damaged since, ``verify`` finds out."""
    start, checksum = shortened[: -_CHECKSUM.size], shortened[-_CHECKSUM.size :]
    return start.ljust(_CHECKSUM_AT, b"\0") + checksum


def _start(key: Key, namespace_id: str, payload: memoryview | bytes) -> bytes:
    if len(key) > MAX_KEY_BYTES:
        raise key_too_long(key)
    checksum, namespace = xxh3_64_intdigest(payload), bytes.fromhex(namespace_id)
    return _FIELDS.pack(_MAGIC, VERSION, len(key), 0, len(payload), checksum, namespace) + key


def key_too_long(key: Key) -> KVTiersError:
    """The error for a key that no page has room for."""
    return KVTiersError(
        f"a key of {len(key)} bytes cannot be stored: the limit is {MAX_KEY_BYTES}",
        kind=Kind.UNSUPPORTED,
        operation="write",
    )


def parse(header: bytes) -> Record | KVTiersError:
    """Read an identity page, or say (``Kind.CORRUPT``) why it is none."""
    if len(header) != PAGE_BYTES:
        return _corrupt(f"the header is short: {len(header)} of {PAGE_BYTES} bytes")
    magic, version, key_bytes, _, length, checksum, namespace = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        return _corrupt("the header is damaged: this is no kvtiers chunk")
    if version != VERSION:
        return _corrupt(
            f"it has format version {version}, this kvtiers reads version {VERSION}: "
            "use the kvtiers that wrote it or delete it"
        )
    if not _intact(header):
        return _corrupt("the header is damaged: its checksum differs")
    key = Key(header[_FIELDS.size : _FIELDS.size + key_bytes])
    return Record(namespace.hex(), key, length, checksum)


def _intact(header: memoryview | bytes) -> bool:
    if len(header) != PAGE_BYTES:
        return False
    (expected,) = _CHECKSUM.unpack_from(header, _CHECKSUM_AT)
    return bool(xxh3_64_intdigest(header[:_CHECKSUM_AT]) == expected)


def verify(
    header: memoryview | bytes, key: Key, namespace_id: str, payload: memoryview | bytes
) -> KVTiersError | None:
    """None if ``payload`` is the whole chunk ``key`` of that namespace, else what differs.

    The error is ``Kind.CORRUPT`` and names the field: damaged, short, foreign key, foreign
    namespace, or another format version.
    """
    if _intact(header):
        start = _start(key, namespace_id, payload)
        if bytes(header[: len(start)]) == start:
            return None
    record = parse(bytes(header))
    if isinstance(record, KVTiersError):
        return record
    if record.namespace_id != namespace_id:
        return _corrupt(f"it is of the foreign namespace {record.namespace_id}")
    if record.key != key:
        return _corrupt(f"it holds the foreign key {record.key.hex()}")
    if record.payload_bytes != len(payload):
        how = "short" if len(payload) < record.payload_bytes else "long"
        return _corrupt(
            f"the stored payload is {how}: {len(payload)} bytes instead of {record.payload_bytes}"
        )
    if xxh3_64_intdigest(payload) != record.payload_xxh3:
        return _corrupt("the payload is damaged: its checksum differs")
    return None


def _corrupt(what: str) -> KVTiersError:
    return KVTiersError(
        f"a stored chunk cannot be used: {what}", kind=Kind.CORRUPT, operation="read"
    )
