"""The last requests, each with what its lookups found and why not the rest: a sink of bounded size.

The thread that owns the manager appends and never waits; any other may look. What is kept of a
request is the one event that tells of its lookups, so to record costs an append.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from sys import getsizeof

from kvtiers.events import Event, LookupsSettled

MAX_REQUESTS = 1000
MAX_BYTES = 4 << 20

_BYTES = 1536
"""Of a request without runs, about: its dictionaries, its id, itself."""
_BYTES_OF_RUN = 320


@dataclass(frozen=True, slots=True)
class Record:
    """One settling of one request."""

    settled_at: float
    """Seconds since the epoch."""
    event: LookupsSettled


class Recorder:
    """Keeps ``max_requests`` at most, and ``max_bytes`` of memory at most, about."""

    def __init__(
        self,
        wall_clock: Callable[[], float],
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """``wall_clock`` gives seconds since the epoch."""
        self._wall_clock = wall_clock
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._records: deque[Record] = deque()
        self._bytes = 0

    def __call__(self, event: Event) -> None:
        """Keep a request's end of lookups; every other event passes by."""
        if type(event) is not LookupsSettled:
            return
        self._records.append(Record(self._wall_clock(), event))
        self._bytes += weight(event)
        while self._bytes > self._max_bytes or len(self._records) > self._max_requests:
            self._bytes -= weight(self._records.popleft().event)

    def latest(self, limit: int = MAX_REQUESTS) -> list[Record]:
        """The last ones, newest first. Any thread."""
        # A copy of a deque is made in one go: nobody changes it meanwhile, and nobody waits.
        records = list(self._records.copy())
        return records[: -limit - 1 : -1] if limit > 0 else []

    def find(self, wanted: str) -> list[Record]:
        """Those whose id is ``wanted``, or else begins with it; newest first. Any thread.

        An engine calls a request otherwise than who sent it: vLLM puts what kind it is before the
        id that a client gave (``cmpl-``), and a number and a random suffix after it.
        """
        records = self.latest() if wanted else []
        for fits in (_is, _names, _begins, _follows_kind):
            found = [r for r in records if fits(r.event.request_id, wanted)]
            if found:
                return found
        return []

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert len(self._records) <= self._max_requests, "more requests than the bound"
        kept = sum(weight(record.event) for record in self._records)
        assert kept == self._bytes <= self._max_bytes, f"{kept} bytes are kept, not {self._bytes}"

    def __repr__(self) -> str:
        return f"<Recorder {len(self._records)} requests, about {self._bytes} bytes>"


def weight(event: LookupsSettled) -> int:
    """Bytes of memory that an event takes, about; rather more than less."""
    return _BYTES + getsizeof(event.request_id) + _BYTES_OF_RUN * len(event.runs)


def _is(name: str, wanted: str) -> bool:
    return name == wanted


def _names(name: str, wanted: str) -> bool:
    return name.startswith(f"{wanted}-")


def _begins(name: str, wanted: str) -> bool:
    return name.startswith(wanted)


def _follows_kind(name: str, wanted: str) -> bool:
    return name.partition("-")[2].startswith(wanted)
