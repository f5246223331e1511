"""A manager that more than one thread may call: every public call excludes the others.

The engine's scheduler is one of those threads; the other serves peers from the same chunks. The
lock comes from whoever builds it, and may be taken again by who has it. It is held for one
decision, never while something is waited for: the scheduler waits, if it does, for less than a
millisecond.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvtiers.chunks import Key
from kvtiers.core.manager import TieringManager
from kvtiers.host.parts import HostUse

_CALLS = (
    "on_new_request",
    "request",
    "prompted",
    "generated",
    "prefilled",
    "on_request_scheduled",
    "on_request_finished",
    "lookup",
    "look",
    "lookup_many",
    "load",
    "complete_load",
    "source",
    "warm",
    "resident",
    "store",
    "complete_store",
    "touch",
    "poll",
    "end_step",
    "has_pending_work",
    "release_device",
    "check",
)


class ExclusiveManager(TieringManager):
    """A ``TieringManager`` under a lock, which tells when chunks may have come."""

    def __init__(self, *, lock: AbstractContextManager[object], **parts: Any) -> None:
        """``lock`` is reentrant; ``parts`` are those of a ``TieringManager``."""
        super().__init__(**parts)
        self.exclusive = lock
        """Held during every call; for callers who need several in a row."""
        self.resting = False
        """The tiers are waited for, outside the lock: nobody else may call them meanwhile."""
        self.capacity = self._index.num_slots // self._index.widest
        """Chunks that surely fit into host memory."""
        self._changed: list[Callable[[], None]] = []
        self._reset: list[Callable[[], None]] = []

    def listen(self, changed: Callable[[], None], reset: Callable[[], None]) -> None:
        """Have these called when chunks may have come into host memory, or all have left it."""
        self._changed.append(changed)
        self._reset.append(reset)

    def reset(self) -> tuple[int, ...]:
        """Forget everything in host memory; see ``TieringManager``."""
        with self.exclusive:
            for listener in self._reset:
                listener()
            return super().reset()

    def drain(self, deadline_s: float, clock: Callable[[], float]) -> bool:
        """Send and await what is in flight or in a backlog; others may call, in vain, meanwhile."""
        with self.exclusive:
            before, self.resting = self.resting, True
        try:
            return super().drain(deadline_s, clock)
        finally:
            self.resting = before

    def shutdown(self, deadline_s: float, clock: Callable[[], float]) -> None:
        """Cascade what still can be, then stop the tiers."""
        with self.exclusive:
            self.resting = True
        super().shutdown(deadline_s, clock)

    def retire(self) -> None:
        """Give nothing to others any more: what is known of host memory may be wrong."""
        with self.exclusive:
            self.resting = True
            for listener in self._reset:
                listener()

    @property
    def use(self) -> HostUse:
        """What host memory is doing now."""
        with self.exclusive:
            return super().use

    def seem_resident(self, keys: Sequence[Key]) -> bool:
        """Whether any of ``keys`` was in host memory a moment ago. Takes no lock."""
        return bool(super().resident(keys))

    def tell_if_changed(self, epoch: int) -> None:
        """Call the listeners unless nothing happened since ``room_epoch`` was ``epoch``."""
        if self.room_epoch != epoch:
            for listener in self._changed:
                listener()


def _exclusive(name: str) -> Callable[..., Any]:
    plain = getattr(TieringManager, name)

    @functools.wraps(plain)
    def call(self: ExclusiveManager, *args: Any, **kwargs: Any) -> Any:
        with self.exclusive:
            epoch = self.room_epoch
            result = plain(self, *args, **kwargs)
            if self.room_epoch != epoch:
                self.tell_if_changed(epoch)
            return result

    return call


for _name in _CALLS:
    setattr(ExclusiveManager, _name, _exclusive(_name))
