"""The memory of a job's chunks, cut out of the host region when it is first asked for.

A job is made on the scheduler thread, where a memoryview per chunk would be the most expensive
thing about it; whoever moves the bytes, on a lane, cuts the views it needs.
"""

from collections.abc import Callable, Sequence
from typing import overload

_DEAD = memoryview(b"")
_DEAD.release()


class ChunkViews(Sequence[memoryview]):
    """View ``i`` is ``sizes[i]`` bytes of host memory, not copied; dead once it is released.

    Whatever is done with a dead view raises ValueError: its memory is somebody else's.
    """

    __slots__ = ("_cut", "_dead", "_views", "sizes")

    def __init__(self, cut: Callable[[int], memoryview], sizes: Sequence[int]) -> None:
        """``cut(i)`` makes view ``i``; whoever asks for the view first calls it."""
        self._cut = cut
        self._views: dict[int, memoryview] = {}
        self._dead = False
        self.sizes = sizes

    @classmethod
    def of(cls, views: Sequence[memoryview]) -> "ChunkViews":
        """Views that were cut already."""
        return cls(views.__getitem__, [view.nbytes for view in views])

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, i: int) -> memoryview: ...
    @overload
    def __getitem__(self, i: slice) -> list[memoryview]: ...
    def __getitem__(self, i: int | slice) -> memoryview | list[memoryview]:
        places = range(len(self.sizes))[i]
        return self._view(places) if isinstance(places, int) else [self._view(p) for p in places]

    def release(self, places: Sequence[int]) -> None:
        """These views are dead from now on."""
        for i in places:
            view = self._views.get(i, _DEAD)
            self._views[i] = _DEAD
            _release(view)

    def release_all(self) -> None:
        """Every view is dead from now on."""
        self._dead = True
        for view in list(self._views.values()):
            _release(view)

    def _view(self, i: int) -> memoryview:
        view = self._views.get(i)
        if view is None and not self._dead:
            cut = self._cut(i)
            view = self._views.setdefault(i, cut)  # another thread may have been here meanwhile
            if view is not cut:
                _release(cut)
            if self._dead:
                _release(view)
        return _DEAD if view is None or self._dead else view

    def __repr__(self) -> str:
        state = "dead" if self._dead else f"{len(self._views)} cut"
        return f"<ChunkViews {len(self)} chunks, {self.nbytes} bytes, {state}>"


def _release(view: memoryview) -> None:
    # Whoever made something of a view and kept it breaks the contract; nothing helps.
    try:  # noqa: SIM105 - contextlib.suppress takes longer than the rest of it
        view.release()
    except BufferError:
        pass
