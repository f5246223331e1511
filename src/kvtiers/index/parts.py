"""What of a batch is to be applied, in parts after which others have their turn. Pure."""

from collections.abc import Iterator, Sequence

import msgspec

from kvtiers.kvevents.messages import AllBlocksCleared, BlockStored, KVEvent

BLOCKS_AT_ONCE = 4096
"""About so many blocks or events are in one part."""


def parts(events: Sequence[KVEvent]) -> Iterator[list[KVEvent]]:
    """The events from the last ``AllBlocksCleared`` on: what was said before it is void.

    It is a part of its own, as it takes longest. What tells of many blocks is cut.
    """
    part: list[KVEvent] = []
    told = 0
    for event in events[_first(events) :]:
        for piece in _pieces(event):
            part.append(piece)
            told += 1 if isinstance(piece, AllBlocksCleared) else 1 + len(piece.block_hashes)
            if told >= BLOCKS_AT_ONCE or isinstance(piece, AllBlocksCleared):
                yield part
                part, told = [], 0
    if part:
        yield part


def _first(events: Sequence[KVEvent]) -> int:
    cleared = (n for n in range(len(events) - 1, -1, -1) if isinstance(events[n], AllBlocksCleared))
    return next(cleared, 0)


def _pieces(event: KVEvent) -> Iterator[KVEvent]:
    """The same in events of few blocks, without tokens where it is cut."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= BLOCKS_AT_ONCE:
        yield event
        return
    hashes = event.block_hashes
    for at in range(0, len(hashes), BLOCKS_AT_ONCE):
        some = hashes[at : at + BLOCKS_AT_ONCE]
        if isinstance(event, BlockStored):
            parent = hashes[at - 1] if at else event.parent_block_hash
            yield msgspec.structs.replace(
                event, block_hashes=some, parent_block_hash=parent, token_ids=()
            )
        else:
            yield msgspec.structs.replace(event, block_hashes=some)
