"""A manager in a world where anything may happen in any order, and what must be true all the same.

The world: requests that look up, load and store at random, a device that copies late or in vain,
and two tiers that answer late, twice, wrongly or never. Faults are those that ``docs/contracts.md``
and ``docs/faults.md`` promise to survive; the device keeps its contract, as our own copiers do.

What holds after every action is in ``check``; what holds once all answer again, in ``settle``.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvtiers.chunks import Lookup, OffloadPolicy, RequestContext, TierFilter, TierMatch
from kvtiers.core.load import NO_SLOT
from kvtiers.core.manager import ManagerOptions, TieringManager
from kvtiers.core.promote import PromoteOptions
from kvtiers.errors import Kind
from kvtiers.events import ChunksRemoved, ChunksStored, Hop, TransferFinished, TransferStarted
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import load_policy
from kvtiers.host.sized import SizedIndex
from kvtiers.host.slabs import SizeClasses
from kvtiers.metrics import Metrics
from kvtiers.tiers.base import JobOutcome, JobReleased
from tests.model.sim_tier import GARBAGE, KEYS, LAYOUT, RIGHT, SimTier

SLOTS = 6
SLOT = 48
"""Bytes of a slot where all are of one size."""
SLABS, SLAB, GRANULE = 4, 6, 16
"""Where chunks have slots of their own size: 3 small ones or 2 large ones in a slab."""
KINDS = (Kind.IO, Kind.FULL, Kind.CORRUPT, Kind.VANISHED, Kind.TIMEOUT)
PROMOTE = PromoteOptions(lookup_deadline_s=5.0, promote_deadline_s=20.0, promotion_wait_s=0.25)
UNRESOLVED = (Lookup.HIT_PENDING, Lookup.RETRY)
FILTERS = (TierFilter(), TierFilter(()), TierFilter((TierMatch(locality="REMOTE"),)))
PASSES = (0.01, 0.01, 0.01, 0.1, 0.1, 0.1, 0.3, 0.3, 2.0, 2.0, 6.0, 45.0)
"""Seconds between steps: within and beyond each deadline."""
MOODS = ("honest",) * 5 + ("mute", "liar", "talkative")
METHODS = ("lookup", "submit", "finished", "touch", "step", "pending", "events")
"""What a tier may raise in, some times in a row: a few are borne, three are fenced."""
STEP_BOUND = 600
"""Half seconds within which everything has to come to rest; pauses and parking last 60 s."""


@dataclass(eq=False)
class Copy:
    """A copy between device and host memory that has not ended."""

    keys: list
    slots: list
    request: object = None
    """For loads."""
    orphaned: bool = False
    """It was in flight at a reset."""


@dataclass(eq=False)
class Asking:
    """A live request and what it may load."""

    handle: object
    prompt: list
    hits: list = field(default_factory=list)
    load: Copy | None = None


class Simulation:
    """All of it. Actions take ``draw(n)``, which chooses one of n; they are listed in ACTIONS."""

    def __init__(self, policy="lru", fraction=0.5, threshold=0, sized=False):
        self.now = 100.0
        self.memory = memoryview(bytearray(SLABS * SLAB * GRANULE if sized else SLOTS * SLOT))
        self._unit = GRANULE if sized else SLOT
        self.events = []
        self.metrics = Metrics()
        self.index = (
            SizedIndex(
                SLABS,
                SLAB,
                SizeClasses.of(LAYOUT, GRANULE),
                lambda capacity: load_policy(policy, capacity=capacity),
            )
            if sized
            else HostIndex(SLOTS, load_policy(policy, capacity=SLOTS))
        )
        self.tiers = [
            SimTier("near", "LOCAL", OffloadPolicy.CHUNK),
            SimTier("far", "REMOTE", OffloadPolicy.REQUEST),
        ]
        self.manager = TieringManager(
            index=self.index,
            layout=LAYOUT,
            view=self._view,
            tiers=self.tiers,
            sink=self._hear,
            options=ManagerOptions(PROMOTE, fraction, threshold, job_deadline_s=40.0),
        )
        self.requests = []
        self.stores = []
        self.loads = []
        self._replayed, self._read = set(), 0
        self._names = 0
        self.manager.poll(self.now)

    def _view(self, slot, nbytes, writable):
        view = self.memory[slot * self._unit :][:nbytes]
        return view if writable else view.toreadonly()

    def _hear(self, event):
        self.events.append(event)
        self.metrics(event)

    # -- the engine -----------------------------------------------------------------------------

    def new_request(self, draw):
        if len(self.requests) >= 3:
            return
        self._names += 1
        start, length = draw(len(KEYS) - 2), 1 + draw(4)
        prompt = KEYS[start : start + length]
        context = RequestContext(f"r{self._names}", None, FILTERS[max(0, draw(6) - 3)])
        self.requests.append(Asking(self.manager.on_new_request(context), prompt))

    def look_up(self, draw):
        asking = self._pick(self.requests, draw)
        if asking and asking.load is None:
            self._look_up(asking)

    def _look_up(self, asking):
        verdicts = self.manager.lookup_many(asking.prompt, asking.handle)
        hits = verdicts.index(Lookup.MISS) if Lookup.MISS in verdicts else len(verdicts)
        resolved = not any(v in UNRESOLVED for v in verdicts)
        asking.hits = asking.prompt[:hits] if resolved else []
        return verdicts

    def begin_load(self, draw):
        asking = self._pick([a for a in self.requests if a.hits and not a.load], draw)
        if asking:
            keys = asking.hits[draw(len(asking.hits)) :]
            slots = self.manager.load(keys, asking.handle)
            asking.load = Copy(list(keys), list(slots), asking)
            asking.hits = []
            self.loads.append(asking.load)

    def end_load(self, draw):
        copy = self._pick(self.loads, draw)
        if copy:
            self._end_load(copy, fails=draw(4) == 0)

    def _end_load(self, copy, fails=False):
        self.loads.remove(copy)
        copy.request.load = None
        there = [(k, s) for k, s in zip(copy.keys, copy.slots, strict=True) if s != NO_SLOT]
        for key, slot in there:
            loaded = bytes(self._view(slot, len(RIGHT[key]), False))
            assert loaded == RIGHT[key], f"wrong bytes of {key.hex()} reached the device"
        if copy.orphaned:
            self.manager.release_device([s for _, s in there])
        else:
            ok = not fails and len(there) == len(copy.keys)
            self.manager.complete_load(copy.request.handle, ok)
            if not ok:
                verdicts = [self.manager.lookup(k, copy.request.handle) for k in copy.keys]
                assert set(verdicts) == {Lookup.MISS}, "a request may load again what failed"
                assert self.index.ready.keys().isdisjoint(copy.keys), "a bad chunk stays"

    def begin_store(self, draw):
        asking = self._pick(self.requests, draw)
        if asking:
            if asking.load is None:
                self.manager.on_request_scheduled(asking.handle)
                asking.hits = []
            plan = self.manager.store(asking.prompt[draw(len(asking.prompt)) :], asking.handle)
            if plan.keys:
                self.stores.append(Copy(plan.keys, plan.slots))

    def end_store(self, draw):
        copy = self._pick(self.stores, draw)
        if copy:
            self._end_store(copy, [k for k in copy.keys if draw(6) == 0])

    def _end_store(self, copy, failed=()):
        self.stores.remove(copy)
        for key, slot in zip(copy.keys, copy.slots, strict=True):
            data = GARBAGE[key] if key in failed else RIGHT[key]
            self._view(slot, len(data), True)[:] = data
        if copy.orphaned:
            self.manager.release_device(copy.slots)
        else:
            self.manager.complete_store(copy.keys, failed)

    def finish_request(self, draw):
        asking = self._pick(self.requests, draw)
        if asking:
            self._finish_request(asking)

    def _finish_request(self, asking):
        self.requests.remove(asking)
        self.manager.on_request_finished(asking.handle)

    def touch(self, draw):
        self.manager.touch([KEYS[draw(len(KEYS))] for _ in range(2)])

    def reset(self, draw):
        if draw(10):
            return  # more often nothing would ever get anywhere
        slots = [s for c in self.stores + self.loads if not c.orphaned for s in c.slots]
        device = self.manager.reset()
        assert Counter(device) == Counter(s for s in slots if s != NO_SLOT), "device slots"
        for copy in self.stores + self.loads:
            copy.orphaned = True
        for asking in self.requests:
            asking.hits = []
        assert self.manager.use.resident == 0
        assert not any(r.held for r in self.manager._ledger.requests.values()), "held after reset"

    def step(self, draw):
        self._step(PASSES[draw(len(PASSES))])

    def _step(self, seconds):
        self.now += seconds
        self.manager.end_step(self.now)
        for request in self.manager._ledger.waiting.values():
            since = request.waiting_since
            late = since is not None and self.now - since >= PROMOTE.promote_deadline_s
            assert not late, f"{request.context.request_id} waits beyond its deadline"

    # -- the tiers ------------------------------------------------------------------------------

    def tier_finishes(self, draw):
        tier, job = self._job(draw)
        if job and job.id in tier.lingering:
            tier.release(job)
        elif job:
            failed = [k for k in job.keys if draw(4) == 0]
            tier.finish(job, failed, KINDS[draw(len(KINDS))])

    def tier_times_out(self, draw):
        tier, job = self._job(draw)
        if job:
            tier.time_out(job)

    def tier_answers_oddly(self, draw):
        tier, job = self._job(draw)
        if job and job.id not in tier.lingering:
            tier.finish_oddly(job)

    def tier_scribbles(self, draw):
        tier, job = self._job(draw)
        if job:
            tier.scribble(job)

    def tier_repeats_itself(self, draw):
        tier = self.tiers[draw(2)]
        if tier.said:
            tier.say_again(tier.said[draw(len(tier.said))])

    def tier_speaks_for_another(self, draw):
        which = draw(2)
        tier, other = self.tiers[which], self.tiers[1 - which]
        job = self._pick(list(other.jobs.values()), draw)
        if job:
            done = JobOutcome(job.id, job.keys)
            tier.say_again((done, JobReleased(job.id))[draw(2)])

    def tier_loses_a_chunk(self, draw):
        tier = self.tiers[draw(2)]
        key = self._pick(sorted(tier.stored), draw)
        if key:
            del tier.stored[key]
            tier.lost.add(key)

    def tier_changes_its_mood(self, draw):
        tier = self.tiers[draw(2)]
        tier.accepts = draw(6) > 0
        tier.mode = MOODS[draw(len(MOODS))]
        tier.raising = [METHODS[draw(len(METHODS))]] * max(0, draw(16) - 12)

    def _job(self, draw):
        tier = self.tiers[draw(2)]
        return tier, self._pick(list(tier.jobs.values()), draw)

    @staticmethod
    def _pick(some, draw):
        return some[draw(len(some))] if some else None

    # -- what must hold -------------------------------------------------------------------------

    def check(self):
        """After every action."""
        self.manager.check()
        for attached in self.manager.tiers:
            attached.tier.check()
        self._metrics_must_agree()
        for key, slot in self.index.ready.items():
            held = bytes(self._view(slot, len(RIGHT[key]), False))
            assert held == RIGHT[key], f"host memory holds wrong bytes of {key.hex()}"
        self._replay()
        assert self._replayed == set(self.index.ready), "the events tell other contents"
        assert Counter(self._holders()) == Counter(self.index.hold_counts()), (
            "the holds of a slot are not those of its users"
        )

    def _metrics_must_agree(self):
        self.metrics.check()
        flying = {}
        for flight in self.manager._ledger.flights.values():
            counts = flying.setdefault((flight.hop, flight.tier.label), [0, 0])
            counts[0] += 1
            counts[1] += len(flight.keys)
        active = {where: [*counts] for where, counts in self.metrics.active.items() if any(counts)}
        assert active == flying, "the metrics count other jobs than are in flight"

    def _replay(self):
        for event in self.events[self._read :]:
            if isinstance(event, ChunksStored) and event.tier == "0:primary":
                assert self._replayed.isdisjoint(event.keys), "stored twice"
                self._replayed.update(event.keys)
            elif isinstance(event, ChunksRemoved) and event.tier == "0:primary":
                assert self._replayed.issuperset(event.keys), "removed, but never stored"
                self._replayed.difference_update(event.keys)
        self._read = len(self.events)

    def _holders(self):
        """Every slot, once for each who may touch it, by the books of all concerned."""
        ledger = self.manager._ledger
        for flight in ledger.flights.values():
            yield from flight.slots
        for _, slots in ledger.lingering.values():
            yield from slots
        for by_request in self.manager._promotions._gathered.values():
            for _, _, slots in by_request.values():
                yield from slots
        for request in ledger.requests.values():
            yield from request.held.values()
        for copy in self.stores + self.loads:
            yield from (slot for slot in copy.slots if slot != NO_SLOT)

    def settle(self):
        """All answer again: everything ends, nothing stays held, every tier has every chunk."""
        for tier in self.tiers:
            tier.accepts, tier.mode, tier.raising = True, "honest", []
        for copy in list(self.stores):
            self._end_store(copy)
        for copy in list(self.loads):
            self._end_load(copy)
        self._await(self._all_resolved, "a request waits for ever")
        for asking in list(self.requests):
            self._finish_request(asking)
        self._await(self._at_rest, "the manager does not come to rest")
        use, ledger = self.manager.use, self.manager._ledger
        assert (use.pinned, use.filling, use.orphaned) == (0, 0, 0), f"slots stay held: {use}"
        assert not ledger.requests, "a request outlives its end"
        assert not ledger.waiting, "a request waits after its end"
        for tier in self.tiers:
            lacking = set(self.index.ready) - set(tier.stored) - tier.lost
            assert not lacking, f"{len(lacking)} resident chunks never reached {tier.name}"
        for backlog in self.manager._cascades._backlogs.values():
            assert not backlog.attempts.keys() - self.index.ready.keys(), "attempts pile up"
        self._transfers_must_balance()
        self._must_stop()

    def _must_stop(self):
        told = [e for e in self.events if getattr(e, "tier", "").startswith("of ")]
        assert told or not any(t.stored or t.lost for t in self.tiers), "tiers' events are lost"
        assert self.manager.drain(10.0, lambda: self.now), "nothing is in flight, yet not drained"
        self.manager.shutdown(10.0, lambda: self.now)
        assert not any(tier.accepts for tier in self.tiers), "a tier was not stopped"

    def _await(self, reached, otherwise):
        for _ in range(STEP_BOUND):
            for tier in self.tiers:
                tier.answer_all()
            self._step(0.5)
            self.check()
            if reached():
                return
        raise AssertionError(f"{otherwise}: {self.manager!r}")

    def _all_resolved(self):
        verdicts = [v for asking in self.requests for v in self._look_up(asking)]
        return not any(v in UNRESOLVED for v in verdicts)

    def _at_rest(self):
        waiting = self.manager._cascades.waiting
        return not (
            waiting or self.manager.has_pending_work(self.now) or any(t.jobs for t in self.tiers)
        )

    def _transfers_must_balance(self):
        """Each job that began has ended once, and no other."""
        for hop in (Hop.CASCADE, Hop.PROMOTE):
            of = [e for e in self.events if getattr(e, "hop", None) is hop]
            began = _sum((e.tier, e.chunks) for e in of if isinstance(e, TransferStarted))
            finished = [e for e in of if isinstance(e, TransferFinished)]
            ended = _sum((e.tier, e.done + e.failed) for e in finished)
            assert began == ended, f"{hop.value}: {began} chunks began, {ended} ended"


def _sum(pairs):
    total = Counter()
    for name, count in pairs:
        total[name] += count
    return total


ACTIONS = (
    "new_request",
    "look_up",
    "begin_load",
    "end_load",
    "begin_store",
    "end_store",
    "finish_request",
    "touch",
    "reset",
    "step",
    "tier_finishes",
    "tier_times_out",
    "tier_answers_oddly",
    "tier_scribbles",
    "tier_repeats_itself",
    "tier_speaks_for_another",
    "tier_loses_a_chunk",
    "tier_changes_its_mood",
)
OFTEN = (
    ("look_up",) * 8
    + ("begin_load", "end_load") * 3
    + ("new_request", "begin_store", "end_store", "finish_request") * 4
    + ("step", "tier_finishes", "tier_finishes") * 5
)
"""Said again in a random walk, so that it gets somewhere."""
