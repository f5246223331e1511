"""What the chunks of a request consist of, in the words of vLLM's events for blocks on the device.

The scheduler's thread notes a reference: a request and a range of its tokens. Here, on the
announcer's thread, a description is made of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

from kvtiers.chunks import Key
from kvtiers.hashing import event_hash
from kvtiers.kvevents.descriptions import Description


class How(NamedTuple):
    """Why a chunk was noted, and how its place is given."""

    expected: bool
    """It is about to be stored; else a lookup found it."""
    part: bool
    """It is a state that ends within a block, its place the tokens before its end; else a whole
    chunk, its place the index."""


STORED, FOUND = How(expected=True, part=False), How(expected=False, part=False)
STORED_PART, FOUND_PART = How(expected=True, part=True), How(expected=False, part=True)

Source = tuple[Any, Any, int, Key, How]
"""Request, configuration of the group, place, key, and how it was noted."""


def materialize(source: Source) -> tuple[Key, Description | None, bool]:
    """What vLLM says of these blocks when they are on the device; None: it does not know them."""
    request, config, place, key, how = source
    span, per_block = config.tokens_per_chunk, config.tokens_per_block
    per_hash = span // config.hashes_per_chunk
    start, end = place * span, place * span + span
    if how.part:
        start, end, per_block = (place - 1) // span * span, place, per_hash
    step = per_block // per_hash
    found = request.block_hashes[start // per_hash : end // per_hash][step - 1 :: step]
    before = request.block_hashes[start // per_hash - 1] if start else None
    tokens = request.all_token_ids[start:end]
    if len(tokens) < end - start or len(found) * per_block < end - start or None in found:
        return key, None, how.expected
    adapter = request.lora_request
    description = Description(
        parent=None if before is None else event_hash(before),
        hashes=[event_hash(h) for h in found],
        tokens=tokens,
        block_size=per_block,
        start=start,
        lora_id=None if adapter is None else adapter.adapter_id,
        lora_name=None if adapter is None else adapter.name,
        extra_keys=_extra_keys(request, range(start, end, per_block)),
    )
    return key, description, how.expected


def _extra_keys(request: Any, blocks: range) -> Sequence[Sequence[Any] | None] | None:
    """What the hashes of the blocks that start there cover beside tokens."""
    has_some = (
        request.mm_features
        or request.lora_request
        or request.cache_salt
        or request.prompt_embeds is not None
    )
    if not has_some:
        return None
    keys = [generate_block_hash_extra_keys(request, at, at + blocks.step, 0)[0] for at in blocks]
    if all(k is None for k in keys):
        return None
    told: Sequence[Sequence[Any] | None] | None = to_event_extra_keys(keys)
    return told
