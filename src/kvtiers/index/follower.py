"""One engine's stream of events, told to the index in order and without holes, or from anew.

What is missing is asked for again. Where it cannot be had, the pod is cleared and built up from
what the publisher still has, and from then on it is incomplete: something may be there that the
index does not know. A restart shows as a number that falls, and after a lost connection as a last
batch that is another one.
"""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass

import zmq.asyncio

from kvtiers.index.course import At, Course, Turn
from kvtiers.index.options import Clock, Engine, IndexOptions
from kvtiers.index.parts import parts
from kvtiers.index.places import Pod
from kvtiers.index.presence import Presence
from kvtiers.index.shared import Shared
from kvtiers.index.sockets import Link, Live, Message, replayed
from kvtiers.kvevents.messages import MalformedEvent, decode

_log = logging.getLogger("kvtiers.index")

_LOOK_S = 0.5
"""How often it is looked whether something is due while nothing comes."""
_MAX_RETRY_S = 60.0


@dataclass(slots=True)
class Counts:
    """What happened to one stream so far."""

    batches: int = 0
    events: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0
    failed_replays: int = 0
    undecodable: int = 0
    """Batches that were skipped: what they said is not known."""
    unknown: int = 0
    """Events of classes that are not known here."""


class Follower:
    """Follows one engine for as long as ``run`` runs."""

    def __init__(
        self,
        engine: Engine,
        presence: Presence,
        options: IndexOptions,
        context: zmq.asyncio.Context,
        clock: Clock,
        shared: Shared | None = None,
    ) -> None:
        self.engine = engine
        self.counts = Counts()
        self.connected = False
        self.at: At | None = None
        """None: nothing is known, or was said yet."""
        self.course = Course()
        self._presence = presence
        self._options = options
        self._context = context
        self._clock = clock
        self._shared = shared
        self._snapshot_at = clock() + options.snapshot_interval_s
        self._kept: At | None = None
        """Of the last snapshot."""
        self._down_since = clock()
        self._retry_at: float | None = None
        self._retry_s = options.retry_s
        presence.pod(engine.name, engine.model)

    @property
    def pod(self) -> Pod:
        """What the index has of it."""
        return self._presence.pods[self.engine.name]

    async def run(self) -> None:
        """Until it is cancelled. What goes wrong is logged, and what is known started over."""
        live = Live(self._context, self.engine.endpoint, self.engine.topic)
        try:
            while True:
                happened = await live.next(_LOOK_S)
                try:
                    await self._take(happened)
                except Exception:  # the fence: a bug here must not leave what is known to grow old
                    _log.exception("%s is started over: please report this", self.engine.name)
                    self._forget()
                    self._retry_at = self._clock() + self._retry_s
                await asyncio.sleep(0)
        finally:
            live.close()

    # -- what happens ----------------------------------------------------------------------------

    async def _take(self, happened: Message | Link | None) -> None:
        if isinstance(happened, Message):
            await self._came(happened)
        elif isinstance(happened, Link):
            await self._linked(happened.up)
        await self._due()

    async def _came(self, message: Message) -> None:
        turn = self.course.live(message.seq)
        if turn is Turn.CATCH_UP and not await self._catch_up(message.seq):
            turn = Turn.START_OVER
        if turn is Turn.START_OVER:
            known = self.course.next
            self.counts.restarts += known is not None and message.seq < known
            self._forget()
            await self._start_over()
        known = self.course.next
        if known is None:
            self.pod.complete = message.seq == 0
        elif message.seq > known:
            self.pod.complete = False
        if known is None or message.seq >= known:
            await self._apply(message)

    async def _catch_up(self, seq: int) -> bool:
        """Whether all before this batch is known now."""
        self.counts.gaps += 1
        began = await self._replay(self.course.next) is not None
        return began and self.course.next is not None and self.course.next >= seq

    async def _linked(self, up: bool) -> None:
        before, self.connected = self.connected, up
        name, endpoint = self.engine.name, self.engine.endpoint
        if not up:
            if before:
                self._down_since = self._clock()
                _log.warning("%s: the stream at %s is lost", name, endpoint)
            return
        if not before:
            _log.info("%s: the stream at %s is connected", name, endpoint)
        if self.engine.replay is None:
            return
        self.course.reconnected()
        failed = self.counts.failed_replays
        # The batch that was last says whether it is the publisher that was there before.
        if self.at is None or await self._replay(self.at.seq) is None:
            replaced = self.at is not None and failed == self.counts.failed_replays
            self.counts.restarts += replaced
            await self._start_over()

    async def _due(self) -> None:
        now = self._clock()
        if not self.connected:
            if now - self._down_since > self._options.forget_after_s and self.at is not None:
                _log.warning("%s is unreachable, and forgotten", self.engine.name)
                self._forget()
        elif self._retry_at is not None and now >= self._retry_at:
            await self._start_over()
        if self._shared is not None and now >= self._snapshot_at:
            self._snapshot_at = now + self._options.snapshot_interval_s
            self._keep(self._shared)

    def _keep(self, shared: Shared) -> None:
        at = self.at
        if at is not None and at != self._kept and self.engine.replay is not None:
            shared.put(self.engine, self._presence.snapshot(self.engine.name, at.seq, at.digest))
            self._kept = at

    # -- replays ---------------------------------------------------------------------------------

    async def _start_over(self) -> None:
        """Have all replayed that the publisher still has. Until it comes, what is known stays."""
        if self.engine.replay is None or await self._resumed():
            return
        first = await self._replay(None)
        if first is None:
            self.pod.complete = False
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
            return
        self._retry_at, self._retry_s = None, self._options.retry_s
        self.pod.complete = self.pod.complete and first == 0

    async def _resumed(self) -> bool:
        """Whether what was kept of the pod, and what it said since, is known now."""
        if self._shared is None or self.at is not None:
            return False
        snapshot = await self._shared.load(self.engine)
        if snapshot is None:
            return False
        self._presence.restore(self.engine.name, snapshot)
        self.course.applied(snapshot.seq)
        self.at = At(snapshot.seq, snapshot.digest)
        if await self._replay(snapshot.seq) is None:
            self._forget()
            return False
        return True

    async def _replay(self, start: int | None) -> int | None:
        """Apply what is replayed from ``start`` on; None: from anew.

        Returns the first number; None if it did not begin with ``start``, or failed.
        """
        first: int | None = None
        asked = start or 0
        until = asyncio.get_running_loop().time() + self._options.replay_timeout_s
        while True:
            anew = start is None and first is None
            try:
                came, ended = await self._replay_once(asked, until, anew=anew)
            except TimeoutError:
                self.counts.failed_replays += 1
                _log.warning("%s does not replay batch %d and later", self.engine.name, asked)
                return None
            if first is not None and came is None:
                self.pod.complete = False  # a hole stays
            first = came if first is None else first
            if ended:
                return first
            asked = self.course.next or 0

    async def _replay_once(
        self, start: int, until: float, *, anew: bool
    ) -> tuple[int | None, bool]:
        """The first number, and whether all came after it."""
        if self.engine.replay is None:
            return None, True
        self.counts.replays += 1
        first: int | None = None
        messages = replayed(self._context, self.engine.replay, start, until)
        async with aclosing(messages) as coming:
            async for message in coming:
                if first is None:
                    if anew:
                        self._forget()
                        self.pod.complete = True
                    elif not self._fits(start, message):
                        return None, True
                    first = message.seq
                elif message.seq != self.course.next:
                    return first, False
                if self.at is None or message.seq != self.at.seq:
                    await self._apply(message)
        if first is None and anew:
            # It is there, and has said nothing yet.
            self._forget()
            self.pod.complete = True
            self.course.next = first = 0
        return first, True

    def _fits(self, start: int, message: Message) -> bool:
        if message.seq != start:
            return False
        again = self.at is not None and start == self.at.seq
        return not again or self.at == At.of(message.seq, message.payload)

    # -- batches ---------------------------------------------------------------------------------

    async def _apply(self, message: Message) -> None:
        self.counts.batches += 1
        try:
            batch = decode(message.payload)
        except MalformedEvent as e:
            self.counts.undecodable += 1
            self.pod.complete = False
            _log.warning("%s: batch %d is skipped: %s", self.engine.name, message.seq, e)
        else:
            self.counts.unknown += batch.unknown
            self.counts.events += len(batch.events)
            for part in parts(batch.events):
                for event in part:
                    self._presence.apply(self.engine.name, event)
                await asyncio.sleep(0)
        self.course.applied(message.seq)
        self.at = At.of(message.seq, message.payload)

    def _forget(self) -> None:
        self._presence.clear(self.engine.name, complete=False)
        self.course.forget()
        self.at = None

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self.course.check()
        if self.at is not None:
            assert self.course.next == self.at.seq + 1, "it is elsewhere than its course says"

    def __repr__(self) -> str:
        link = "connected" if self.connected else "not connected"
        return f"<Follower {self.engine.name} {link}, {self.course}, {self.counts.batches} batches>"
