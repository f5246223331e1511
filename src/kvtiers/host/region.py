"""The memory of the primary tier: one shared-memory region seen by the scheduler and all workers.

The scheduler maps last and unlinks the name at once: from then on the kernel gives the memory back
with the last process, even after SIGKILL. See :mod:`kvtiers.host.regionfile` for the time before.
"""

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kvtiers.errors import ConfigError, Kind, KVTiersError, map_errors
from kvtiers.host.limits import Limit, available_memory, container_limits
from kvtiers.host.pretouch import PageToucher, stay
from kvtiers.host.regionfile import (
    DIRECTORY,
    HEADER_BYTES,
    Header,
    allocate,
    closing_on_error,
    free_space,
    join_or_create,
    open_live,
    read_header,
    region_path,
    sweep,
    too_large,
    unlink_if_same,
)

__all__ = ["DIRECTORY", "HEADER_BYTES", "Region", "check_capacity", "sweep"]


class Region:
    """A mapped region of ``num_slots`` slots of ``slot_bytes`` bytes: see ``attach`` and ``open``.

    Where chunks are of unequal size a slot is a granule: a chunk takes several in a row, which lie
    in one slab of ``slab_slots``. Else a slab is a slot.
    Any number of processes may map it; who writes where is for the index to say. After ``close``
    it only raises ``Kind.CLOSED``.
    """

    def __init__(self, path: str, fd: int, header: Header) -> None:
        """Map the live file ``fd``, which is closed if that fails."""
        self.path = path
        self._header = header
        self._fd = fd
        self._closed = False
        self._toucher: PageToucher | None = None
        with closing_on_error(fd), map_errors("map", path):
            self._map = mmap.mmap(fd, header.file_bytes, mmap.MAP_SHARED)
        self._slots = memoryview(self._map)[HEADER_BYTES:]

    @classmethod
    def attach(
        cls,
        name: str,
        record: Mapping[str, Any],
        num_slots: int,
        slot_bytes: int,
        directory: str = DIRECTORY,
        *,
        slab_slots: int = 1,
    ) -> Self:
        """Create region ``name`` or join it; all its memory is allocated on return.

        Processes may call this at the same time. ``record`` holds JSON values on which all of them
        must agree. Raises ConfigError if they do not, or if there is not enough memory.
        """
        path = region_path(name, directory)
        header = Header(num_slots, slot_bytes, json.loads(json.dumps(dict(record))), slab_slots)
        fd = join_or_create(path, header)
        with closing_on_error(fd):
            _refuse_difference(path, there=read_header(fd, path), here=header)
            allocate(fd, path)
        return cls(path, fd, header)

    @classmethod
    def open(cls, name: str, directory: str = DIRECTORY) -> Self:
        """Join region ``name`` that live workers made. Raises ConfigError if there is none."""
        path = region_path(name, directory)
        fd = open_live(path)
        if fd is None:
            raise ConfigError(
                f"no live worker has made {path}; do the workers run on another host? Host memory "
                "is shared through this file: run them where the scheduler runs"
            )
        with closing_on_error(fd):
            header = read_header(fd, path)
        return cls(path, fd, header)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self._header.num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self._header.slot_bytes

    @property
    def slab_slots(self) -> int:
        """Slots of one slab."""
        return self._header.slab_slots

    @property
    def record(self) -> Mapping[str, Any]:
        """What the ranks agreed on."""
        return self._header.record

    @property
    def buffer(self) -> memoryview:
        """All slots as writable bytes, for ``numpy.frombuffer`` or ``torch.frombuffer``."""
        self._require_open("buffer")
        return self._slots

    def touch_ahead(
        self, turn: int = 0, turns: int = 1, *, prepare: Callable[[], None] = stay
    ) -> PageToucher:
        """Touch all slots in the background, from part ``turn`` of ``turns``, until ``close``.

        See :mod:`kvtiers.host.pretouch`. Once is enough: later calls give the same.
        """
        self._require_open("touch")
        if self._toucher is None:
            self._toucher = PageToucher(self._slots, turn, turns, prepare=prepare)
        return self._toucher

    def view(self, slot: int, nbytes: int, writable: bool) -> memoryview:
        """``nbytes`` bytes that begin with ``slot`` and end with its slab, not copied."""
        self._require_open("view")
        longest = (self.slab_slots - slot % self.slab_slots) * self.slot_bytes
        if not (0 <= slot < self.num_slots and 0 <= nbytes <= longest):
            raise KVTiersError(
                f"{nbytes} bytes of slot {slot} are not in {self!r}: this is a bug in kvtiers, "
                "please report it",
                kind=Kind.BROKEN,
                operation="view",
            )
        start = slot * self.slot_bytes
        view = self._slots[start : start + nbytes]
        return view if writable else view.toreadonly()

    def unlink(self) -> None:
        """Take the name away: nobody can join any more, and the last process frees the memory.

        Those who have it mapped keep it. Fine if the name is gone already.
        """
        self._require_open("unlink")
        with map_errors("unlink", self.path):
            unlink_if_same(self._fd, self.path)

    def close(self) -> None:
        """Unmap. Fine if closed already, and while views are in use.

        Such views keep the mapping, and with it the lock, until they and this object are gone.
        """
        if self._closed:
            return
        self._closed = True
        if self._toucher is not None:
            self._toucher.stop()
        with suppress(BufferError):  # a view is in use
            self._slots.release()
            self._map.close()
        os.close(self._fd)  # the mapping, if it lives on, has a duplicate that keeps the lock

    def check(self) -> None:
        """Raise AssertionError if the file is not what was joined, or its name is another's."""
        if self._closed:
            return
        try:
            header = read_header(self._fd, self.path)
        except ConfigError as e:
            raise AssertionError(f"{self!r}: {e}") from e
        if header != self._header:
            raise AssertionError(f"{self!r}: the header is not the one that was joined")
        if len(self._slots) != self.num_slots * self.slot_bytes:
            raise AssertionError(f"{self!r}: {len(self._slots)} bytes are mapped for the slots")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "mapped"
        slabs = f" in slabs of {self.slab_slots}" if self.slab_slots > 1 else ""
        slots = f"{self.num_slots} slots of {self.slot_bytes} bytes{slabs}"
        return f"<Region {self.path}: {slots}, {state}>"

    def _require_open(self, operation: str) -> None:
        if self._closed:
            raise KVTiersError(
                f"region {self.path} is closed", kind=Kind.CLOSED, operation=operation
            )


