"""The consumer's end with NIXL: what is ready is read into slots, part by part.

A part is summed by the thread that read it: it is in that core's cache, and handing it to another
thread costs more, since both then wait for the interpreter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from xxhash import xxh3_64_intdigest

from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.reading import Chunk, Read
from kvtiers.tiers.p2p.transport import Delivered
from kvtiers.tiers.p2p.wire import ProtocolError

_READ_BYTES = 4 << 20
"""Read together: it still lies in the processor's cache when it is summed."""


@dataclass(slots=True)
class Stuck:
    """What an engine's reads keep that nobody waits for: their producers hang."""

    most: int
    """With so many bytes nothing more is read."""
    bytes: int = 0

    @property
    def has_room(self) -> bool:
        """Whether more may be read."""
        return self.bytes < self.most


class NixlReceiver:
    """Reads into slots."""

    def __init__(
        self,
        loop: Loop,
        memory: range,
        metadata: bytes,
        calls: Delivered,
        read: Callable[[Read], None],
        forget: Callable[[], None],
        stuck: Stuck,
    ) -> None:
        """``memory``: the addresses of the producer's host memory; ``metadata``: its agent.

        ``read`` has something read; ``forget`` says that this session reads no more.
        """
        self._stuck = stuck
        self._loop = loop
        self._memory = memory
        self._metadata = metadata
        self._calls = calls
        self._read = read
        self._forget_producer = forget
        self._expected: dict[int, list[memoryview]] = {}
        self._reading: dict[int, set[int]] = {}
        """Places, by transfer."""
        self._reads: dict[int, set[Read]] = {}
        """The same in parts, as long as they are not read."""
        self._stopped: set[int] = set()
        self._closed = False

    def expect(self, transfer: int, views: Sequence[memoryview]) -> None:
        """Nothing lands before it is said to be ready."""
        self._expected[transfer] = list(views)

    def ready(self, transfer: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Read them. Raises ProtocolError for addresses that are not the producer's memory."""
        views, reading = self._expected[transfer], self._reading.setdefault(transfer, set())
        found = []
        for place, address, checksum in chunks:
            view = views[place]
            if place in reading:
                raise ProtocolError("it brings a chunk twice")
            if address not in self._memory or address + view.nbytes > self._memory.stop:
                raise ProtocolError("it brings a chunk that is not in its memory")
            found.append(Chunk(place, view, view.nbytes, address_of(view), address, checksum))
        reading.update(chunk.place for chunk in found)
        for part in _parts(found):
            read = Read(self._metadata, part, partial(self._ended, transfer))
            self._reads.setdefault(transfer, set()).add(read)
            self._read(read)

    def _ended(self, transfer: int, read: Read, why: str) -> None:
        """Runs on the reading thread."""
        whole = {chunk.place: not why and _is_whole(chunk) for chunk in read.chunks}
        self._loop.call(partial(self._was_read, transfer, read, whole, why))

    def _was_read(self, transfer: int, read: Read, whole: dict[int, bool], why: str) -> None:
        reading = self._reading[transfer]
        reading.difference_update(whole)
        self._reads[transfer].discard(read)
        if transfer in self._stopped:
            self._stuck.bytes -= read.nbytes
            if not reading:
                self._forget_stopped(transfer)
            return
        if why:
            self._calls.broken(why, False)
            return
        self._calls.taken(transfer, list(whole))
        for place, ok in whole.items():
            self._calls.arrived(transfer, place, ok)

    def _forget_stopped(self, transfer: int) -> None:
        self._stopped.discard(transfer)
        del self._reading[transfer], self._reads[transfer]
        self._calls.stopped(transfer)
        self._let_go_if_closed()

    def stop(self, transfer: int) -> bool:
        """What is being read goes on."""
        self._expected.pop(transfer, None)
        if self._reading.get(transfer):
            self._stopped.add(transfer)
            for read in self._reads[transfer]:
                read.wanted = False
                self._stuck.bytes += read.nbytes
            return False
        self.forget(transfer)
        return True

    def forget(self, transfer: int) -> None:
        """All of it was read."""
        self._expected.pop(transfer, None)
        self._reading.pop(transfer, None)
        self._reads.pop(transfer, None)

    @property
    def has_room(self) -> bool:
        """Whether reads that do not end keep less memory than they may."""
        return self._stuck.has_room

    def close(self) -> None:
        """Read nothing more; forget the producer when nothing is being read from it."""
        if not self._closed:
            self._closed = True
            self._let_go_if_closed()

    def _let_go_if_closed(self) -> None:
        if self._closed and not self._reading:
            self._forget_producer()

    def check(self) -> None:
        """Raise AssertionError if something is read that was neither expected nor stopped."""
        known = self._expected.keys() | self._stopped
        assert {t for t, places in self._reading.items() if places} <= known, "read for nobody"
        assert self._stuck.bytes >= 0, "less than nothing is stuck"

    def __repr__(self) -> str:
        count = sum(map(len, self._reading.values()))
        return f"<NixlReceiver {count} chunks of {len(self._expected)} transfers are read>"


def _is_whole(chunk: Chunk) -> bool:
    try:
        return xxh3_64_intdigest(chunk.view) == chunk.checksum
    except ValueError:  # host memory is gone
        return False


def _parts(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Runs of about ``_READ_BYTES``, at least a chunk each."""
    parts: list[list[Chunk]] = []
    size = _READ_BYTES
    for chunk in chunks:
        if size >= _READ_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(chunk)
        size += chunk.nbytes
    return parts
