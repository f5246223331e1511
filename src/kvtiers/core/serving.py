"""A manager's chunks, for peers: the ``Parent`` that the ``p2p`` tier serves from.

A peer's question is an ordinary request of the core. It names no peer itself, so that the ``p2p``
tier of this engine has nothing for it, and nothing goes round in circles. What is pinned is loaded,
as if it went to an accelerator.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

from kvtiers.chunks import ChunkLayout, Key, Lookup, RequestContext
from kvtiers.core.exclusive import ExclusiveManager
from kvtiers.core.ledger import Request
from kvtiers.core.load import NO_SLOT
from kvtiers.tiers.p2p.parent import Pin
from kvtiers.tiers.views import ChunkViews

_KEYS_AT_ONCE = 128
"""Asked, or pinned, under one hold of the lock: the scheduler waits for no more."""
_IN_A_ROW_S = 0.0005
_PAUSE_S = 0.0001


class Turns:
    """A lock that is left alone for a moment now and then, for those who wait for it.

    A lock of Python's is not fair: who releases it and takes it again at once has it again before
    anybody who waits has woken up.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        clock: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._pause = pause
        self._began = self._released = clock()

    def __enter__(self) -> None:
        now = self._clock()
        if now - self._released >= _PAUSE_S:
            self._began = now
        elif now - self._began >= _IN_A_ROW_S:
            self._pause(_PAUSE_S)
            self._began = self._clock()
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)
        self._released = self._clock()

    def check(self) -> None:
        """Raise AssertionError if it was not released. Caller guarantees: it is at rest."""
        assert self._began <= self._released, "the lock was taken, and not released"

    def __repr__(self) -> str:
        return f"<Turns of {self._lock!r}>"


@dataclass(slots=True, eq=False)
class ManagerPin:
    """Chunks that a request of the core loads."""

    request: Request
    keys: Sequence[Key]
    views: ChunkViews


class ManagerParent:
    """Asks and pins in the name of peers."""

    max_keys = _KEYS_AT_ONCE

    def __init__(
        self,
        manager: ExclusiveManager,
        layout: ChunkLayout,
        view: Callable[[int, int, bool], memoryview],
        clock: Callable[[], float],
        pause: Callable[[float], None],
        max_pinned: int,
    ) -> None:
        """At most ``max_pinned`` chunks are kept at a time; ``view`` is that of the manager.

        ``pause`` lets the calling thread wait, in seconds.
        """
        self._manager = manager
        self._layout = layout
        self._view = view
        self._clock = clock
        self._turn = Turns(manager.exclusive, clock, pause)
        self._max_pinned = max_pinned
        self._asking: dict[str, Request] = {}
        self._pins: set[ManagerPin] = set()
        self._pinned: Counter[Key] = Counter()
        self._numbers = 0

    @property
    def room(self) -> int:
        """How many chunks more can be pinned now, of those that are not."""
        return self._max_pinned - len(self._pinned)

    def ask(self, keys: Sequence[Key], request: str) -> list[Lookup]:
        """The verdict on each; while the tiers are waited for, RETRY."""
        verdicts: list[Lookup] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            with self._turn:
                if self._manager.resting:
                    break
                asking = self._asking.get(request)
                if asking is None:
                    asking = self._asking[request] = self._begin(request)
                for key in keys[start : start + _KEYS_AT_ONCE]:
                    verdicts.append(self._manager.lookup(key, asking))
        return verdicts + [Lookup.RETRY] * (len(keys) - len(verdicts))

    def end(self, request: str) -> None:
        """Nothing more is asked for ``request``."""
        asking = self._asking.pop(request, None)
        if asking is not None:
            with self._turn:
                self._manager.on_request_finished(asking)

    def pin(self, keys: Sequence[Key]) -> Pin | None:
        """Keep those that are in host memory, as far as there is room.

        Caller guarantees: there are no more than ``max_keys``.
        """
        if not self._manager.seem_resident(keys):
            return None
        with self._turn:
            there = self._with_room(self._manager.resident(keys))
            if not there or self._manager.resting:
                return None
            request = self._begin("pin")
            slots = self._manager.load(there, request)
            assert NO_SLOT not in slots, "a resident chunk has no slot"
            sizes = self._layout.chunk_sizes(there)
            views = ChunkViews(lambda i: self._view(slots[i], sizes[i], False), sizes)
            pin = ManagerPin(request, tuple(there), views)
            self._pins.add(pin)
            self._pinned.update(there)
        return pin

    def _with_room(self, keys: Sequence[Key]) -> list[Key]:
        """Chunks that are pinned already, and as many others as may be."""
        fresh = [key for key in keys if key not in self._pinned]
        beyond = set(fresh[max(0, self.room) :])
        return [key for key in keys if key not in beyond]

    def release(self, pin: Pin) -> None:
        """Let go."""
        ours = cast(ManagerPin, pin)
        self._pins.remove(ours)
        self._pinned.subtract(ours.keys)
        self._pinned = +self._pinned
        ours.views.release_all()
        with self._turn:
            self._manager.complete_load(ours.request)
            self._manager.on_request_finished(ours.request)

    def advance(self) -> None:
        """A step of the core's, as the engine makes them when it is not idle."""
        with self._turn:
            if not self._manager.resting:
                self._manager.end_step(self._clock())

    def listen(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called when chunks may have come into host memory."""
        self._manager.listen(changed, self._reset)

    def _begin(self, what: str) -> Request:
        self._numbers += 1
        context = RequestContext(f"p2p-{what}-{self._numbers}", internal=True)
        return self._manager.on_new_request(context)

    def _reset(self) -> None:
        """The slots will be others': whoever still reads from here reads nothing."""
        for pin in list(self._pins):
            pin.views.release_all()

    def check(self) -> None:
        """Raise AssertionError if pins do not add up."""
        self._turn.check()
        pinned = Counter(key for pin in self._pins for key in pin.keys)
        assert self._pinned == pinned, "pins do not add up"
        assert len(pinned) <= self._max_pinned, "more is pinned than may be"

    def __repr__(self) -> str:
        return f"<ManagerParent {len(self._pinned)} chunks pinned, {len(self._asking)} asking>"
