"""From a block to the integer whose bits say who holds it, made for whole prompts. Pure.

Blocks that follow each other in a prompt stand beside each other in runs, as far as the order in
which they are told shows it. A question then compares lists of numbers, and looks a block up only
where one run ends and the next begins: one look-up in a large dictionary costs a cache miss or
three, so 6,250 of them cost more than a millisecond. The order is a hint and no more: a question
goes on only where the numbers are the same.

Runs leave whole, the one that nobody told or asked of for longest first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

_LONGEST = 256
"""Blocks of a run."""
_SHARED = 1 << 16


class _Run:
    __slots__ = ("blocks", "masks")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.masks: list[int] = []
        """For each of them; never 0."""


class Blocks:
    """A bounded map from blocks to integers above 0. Equal integers are one object."""

    def __init__(self, max_blocks: int) -> None:
        self._max = max_blocks
        self._where: dict[int, _Run] = {}
        self._runs: OrderedDict[_Run, None] = OrderedDict()
        """Used longest ago first."""
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for run in self._runs:
            yield from zip(run.blocks, run.masks, strict=True)

    def get(self, block: int) -> int:
        """Who holds it; 0: nobody."""
        run = self._where.get(block)
        return 0 if run is None else run.masks[run.blocks.index(block)]

    def along(self, chain: Sequence[int]) -> list[int]:
        """Who holds each block of a prompt, up to the first that nobody holds."""
        found: list[int] = []
        at, where, length = 0, self._where, len(chain)
        while at < length and (run := where.get(chain[at])) is not None:
            self._runs.move_to_end(run)
            first = run.blocks.index(chain[at])
            here, asked = run.blocks[first:], chain[at : at + len(run.blocks) - first]
            same = len(here) if here == asked else _common(here, asked)
            found += run.masks[first : first + same]
            at += same
        return found

    def holding(self, bit: int) -> list[int]:
        """Those that have a bit, in the order of their runs."""
        found: list[int] = []
        for run in self._runs:
            if run.masks.count(run.masks[0]) == len(run.masks):
                found += run.blocks if run.masks[0] & bit else ()
            else:
                found += [b for b, m in zip(run.blocks, run.masks, strict=True) if m & bit]
        return found

    def add(self, blocks: Iterable[int], bit: int, after: int | None) -> list[int]:
        """Set a bit for each; those that had it before. ``after``: what stands before the first."""
        twice: list[int] = []
        run: _Run | None = None
        at = 0
        for block in blocks:
            here = self._where.get(block)
            if here is None:
                run = self._append(block, bit, after)
                at = len(run.blocks) - 1
            else:
                at = _place(here, block, at + 1 if here is run else 0)
                run = here
                mask = run.masks[at]
                if mask & bit:
                    twice.append(block)
                else:
                    run.masks[at] = self._shared(mask | bit)
            if block != after:
                self._runs.move_to_end(run)
            after = block
        return twice

    def remove(self, block: int, bits: int) -> int:
        """Take bits away; which of them it had."""
        run = self._where.get(block)
        if run is None:
            return 0
        at = run.blocks.index(block)
        mask = run.masks[at]
        if mask & ~bits:
            run.masks[at] = self._shared(mask & ~bits)
            return mask & bits
        del self._where[block], run.blocks[at], run.masks[at]
        if not run.blocks:
            del self._runs[run]
        return mask

    def remove_everywhere(self, bits: int) -> None:
        """Take bits away from all blocks. Time is linear in all that are held."""
        for block in self.holding(bits):
            self.remove(block, bits)

    def make_room(self) -> list[tuple[int, int]]:
        """Those that had to leave, with who held them."""
        left: list[tuple[int, int]] = []
        while len(self._where) > self._max:
            run, _ = self._runs.popitem(last=False)
            for block in run.blocks:
                del self._where[block]
            left += zip(run.blocks, run.masks, strict=True)
        return left

    def _append(self, block: int, bit: int, after: int | None) -> _Run:
        run = None if after is None else self._where.get(after)
        if run is None or run.blocks[-1] != after or len(run.blocks) >= _LONGEST:
            run = _Run()
            self._runs[run] = None
        run.blocks.append(block)
        run.masks.append(self._shared(bit))
        self._where[block] = run
        return run

    def _shared(self, mask: int) -> int:
        if len(self._masks) >= _SHARED:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert len(self._where) <= self._max, "more blocks than may be"
        found = {block: run for run in self._runs for block in run.blocks}
        assert found == self._where, "a block is not in its run"
        assert sum(len(run.blocks) for run in self._runs) == len(found), "a block is in two runs"
        for run in self._runs:
            assert 0 < len(run.blocks) == len(run.masks) <= _LONGEST, "a run has another length"
            assert all(mask > 0 for mask in run.masks), "a block is held by nobody"

    def __repr__(self) -> str:
        return f"<Blocks {len(self._where)}/{self._max} in {len(self._runs)} runs>"


def _place(run: _Run, block: int, likely: int) -> int:
    if likely < len(run.blocks) and run.blocks[likely] == block:
        return likely
    return run.blocks.index(block)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many are the same from the start."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
