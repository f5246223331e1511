"""What a stream of events has said so far, kept as compactly as what tiers hold.

Publishers repeat themselves: two blocks of one content on a device are told of twice, and removed
twice. So what is said more than once is counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvtiers.chunks import Key, make_key
from kvtiers.events import ChunksRemoved, ChunksStored, Reason
from kvtiers.kvevents.descriptions import Description
from kvtiers.kvevents.messages import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    hash_number,
)
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place


class StreamFold:
    """Takes the events of one publisher, gives them back without what is superseded."""

    def __init__(self, make_side: Callable[[], SideFile]) -> None:
        """``make_side`` gives an empty file for what describes blocks. Raises OSError."""
        self._make_side = make_side
        self._groups: dict[int, Group] = {}
        self._repeated: Counter[tuple[str, Key]] = Counter()
        self.narrator = Narrator({}, self._groups, make_side())

    def take(self, event: KVEvent) -> bool:
        """The publisher said this. True if by it everything before is void."""
        if isinstance(event, AllBlocksCleared):
            self.narrator.close()
            self._repeated.clear()
            self.narrator = Narrator({}, self._groups, self._make_side())
            return True
        group = event.group_idx or 0
        label = self._label(event)
        keys = [_key(h, group) for h in event.block_hashes]
        if isinstance(event, BlockRemoved):
            gone = [key for key in keys if not self._forget_one(label, key)]
            self.narrator.take(ChunksRemoved(label, tuple(gone), Reason.EVICTED))
        else:
            for key in keys:
                if self.narrator.told.has(label, key):
                    self._repeated[label, key] += 1
            if event.token_ids:
                self._describe(event, group, keys)
            self.narrator.take(ChunksStored(label, tuple(keys)))
        self.narrator.settle()
        return False

    def _label(self, event: BlockStored | BlockRemoved) -> str:
        place = Place(event.medium or "GPU", event.locality, event.ownership)
        label = repr(place)
        self.narrator.add_place(label, place)
        return label

    def _forget_one(self, label: str, key: Key) -> bool:
        if not self._repeated.get((label, key)):
            return False
        self._repeated[label, key] -= 1
        if not self._repeated[label, key]:
            del self._repeated[label, key]
        return True

    def _describe(self, event: BlockStored, group: int, keys: Sequence[Key]) -> None:
        self._groups[group] = Group(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        size, parent = event.block_size, event.parent_block_hash
        start = 0 if parent is None else self._end_of(_key(parent, group), size)
        extra = event.extra_keys
        for i, key in enumerate(keys):
            block = Description(
                parent=None if parent is None else hash_number(parent),
                hashes=[hash_number(event.block_hashes[i])],
                tokens=event.token_ids[i * size : i * size + size],
                block_size=size,
                start=start,
                lora_id=event.lora_id,
                lora_name=event.lora_name,
                extra_keys=None if extra is None or extra[i] is None else [extra[i]],
            )
            self.narrator.describe(key, block, expected=False)
            parent, start = event.block_hashes[i], start + size

    def _end_of(self, key: Key, size: int) -> int:
        start = self.narrator.start_of(key)
        return size if start is None else start + size

    def inventory(self, max_chunks: int, max_parts: int) -> Iterator[list[KVEvent]]:
        """What holds now, as :meth:`Told.inventory`; what was repeated is again."""
        again: list[KVEvent] = []
        for (label, key), times in self._repeated.items():
            again += self.narrator.told.once_more(label, key) * times
        told = list(self.narrator.told.inventory(max_chunks, max_parts))
        if told:
            told[-1] += again
        yield from told

    @property
    def said(self) -> int:
        """How many blocks it is about."""
        return self.narrator.told.said

    def close(self) -> None:
        """Let go of the file."""
        self.narrator.close()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self.narrator.check()
        assert not self.narrator.pending, "something was said and not settled"
        for label, key in self._repeated:
            assert self.narrator.told.has(label, key), "what is gone was repeated"

    def __repr__(self) -> str:
        return f"<StreamFold {self.narrator!r}, {len(self._repeated)} repeated>"


def _key(named: BlockHash, group: int) -> Key:
    return make_key(hash_number(named).to_bytes(8, "big"), group)
