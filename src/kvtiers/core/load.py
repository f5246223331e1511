"""Up 4, load: host memory -> accelerator. Pins what is copied, and lets go when it is."""

from collections.abc import Callable, Sequence

from kvtiers.chunks import Key
from kvtiers.core.ledger import Departed, Ledger, Request
from kvtiers.events import PRIMARY, ChunksCopied, CopiesFailed, Hop, Reason, Sink

NO_SLOT = -1
"""Stands for a chunk that is not there: the copy of such a job must fail, and be recomputed."""


class Loads:
    """Pins the chunks of one load per request."""

    def __init__(
        self,
        ledger: Ledger,
        emit: Sink,
        departed: Departed,
        total_bytes: Callable[[Sequence[Key]], int],
    ) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._emit = emit
        self._departed = departed
        self._total_bytes = total_bytes

    def plan(self, keys: Sequence[Key], request: Request, now: float) -> list[int]:
        """Pin chunks that a lookup found; the slot of each, ``NO_SLOT`` if it is gone."""
        ready = self._index.ready
        there = [k for k in keys if k in ready]
        slots = self._index.hold(there)
        request.loading = (tuple(keys), tuple(slots))
        request.load_began = now, request.waiting_began
        self._index.touch(there)
        self._ledger.let_go(request)
        if len(there) == len(keys):
            return slots
        slot_of = dict(zip(there, slots, strict=True))
        return [slot_of.get(k, NO_SLOT) for k in keys]

    def complete(self, request: Request, ok: bool, now: float | None) -> tuple[Key, ...]:
        """The copy ended; the chunks that were dropped because it failed.

        ``now``: when that was seen; None: it was none to an accelerator.
        """
        if request.loading is None:
            return ()
        keys, slots = request.loading
        request.loading = None
        dropped: list[Key] = []
        if not ok:
            request.load_failed = True
            self._emit(CopiesFailed(Hop.LOAD, PRIMARY, len(keys)))
            dropped = self._index.drop([k for k in keys if k in self._index.ready])
            if dropped:
                self._departed(dropped, Reason.FAILED)
        elif now is not None:
            began, waited = request.load_began
            waited_s = None if waited is None else now - waited
            nbytes = self._total_bytes(keys)
            self._emit(ChunksCopied(Hop.LOAD, len(keys), now - began, waited_s, nbytes))
        self._index.release(list(slots))
        return tuple(dropped)
