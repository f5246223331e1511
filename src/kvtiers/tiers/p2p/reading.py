"""The thread on which NIXL reads: its calls may take their time, and some copy as they are made.

It is given reads, makes a NIXL transfer of each, looks after those under way, and sums what came.
What it does not survive it reports: a read ends with the places that are whole, and why others are
not.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from xxhash import xxh3_64_intdigest

_log = logging.getLogger("kvtiers")

_LOOK_EVERY_S = 0.0001
_JOIN_S = 2.0
"""How long what is under way is waited for in the end."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk to be read."""

    place: int
    view: memoryview
    local: int
    remote: int
    """Addresses."""
    checksum: int
    """XXH3-64."""


@dataclass(slots=True, eq=False)
class Read:
    """Chunks of one transfer, from one producer."""

    metadata: bytes
    """The producer's agent."""
    chunks: Sequence[Chunk]
    ended: Callable[[dict[int, bool], str], None]
    """Called on this thread: whether each place is whole; why the read failed, if it did."""
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing more is read from this producer."""

    metadata: bytes


@dataclass(slots=True, eq=False)
class Reader:
    """Reads on a thread of its own; ``agent`` is a ``nixl_agent`` that nobody else calls."""

    agent: Any
    queue: "SimpleQueue[Read | Forget | None]" = field(default_factory=SimpleQueue)
    names: dict[bytes, str] = field(default_factory=dict)
    """Of producers' agents that NIXL knows."""
    active: list[Read] = field(default_factory=list)

    def run(self) -> None:
        """Read until None is in the queue; what is under way then is waited for, for a while."""
        while True:
            try:
                work = self.queue.get(block=not self.active)
            except Empty:
                if not self._look():
                    time.sleep(_LOOK_EVERY_S)
                continue
            if work is None:
                break
            if isinstance(work, Read):
                self._begin(work)
            else:
                self._forget(work.metadata)
        until = time.monotonic() + _JOIN_S
        while self.active and time.monotonic() < until:
            if not self._look():
                time.sleep(_LOOK_EVERY_S)
        for metadata in list(self.names):
            self._forget(metadata)

    def _begin(self, read: Read) -> None:
        try:
            name = self.names.get(read.metadata)
            if name is None:
                name = self.agent.add_remote_agent(read.metadata)
                self.names[read.metadata] = name
            local = [(chunk.local, chunk.view.nbytes, 0) for chunk in read.chunks]
            remote = [(chunk.remote, chunk.view.nbytes, 0) for chunk in read.chunks]
            read.handle = self.agent.initialize_xfer(
                "READ",
                self.agent.get_xfer_descs(local, "DRAM"),
                self.agent.get_xfer_descs(remote, "DRAM"),
                name,
            )
            self._went(read, self.agent.transfer(read.handle))
        except Exception as e:  # of NIXL's own kinds
            self._end(read, f"NIXL refused to read: {e}")

    def _went(self, read: Read, state: str) -> bool:
        """Take note of how a read stands; whether it ended."""
        if state == "PROC":
            if read not in self.active:
                self.active.append(read)
            return False
        self._end(read, "" if state == "DONE" else f"NIXL could not read: {state}")
        return True

    def _look(self) -> bool:
        """Look after what is under way; whether something ended."""
        ended = False
        for read in list(self.active):
            try:
                ended |= self._went(read, self.agent.check_xfer_state(read.handle))
            except Exception as e:
                self._end(read, f"NIXL could not read: {e}")
                ended = True
        return ended

    def _end(self, read: Read, why: str) -> None:
        if read in self.active:
            self.active.remove(read)
        whole = {chunk.place: not why and _is_whole(chunk) for chunk in read.chunks}
        try:
            if read.handle is not None:
                self.agent.release_xfer_handle(read.handle)
        except Exception as e:
            _log.warning("p2p: NIXL does not let go of a read: %s", e)
        read.ended(whole, why)

    def _forget(self, metadata: bytes) -> None:
        name = self.names.pop(metadata, None)
        try:
            if name is not None:
                self.agent.remove_remote_agent(name)
        except Exception as e:  # it is gone anyway
            _log.debug("p2p: NIXL does not forget a peer: %s", e)

    def check(self) -> None:
        """Raise AssertionError if a read is under way that was not begun."""
        assert all(read.handle is not None for read in self.active), "a read has no handle"

    def __repr__(self) -> str:
        return f"<Reader {len(self.active)} reads, {len(self.names)} producers>"


def _is_whole(chunk: Chunk) -> bool:
    try:
        return xxh3_64_intdigest(chunk.view) == chunk.checksum
    except ValueError:  # host memory is gone
        return False