def _refuse_difference(path: str, there: Header, here: Header) -> None:
    if there == here:
        return
    theirs, mine = ({**h.fields(), **h.record, "record": None} for h in (there, here))
    differ = sorted(k for k in theirs.keys() | mine.keys() if theirs.get(k) != mine.get(k))
    listed = ", ".join(f"{k} ({theirs.get(k)} there, {mine.get(k)} here)" for k in differ)
    raise ConfigError(
        f"the ranks that share {path} disagree on {listed}: start all of them with the same "
        "model and configuration",
        fields=",".join(differ),
    )


def check_capacity(
    capacity_bytes: int,
    slab_bytes: int,
    directory: str = DIRECTORY,
    *,
    name: str | None = None,
    space: Callable[[str], int] = free_space,
    memory: Callable[[], int] = available_memory,
    limits: Callable[[], Sequence[Limit]] = container_limits,
) -> int:
    """How many slabs ``capacity_bytes`` buys. Raises ConfigError if none, or if they do not fit.
    It has to fit ``directory``, the machine and the limits of its containers; the refusal names
    the one that is least. What region ``name`` has allocated counts as available, so that each rank
    may ask although another one has attached.
    """
    num_slabs = capacity_bytes // slab_bytes
    if num_slabs < 1:
        raise ConfigError(
            f"cpu_bytes_to_use is {capacity_bytes} bytes, less than one chunk: give it at least "
            f"{slab_bytes} bytes",
            key="cpu_bytes_to_use",
        )
    needed = HEADER_BYTES + num_slabs * slab_bytes
    in_directory, in_memory, in_groups = space(directory), memory(), limits()
    # Asked last, so that an allocation that goes on meanwhile never counts against us.
    ours = _allocated(region_path(name, directory)) if name is not None else 0
    if needed > in_directory + ours:
        raise too_large(needed, in_directory + ours, directory)
    if needed > in_memory + ours:
        raise ConfigError(
            f"cpu_bytes_to_use needs {needed} bytes, but this machine has {in_memory + ours} bytes "
            "of memory available: lower it",
            key="cpu_bytes_to_use",
        )
    for limit in sorted(in_groups, key=lambda group: group.left):
        if needed > limit.left + ours:
            raise ConfigError(
                f"cpu_bytes_to_use needs {needed} bytes, but the memory limit {limit.path} of this "
                f"container or control group leaves {limit.left + ours} bytes: lower it, or raise "
                "that limit",
                key="cpu_bytes_to_use",
            )
    return num_slabs


def _allocated(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_blocks * 512
    return 0
