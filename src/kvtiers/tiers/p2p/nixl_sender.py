"""The producer's end with NIXL: it says where chunks lie, and what their sums are.

What was announced may be read at any time until the consumer has taken it: it is lent, and the
thread of NIXL stays awake for it.
"""

from collections import deque
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.p2p.loop import Loop, Timer
from kvtiers.tiers.p2p.reading import Lent
from kvtiers.tiers.p2p.transport import Sent
from kvtiers.tiers.p2p.wire import ProtocolError

_TURN_BYTES = 4 << 20
"""Summed before others have their turn."""
_CHUNKS_AT_ONCE = 64
"""Announced together."""


class NixlSender:
    """Sums chunks and says where they are."""

    def __init__(
        self,
        loop: Loop,
        calls: Sent,
        offer: bytes,
        lend: Callable[[Lent], None],
        longest_s: float,
    ) -> None:
        """``lend`` is told of every chunk that the consumer may read, and when it has.

        After ``longest_s`` it waits for none of them any more.
        """
        self.offer = offer
        self._lend = lend
        self._loop = loop
        self._calls = calls
        self._queue: deque[tuple[int, int, memoryview]] = deque()
        self._longest_s = longest_s
        self._announced: dict[tuple[int, int], float] = {}
        """Transfer, place -> when the consumer has long given it up; the oldest first."""
        self._given_up: Timer | None = None
        self._turn_is_due = False
        self._closed = False

    def push(self, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Queue them to be summed."""
        self._queue.extend((transfer, place, view) for place, view in chunks)
        self._go_on()

    def _go_on(self) -> None:
        if self._queue and not self._turn_is_due and not self._closed:
            self._turn_is_due = True
            self._loop.at(self._loop.clock(), self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        budget = _TURN_BYTES
        rows: dict[int, list[tuple[int, int, int]]] = {}
        while self._queue and budget > 0 and not self._closed:
            transfer, place, view = self._queue.popleft()
            try:
                row = (place, address_of(view), xxh3_64_intdigest(view))
                budget -= view.nbytes
            except ValueError:  # host memory was reset
                self._calls.sent(transfer, place, False)
                continue
            rows.setdefault(transfer, []).append(row)
            if len(rows[transfer]) == _CHUNKS_AT_ONCE:
                self._announce(transfer, rows.pop(transfer))
        for transfer, announced in rows.items():
            self._announce(transfer, announced)
        self._go_on()

    def _announce(self, transfer: int, rows: list[tuple[int, int, int]]) -> None:
        if not self._closed:
            until = self._loop.clock() + self._longest_s
            self._announced.update(((transfer, place), until) for place, *_ in rows)
            self._keep_time()
            self._lend(Lent(len(rows)))
            self._calls.ready(transfer, rows)

    def _forget(self, announced: set[tuple[int, int]]) -> None:
        for entry in announced:
            del self._announced[entry]

    def _keep_time(self) -> None:
        if self._given_up is None:
            self._given_up = self._loop.at(next(iter(self._announced.values())), self._look_after)

    def _look_after(self) -> None:
        """A consumer that takes nothing may not keep our memory, nor a thread awake, for ever."""
        self._given_up = None
        if not self._announced:
            return
        if next(iter(self._announced.values())) > self._loop.clock():
            self._keep_time()
        else:
            self._calls.broken("it does not take what it asked for")

    def taken(self, transfer: int, places: Sequence[int]) -> None:
        """Those are done. Raises ProtocolError for what was not announced."""
        named = {(transfer, place) for place in places}
        if not named <= self._announced.keys():
            raise ProtocolError("you took what was not offered")
        self._forget(named)
        self._lend(Lent(-len(named)))
        for place in places:
            self._calls.sent(transfer, place, True)

    def drop(self, transfer: int) -> None:
        """The consumer reads none of it any more, or does not count what it reads."""
        queued = [place for number, place, _ in self._queue if number == transfer]
        self._queue = deque(entry for entry in self._queue if entry[0] != transfer)
        announced = {entry for entry in self._announced if entry[0] == transfer}
        self._take_back(announced)
        for place in (*queued, *(place for _, place in announced)):
            self._calls.sent(transfer, place, False)

    def close(self) -> None:
        """Announce nothing more."""
        self._closed = True
        if self._given_up is not None:
            self._given_up.cancel()
        self._queue.clear()
        self._take_back(set(self._announced))

    def _take_back(self, announced: set[tuple[int, int]]) -> None:
        """Of what was not taken a read may be under way."""
        self._forget(announced)
        if announced:
            self._lend(Lent(-len(announced), lingers=True))

    def check(self) -> None:
        """Raise AssertionError if chunks wait for no turn, or are lent for ever."""
        assert not self._queue or self._turn_is_due or self._closed, "chunks wait for no turn"
        assert not self._announced or self._given_up is not None, "chunks are lent for ever"

    def __repr__(self) -> str:
        return f"<NixlSender {len(self._queue)} to be summed, {len(self._announced)} offered>"
