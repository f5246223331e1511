"""Warm-up: chunks that were named hot are promoted before anybody asks for them.

It asks as a request would, a few chunks at a time, and only for room that is free: at most half of
host memory is full when it ends, whoever filled it, and nothing is evicted for it. While a request
waits for chunks of its own no new ones are asked for.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable

from kvtiers.chunks import Key, Lookup, RequestContext
from kvtiers.core.ledger import Request
from kvtiers.events import Sink, WarmedUp

logger = logging.getLogger("kvtiers")

_AT_ONCE = 32
_GIVE_UP_S = 600.0
"""What is hot at the start is so no more after a while."""


class WarmUp:
    """Promotes ``keys`` in their order.

    ``begin``, ``lookup`` and ``finish`` are the manager's, for a request of its own.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        begin: Callable[[RequestContext], Request],
        lookup: Callable[[Key, Request], Lookup],
        finish: Callable[[Request], None],
        emit: Sink,
    ) -> None:
        self._keys = deque(dict.fromkeys(keys))
        self._named = len(self._keys)
        self._begin, self._lookup, self._finish = begin, lookup, finish
        self._emit = emit
        self._request: Request | None = None
        self._asked: list[Key] = []
        self._hits = 0
        self._began: float | None = None
        self.ended = False

    def step(self, now: float, room: int, busy: bool) -> None:
        """Go on, once in a scheduler step. ``room``: chunks it may ask for; ``busy``: a request
        waits.
        """
        if self.ended:
            return
        if self._began is None:
            self._began = now
        if self._asked:
            self._ask_again()
        if self._asked:
            return
        late = now - self._began >= _GIVE_UP_S
        if room <= 0 or late or not self._keys:
            self._end(now - self._began)
        elif not busy:
            self._ask_for(min(room, _AT_ONCE))

    def stop(self) -> None:
        """Ask for nothing more: the engine ends."""
        if self._request is not None:
            self._finish(self._request)
        self._request, self.ended = None, True
        self._asked.clear()
        self._keys.clear()

    def _ask_for(self, count: int) -> None:
        name = f"kvtiers-warm-up-{len(self._keys)}"
        self._request = self._begin(RequestContext(name, internal=True))
        self._asked = [self._keys.popleft() for _ in range(min(count, len(self._keys)))]
        self._ask_again()

    def _ask_again(self) -> None:
        """The promotion's own deadlines see to it that every answer becomes HIT or MISS."""
        assert self._request is not None
        verdicts = [(key, self._lookup(key, self._request)) for key in self._asked]
        hits, misses = (sum(v is end for _, v in verdicts) for end in (Lookup.HIT, Lookup.MISS))
        self._hits += hits
        if hits or misses:
            self._emit(WarmedUp(promoted=hits, missing=misses))
        self._asked = [k for k, v in verdicts if v not in (Lookup.HIT, Lookup.MISS)]
        if not self._asked:
            self._finish(self._request)
            self._request = None

    def _end(self, seconds: float) -> None:
        self.ended = True
        if self._keys:
            self._emit(WarmedUp(not_asked=len(self._keys)))
        logger.info(
            "warm-up: %d of %d hot chunks came to host memory in %.1f s, %d were not asked for",
            self._hits,
            self._named,
            seconds,
            len(self._keys),
        )
        self._keys.clear()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert bool(self._asked) == (self._request is not None), "asks for nothing, or for nobody"
        known = self._hits + len(self._asked) + len(self._keys)
        assert known <= self._named, f"{known} of {self._named} chunks"
        assert not (self.ended and (self._keys or self._asked)), "it ended and goes on"

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{len(self._asked)} asked for"
        return f"<WarmUp {self._hits} of {self._named} here, {state}>"
