"""The ``p2p`` tier: chunks of other engines, in the form the core talks to.

It stores nothing: what is below an engine's host memory is, here, another's. All calls are decided
on dictionaries and a queue; the endpoint's threads do the rest. All of its state is the caller's:
calls exclude each other.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.chunks import Key, Lookup, OffloadPolicy, RequestContext
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import ChunksExchanged, Direction, Event, MissReason
from kvtiers.tiers.base import Circuit, Job, JobOutcome, JobReleased, Peers, Standing
from kvtiers.tiers.lanes import Mailbox
from kvtiers.tiers.misses import miss_of
from kvtiers.tiers.p2p.endpoint import Endpoint
from kvtiers.tiers.p2p.notes import (
    Answered,
    Ask,
    Failure,
    Load,
    Loaded,
    Moved,
    Over,
    Released,
    ToTier,
)
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.parent import Parent
from kvtiers.tiers.p2p.protocol import Role
from kvtiers.tiers.p2p.roles import Roles, Source, read_roles

_log = logging.getLogger("kvtiers")

_GRACE_S = 2.0
"""At its deadline the I/O thread ends a job or question; if even that is silent, the tier does."""


@dataclass(slots=True, eq=False)
class _Following:
    """A request that names a peer, or is named by one."""

    roles: Roles
    known: dict[Key, MissReason | None] = field(default_factory=dict)
    """None: the peer has it."""
    asked: set[Key] = field(default_factory=set)
    """Not answered."""
    gathered: list[Key] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Question:
    """What was asked in one step for one request."""

    request: str
    left: set[Key]
    deadline: float


@dataclass(slots=True, eq=False)
class _Running:
    """A job at the endpoint."""

    job: Job
    began: float
    deadline: float
    left: set[Key]
    done: list[Key] = field(default_factory=list)
    failed: dict[Key, KVTiersError] = field(default_factory=dict)
    bytes: int = 0
    in_use: int = 0
    """Parts that have failed and whose memory is not free."""
    reported: bool = False


class P2PTier:
    """Asks the peer that a request names."""

    name = "p2p"
    medium: str | None = None
    locality: str | None = "REMOTE"
    takes_cascades = False

    def __init__(
        self,
        label: str,
        options: P2POptions,
        endpoint: Endpoint,
        mailbox: Mailbox[ToTier],
        clock: Callable[[], float],
    ) -> None:
        """``mailbox.post`` is what the endpoint was given."""
        self.label = label
        self.max_pinned_fraction = options.max_pinned_fraction
        self._options = options
        self._endpoint = endpoint
        self._mailbox = mailbox
        self._clock = clock
        self._requests: dict[str, _Following] = {}
        self._looked_up: _Following | None = None
        """Whose chunks were looked up last."""
        self._questions: dict[int, _Question] = {}
        """Not answered, in the order in which they were asked."""
        self._numbers = 0
        self._jobs: dict[int, _Running] = {}
        self._finished: list[JobOutcome | JobReleased] = []
        self._came = Moved()
        self._told = {Direction.IN: Moved(), Direction.OUT: Moved()}
        """Of what came and what went out, how much was said in events."""
        self._complained = False
        self._closed = False

    def serve(self, parent: Parent) -> None:
        """Answer peers from these chunks; before it, every chunk is absent for them."""
        self._endpoint.serve(parent)

    @property
    def port(self) -> int:
        """Where peers are answered."""
        return self._endpoint.port

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which peers reach this engine."""
        options = self._options
        return options.advertised_host or options.host or "", self.port

    # -- requests --------------------------------------------------------------------------------

    def on_new_request(self, request: RequestContext) -> OffloadPolicy:
        """Follow it if it names a peer; who will be asked for it wants all of its chunks."""
        roles, complaint = read_roles(request.kv_transfer_params)
        if complaint is not None and not self._complained:
            self._complained = True
            _log.warning("%s: kv_transfer_params are ignored, said once: %s", self.label, complaint)
        if self._closed or roles == Roles():
            return OffloadPolicy.CHUNK
        self._requests[request.request_id] = _Following(roles)
        if roles.produces is None:
            return OffloadPolicy.CHUNK
        self._endpoint.local(roles.produces, begins=True)
        return OffloadPolicy.REQUEST

    def on_request_finished(self, request: RequestContext) -> None:
        """Tell those who wait for it, and the one who was asked."""
        following = self._requests.pop(request.request_id, None)
        self._looked_up = None
        if following is None or self._closed:
            return
        if following.roles.produces is not None:
            self._endpoint.local(following.roles.produces, begins=False)
        if following.roles.source is not None:
            self._endpoint.over(Over(following.roles.source))

    # -- lookups ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key], request: RequestContext) -> list[Lookup]:
        """MISS unless the request names a peer; RETRY until that has answered, or should have."""
        following = self._looked_up = self._requests.get(request.request_id)
        if following is None or following.roles.source is None or self._closed:
            return [Lookup.MISS] * len(keys)
        if not self._mailbox.empty():
            self._take_notes()
        return [self._find(key, following) for key in keys]

    def _find(self, key: Key, following: _Following) -> Lookup:
        if key in following.known:
            return Lookup.HIT if following.known[key] is None else Lookup.MISS
        if key not in following.asked:
            following.asked.add(key)
            following.gathered.append(key)
        return Lookup.RETRY

    def why_missed(self, key: Key) -> MissReason:
        """Why the lookup before this said MISS of it; absent too if nobody was named to ask."""
        if self._closed:
            return MissReason.TIER_DOWN
        why = None if self._looked_up is None else self._looked_up.known.get(key)
        return why or MissReason.ABSENT

    def on_schedule_end(self) -> None:
        """Ask for what lookups gathered in this step: one question per request."""
        self._take_notes()
        for name, following in self._requests.items():
            source = following.roles.source
            if not following.gathered or source is None:
                continue
            keys, following.gathered = tuple(following.gathered), []
            self._numbers += 1
            deadline = self._clock() + self._options.lookup_deadline_s
            last = deadline + self._options.handshake_deadline_s + _GRACE_S
            self._questions[self._numbers] = _Question(name, set(keys), last)
            self._endpoint.ask(Ask(self._numbers, source, keys, deadline))

    # -- jobs ------------------------------------------------------------------------------------

    def submit_store(self, job: Job) -> bool:
        """Never: nothing is stored here."""
        return False

    def submit_load(self, job: Job) -> bool:
        """Take a promotion for a request that names a peer."""
        following = self._requests.get(job.request.request_id) if job.request else None
        source = None if following is None else following.roles.source
        if source is None or self._closed:
            return False
        now = self._clock()
        deadline = now + self._load_deadline_s(source)
        self._jobs[job.id] = _Running(job, now, deadline + _GRACE_S, set(job.keys))
        self._endpoint.load(Load(job.id, source, job.keys, job.views, deadline))
        return True

    def _load_deadline_s(self, source: Source) -> float:
        options = self._options
        return options.prefill_load_s if source.role is Role.PREFILL else options.load_deadline_s

    def get_finished_jobs(self) -> list[JobOutcome | JobReleased]:
        """What ended since the last call."""
        self._take_notes()
        now = self._clock()
        for number, question in list(self._questions.items()):
            if now < question.deadline:
                break
            late = dict.fromkeys(question.left, False)
            self._answered(Answered(number, late, MissReason.PENDING))
        for running in list(self._jobs.values()):
            if not running.reported and now >= running.deadline:
                self._give_up(running)
        finished, self._finished = self._finished, []
        return finished

    def _give_up(self, running: _Running) -> None:
        """Not even the I/O thread answers: whatever it does, it may do it to the memory."""
        late = KVTiersError(f"{self.label} does not answer", kind=Kind.TIMEOUT, operation="load")
        running.failed.update(dict.fromkeys(running.left, late))
        running.in_use += len(running.left)
        self._report(running)

    def _take_notes(self) -> None:
        for note in self._mailbox.take():
            if isinstance(note, Answered):
                self._answered(note)
            elif isinstance(note, Loaded):
                self._loaded(note)
            else:
                self._released(note)

    def _answered(self, note: Answered) -> None:
        question = self._questions.get(note.number)
        if question is None:
            return
        question.left.difference_update(note.found)
        if not question.left:
            del self._questions[note.number]
        following = self._requests.get(question.request)
        if following is not None:
            for key, there in note.found.items():
                following.known[key] = None if there else note.why
            following.asked.difference_update(note.found)

    def _loaded(self, note: Loaded) -> None:
        self._came = self._came.plus(len(note.done), note.bytes)
        running = self._jobs.get(note.job)
        if running is None:
            return
        ended = running.left & {*note.done, *note.failed}
        running.left -= ended
        if running.reported:  # it was given up; what it had in use is free now, or will be
            running.in_use -= len(ended)
            if note.memory_in_use:
                running.in_use += 1
            self._forget_if_free(running)
            return
        running.done += note.done
        running.failed.update({key: self._error(why) for key, why in note.failed.items()})
        running.bytes += note.bytes
        running.in_use += note.memory_in_use
        self._forget_failed(running, note)
        if not running.left:
            self._report(running)

    def _forget_failed(self, running: _Running, note: Loaded) -> None:
        """What did not come is a MISS for its request from now on."""
        request = running.job.request
        following = self._requests.get(request.request_id) if request else None
        if following is not None:
            following.known.update((key, miss_of(why.kind)) for key, why in note.failed.items())

    def _released(self, note: Released) -> None:
        running = self._jobs.get(note.job)
        if running is not None:
            running.in_use -= 1
            self._forget_if_free(running)

    def _report(self, running: _Running) -> None:
        running.reported = True
        job = running.job
        self._finished.append(
            JobOutcome(
                job.id,
                tuple(running.done),
                running.failed,
                running.bytes,
                self._clock() - running.began,
                running.in_use > 0,
            )
        )
        if not running.in_use:
            del self._jobs[job.id]

    def _forget_if_free(self, running: _Running) -> None:
        if running.reported and running.in_use <= 0:
            del self._jobs[running.job.id]
            self._finished.append(JobReleased(running.job.id))

    def _error(self, why: Failure) -> KVTiersError:
        return KVTiersError(f"{self.label}: {why.words}", kind=why.kind, operation="load")

    # -- for people ------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """How much came, and how much went out, since the last call."""
        events: list[Event] = []
        for direction, moved in ((Direction.IN, self._came), (Direction.OUT, self._endpoint.gave)):
            told = self._told[direction]
            if moved != told:
                self._told[direction] = moved
                chunks, nbytes = moved.chunks - told.chunks, moved.bytes - told.bytes
                events.append(ChunksExchanged(self.label, direction, chunks, nbytes))
        return events

    def peers(self) -> Peers:
        """Whom it deals with."""
        return self._endpoint.peers()

    def standing(self) -> Standing:
        """Jobs, and the memory they hold; it is left alone when all peers that it knows are."""
        peers = self.peers()
        asked = peers.connected + peers.dialling + peers.left_alone + peers.idle
        jobs = sum(not running.reported for running in self._jobs.values())
        held = sum(running.job.views.nbytes for running in self._jobs.values())
        alone = 0 < asked == peers.left_alone
        return Standing(Circuit.OPEN if alone else Circuit.CLOSED, jobs, held)

    # -- the rest --------------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key]) -> None:
        """Peers know their own use."""

    def has_pending_work(self) -> bool:
        """Whether a lookup or a job is outstanding, or an outcome was not fetched."""
        running = any(not job.reported for job in self._jobs.values())
        return bool(self._finished or self._questions or running or self._gathered)

    @property
    def _gathered(self) -> bool:
        return any(following.gathered for following in self._requests.values())

    def drain_jobs(self, deadline_s: float) -> bool:
        """Wait until no job runs and no memory is in use."""
        until = self._clock() + deadline_s
        while True:
            self._take_notes()
            if not self._jobs:
                return True
            left = until - self._clock()
            if left <= 0 or not self._mailbox.wait(left):
                return False

    def shutdown(self, deadline_s: float) -> None:
        """End all sessions; nothing is brought any more."""
        if self._closed:
            return
        self._closed = True
        if self._endpoint.close(deadline_s):  # nobody writes any more
            for running in self._jobs.values():
                running.job.views.release_all()
        self._jobs.clear()
        self._finished.clear()
        self._requests.clear()
        self._looked_up = None
        self._questions.clear()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert all(q.left for q in self._questions.values()), "a question was answered and is kept"
        for running in self._jobs.values():
            ended = {*running.done, *running.failed}
            whole = set(running.job.keys)
            assert ended | running.left == whole, "the job's chunks are not all there"
            assert running.in_use > 0 or not running.reported, "a job has ended and is kept"
        for following in self._requests.values():
            assert following.asked.isdisjoint(following.known), "asked for, and known"
            assert set(following.gathered) <= following.asked, "gathered, and not asked for"

    def __repr__(self) -> str:
        return (
            f"<P2PTier {self.label}: {len(self._requests)} requests, "
            f"{len(self._questions)} questions, {len(self._jobs)} jobs>"
        )
