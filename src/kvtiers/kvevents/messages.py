"""What an engine says about its cache, in the encoding of vLLM 0.24 and later.

A message is three ZeroMQ frames: topic (UTF-8), sequence number (8 bytes, big-endian), payload. The
payload is MessagePack: ``[seconds since the epoch, [event, ...], data-parallel rank or nil]``. An
event is a map whose ``type`` names its class. Those of vLLM up to 0.23, and of SGLang, are arrays
that begin with that name and have the fields in the order of the classes here.

A block is ``block_size`` tokens of one KV-cache group. Its hash is an unsigned integer (the last 8
bytes of the digest, big-endian) or the digest itself, as the publisher was told.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvtiers.hashing import event_hash

SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_BYTES
"""In place of a sequence number: the replay is complete."""

BlockHash = int | bytes
_64_BITS = (1 << 64) - 1


def hash_number(named: BlockHash) -> int:
    """The 64 bits by which a block is known, whichever way its publisher names it."""
    return event_hash(named) if isinstance(named, bytes) else named & _64_BITS


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """These consecutive blocks are resident in ``medium`` from now on.

    No tokens, with a ``block_size`` of 0, means that the hash is all that is known of a block.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    """The block before the first one; None: a sequence starts here."""
    token_ids: Sequence[int]
    """``block_size`` for each hash."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """``GPU``, ``CPU`` or ``STORAGE``; None, of old publishers, is the accelerator."""
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    """Per block what its hash covers beside tokens, untagged, as in vLLM's own events."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``, seen from the publisher."""
    ownership: str | None = None
    """Which of several tiers of one medium."""
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """These blocks are no longer resident in ``medium``."""

    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The publisher forgot all that it ever said, whatever the medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What one payload holds."""

    time: float
    """Seconds since the epoch."""
    events: Sequence[KVEvent]
    rank: int | None = None
    """Index of the data-parallel engine."""
    unknown: int = 0
    """Events that were left out when it was read, since their class is not known here."""


class MalformedEvent(ValueError):
    """Bytes are no payload of events. Says what is wrong with them."""


_CLASSES: Mapping[str, type[KVEvent]] = {
    c.__name__: c for c in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_ALWAYS = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0}
"""How many fields are on the wire also when they are None: readers ask for them."""


def encode(batch: Batch) -> bytes:
    """The payload that says this."""
    return msgspec.msgpack.encode([batch.time, [_as_map(e) for e in batch.events], batch.rank])


def encode_within(batch: Batch, max_bytes: int) -> Iterator[bytes]:
    """Payloads that say this, one after the other, each of at most so many bytes.

    A larger one says something of a single block.
    """
    payload = encode(batch)
    halves = _halves(batch.events) if len(payload) > max_bytes else ()
    for events in halves:
        yield from encode_within(msgspec.structs.replace(batch, events=events), max_bytes)
    if not halves:
        yield payload


def _halves(events: Sequence[KVEvent]) -> Sequence[Sequence[KVEvent]]:
    """The same in two parts; none if it cannot be divided."""
    if len(events) > 1:
        half = len(events) // 2
        return events[:half], events[half:]
    return [[part] for event in events for part in _halved(event)]


def _halved(event: KVEvent) -> Sequence[KVEvent]:
    """The same of half of its blocks each; none if it cannot be divided."""
    if isinstance(event, AllBlocksCleared):
        return ()
    hashes, half = event.block_hashes, len(event.block_hashes) // 2
    if not half:
        return ()
    first: dict[str, Any] = {"block_hashes": hashes[:half]}
    rest: dict[str, Any] = {"block_hashes": hashes[half:]}
    if isinstance(event, BlockStored):
        tokens, extra = half * event.block_size, event.extra_keys
        first["token_ids"], rest["token_ids"] = event.token_ids[:tokens], event.token_ids[tokens:]
        rest["parent_block_hash"] = hashes[half - 1]
        if extra is not None:
            first["extra_keys"], rest["extra_keys"] = extra[:half], extra[half:]
    return msgspec.structs.replace(event, **first), msgspec.structs.replace(event, **rest)


def decode(payload: bytes) -> Batch:
    """What a payload says. Fields that are not known here are ignored.

    Raises MalformedEvent if it is no payload, or some event of a known class is not whole.
    """
    try:
        outer = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as e:
        raise MalformedEvent(f"the payload is no MessagePack: {e}") from e
    match outer:
        case [float() | int() as time, list(raw), *rest] if len(rest) <= 1:
            found = [_event(one) for one in raw]
        case _:
            raise MalformedEvent("the payload is not [time, events, rank]")
    events = [event for event in found if event is not None]
    rank = _converted(rest[0] if rest else None, int | None)
    return Batch(float(time), events, rank, unknown=len(found) - len(events))


def _event(raw: object) -> KVEvent | None:
    match raw:
        case {"type": str(name)} | [str(name), *_]:
            kind = _CLASSES.get(name)
        case _:
            raise MalformedEvent("an event is neither a map with a type nor an array with a name")
    if kind is None:
        return None
    if isinstance(raw, list):
        raw = dict(zip(kind.__struct_fields__, raw[1:], strict=False))
    return _converted(raw, kind)  # type: ignore[no-any-return]


def _converted(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as e:
        raise MalformedEvent(f"a field is not what it should be: {e}") from e


def _as_map(event: KVEvent) -> dict[str, Any]:
    names = event.__struct_fields__
    always = names[: _ALWAYS[type(event)]]
    said: dict[str, Any] = {"type": type(event).__name__}
    for name in names:
        value = getattr(event, name)
        if value is not None or name in always:
            said[name] = value
    return said
