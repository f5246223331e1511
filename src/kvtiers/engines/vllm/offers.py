"""Which chunks of a request vLLM offers next: arithmetic on its per-group states.

vLLM keeps, per request and KV-cache group, the blocks on the device (``block_ids``, 0 where a
block is gone) and the next chunk to offer (``next_stored_chunk_idx``). Groups of full attention
hold their blocks while the request runs. Groups with a window, or state, give blocks back, and
others reuse them: vLLM marks reused ones only from the next chunk on, so what lies below it must
never be offered again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import Key, key_group


def has_window(config: Any) -> bool:
    """Whether a group gives blocks back while its request runs."""
    return config.sliding_window_size_in_chunks is not None


def forget_below_next(configs: Sequence[Any], states: Sequence[Any], per_chunk: int) -> None:
    """Mark the blocks of window groups that were offered as gone: they may be another's now."""
    for config, state in zip(configs, states, strict=True):
        if has_window(config):
            count = min(len(state.block_ids), state.next_stored_chunk_idx * per_chunk)
            state.block_ids[:count] = [0] * count


def mark_partial_chunks(config: Any, state: Any, per_chunk: int, end_chunk: int) -> None:
    """Mark window chunks that lost a block, so that they are not stored with zeros in them."""
    if per_chunk == 1 or not has_window(config) or config.requires_cow_source:
        return
    blocks = state.block_ids
    end = min(len(blocks) // per_chunk, end_chunk)
    for chunk in range(state.next_stored_chunk_idx, end):
        start = chunk * per_chunk
        if 0 in blocks[start : start + per_chunk]:
            blocks[start + per_chunk - 1] = 0


def first_chunks(configs: Sequence[Any], keys: Iterable[Key], end_of: Any) -> dict[int, int]:
    """The first chunk of ``keys`` by group; ``end_of(key)`` is where a chunk ends, in tokens."""
    spans = {c.group_idx: c.tokens_per_chunk for c in configs}
    first: dict[int, int] = {}
    for key in keys:
        group, end = key_group(key), end_of(key)
        if end is not None and group in spans:
            index = max(0, end // spans[group] - 1)
            first[group] = min(first.get(group, index), index)
    return first


def rewind(
    configs: Sequence[Any], states: Sequence[Any], first: dict[int, int], *, windows: bool
) -> None:
    """Offer again from ``first`` on: groups with a window, or those without."""
    for config, state in zip(configs, states, strict=True):
        if has_window(config) == windows and config.group_idx in first:
            index = first[config.group_idx]
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, index)


@dataclass(slots=True)
class Declined:
    """Chunks of one request for which there was no room, and when to offer them again.

    Two requests that do not fit beside each other would push each other out for ever, so each new
    offer waits for twice as many changes of room as the one before.
    """

    first: dict[int, int]
    """The first declined chunk, by group index."""
    epoch: int
    patience: int = 1

    def due(self, epoch: int) -> bool:
        """Whether it is time to offer them again."""
        return epoch - self.epoch >= self.patience

    def again(self, first: dict[int, int], epoch: int) -> None:
        """They were declined once more."""
        self.first, self.epoch = first, epoch
        self.patience *= 2

    def check(self, epoch: int) -> None:
        """Raise AssertionError if it waits for what is over at ``epoch``, or backwards."""
        assert self.epoch <= epoch, "declined in an epoch that is to come"
        assert self.patience.bit_count() == 1, "its patience did not double"
