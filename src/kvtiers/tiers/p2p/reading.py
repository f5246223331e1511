"""The thread that calls NIXL: its calls may take their time, and some copy as they are made.

It is given reads, makes a NIXL transfer of each, and looks after those under way. A read that fails
says why.

NIXL gets on only while it is called: also for what others read here, where that is not done by a
device or the kernel, as over TCP, and for their first read, which makes the connection. So this
thread looks after NIXL as long as something is read here, or lent to others. Else it sleeps.

A read cannot be taken back. NIXL forgets it with its producer (``remove_remote_agent``), and UCX
goes on: over TCP the bytes of a producer that had been stopped landed when it was continued, in
memory that was another's by then. So a read that nobody waits for is looked after until it ends,
but seldom, and its producer is not forgotten before.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

_log = logging.getLogger("kvtiers")

_LOOK_EVERY_S = 0.0001
"""While something is read here."""
_LOOK_FOR_OTHERS_EVERY_S = 0.0005
"""While others may read: so that they need not wait long where UCX sends what they ask for."""
_LOOK_AFTER_STUCK_S = 0.05
"""At most this often where nobody waits for what is read: its producer hangs."""
_LINGER_S = 2.0
"""How long NIXL is looked after when what was lent is taken back, or a producer is forgotten: until
reads that nobody waits for have ended, and connections are closed."""
_JOIN_S = 2.0
"""How long what is under way is waited for in the end."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk to be read."""

    place: int
    view: memoryview
    nbytes: int
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
    ended: Callable[["Read", str], None]
    """Called on this thread: why the read failed, or nothing."""
    handle: Any = None
    wanted: bool = True
    """Whether somebody waits for it. The I/O thread says when nobody does any more."""

    @property
    def nbytes(self) -> int:
        """Of all its chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing more is read from this producer."""

    metadata: bytes


@dataclass(frozen=True, slots=True)
class Lent:
    """So many chunks more, or less, are lent to consumers: they may read them at any time."""

    count: int
    lingers: bool = False
    """They were not taken: a read of them may be under way."""


Work = Read | Forget | Lent | None
"""None: the end."""


@dataclass(slots=True, eq=False)
class Reader:
    """Reads on a thread of its own; ``agent`` is a ``nixl_agent`` that nobody else calls."""

    agent: Any
    clock: Callable[[], float]
    queue: "SimpleQueue[Work]" = field(default_factory=SimpleQueue)
    names: dict[bytes, str] = field(default_factory=dict)
    """Of producers' agents that NIXL knows."""
    active: list[Read] = field(default_factory=list)
    lent: int = 0
    """Chunks."""
    lingers_until: float = 0.0
    stuck_pause: float = 0.0
    """Until those are looked after that nobody waits for."""
    stuck_due: float = 0.0

    def run(self) -> None:
        """Read until None is in the queue; what is under way then is waited for, for a while.

        If ``active`` is not empty afterwards, the agent may still write where it was to read to.
        """
        while (work := self._next()) is not None:
            if isinstance(work, Read):
                self._begin(work)
            elif isinstance(work, Forget):
                self._forget(work.metadata)
                self._linger()
            else:
                self.lent += work.count
                if work.lingers:
                    self._linger()
        until = self.clock() + _JOIN_S
        while self.active and self.clock() < until:
            time.sleep(self._look())
        if not self.active:
            for metadata in list(self.names):
                self._forget(metadata)

    def _next(self) -> Work:
        """What is to be done, when there is something. NIXL is looked after meanwhile."""
        patience = 0.0
        while self.active or self.lent or self.clock() < self.lingers_until:
            try:
                return self.queue.get(timeout=patience)
            except Empty:
                patience = self._look()
        return self.queue.get()

    def _linger(self) -> None:
        self.lingers_until = self.clock() + _LINGER_S

    def _begin(self, read: Read) -> None:
        if not read.wanted:
            self._end(read, "nobody waits for it")
            return
        try:
            name = self.names.get(read.metadata)
            if name is None:
                name = self.agent.add_remote_agent(read.metadata)
                self.names[read.metadata] = name
            local = [(chunk.local, chunk.nbytes, 0) for chunk in read.chunks]
            remote = [(chunk.remote, chunk.nbytes, 0) for chunk in read.chunks]
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

    def _look(self) -> float:
        """Look after what is under way; when to look again, in seconds."""
        now = self.clock()
        wanted, due = any(read.wanted for read in self.active), now >= self.stuck_due
        looked_at = [read for read in self.active if read.wanted or due]
        if not looked_at:
            self._get_on()
        ended = sum(map(self._has_ended, looked_at))
        if due:
            longer = min(max(2 * self.stuck_pause, _LOOK_EVERY_S), _LOOK_AFTER_STUCK_S)
            self.stuck_pause = 0.0 if ended else longer
            self.stuck_due = now + self.stuck_pause
        if ended:
            return 0.0
        if wanted:
            return _LOOK_EVERY_S
        others = not self.active or self.lent > 0 or now < self.lingers_until
        return _LOOK_FOR_OTHERS_EVERY_S if others else self.stuck_due - now

    def _has_ended(self, read: Read) -> bool:
        try:
            return self._went(read, self.agent.check_xfer_state(read.handle))
        except Exception as e:
            self._end(read, f"NIXL could not read: {e}")
            return True

    def _get_on(self) -> None:
        """Let NIXL do what others wait for; looking after a read does that, too."""
        try:
            self.agent.get_new_notifs()
        except Exception as e:
            _log.debug("p2p: NIXL does not get on: %s", e)

    def _end(self, read: Read, why: str) -> None:
        if read in self.active:
            self.active.remove(read)
        try:
            if read.handle is not None:
                self.agent.release_xfer_handle(read.handle)
        except Exception as e:
            _log.warning("p2p: NIXL does not let go of a read: %s", e)
        read.ended(read, why)

    def _forget(self, metadata: bytes) -> None:
        name = self.names.pop(metadata, None)
        try:
            if name is not None:
                self.agent.remove_remote_agent(name)
        except Exception as e:  # it is gone anyway
            _log.debug("p2p: NIXL does not forget a peer: %s", e)

    def check(self) -> None:
        """Raise AssertionError if a read was not begun, or was taken without being lent."""
        assert all(read.handle is not None for read in self.active), "a read has no handle"
        assert self.lent >= 0, "more chunks were taken than lent"

    def __repr__(self) -> str:
        return (
            f"<Reader {len(self.active)} reads, {self.lent} chunks lent, {len(self.names)} known>"
        )
