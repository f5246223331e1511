"""The tier over a server that fails in every way: a miss or a retry, in time, and no wrong byte."""

import itertools
import time

import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Lookup, Namespace, RequestContext
from kvtiers.events import ChunksRemoved
from kvtiers.testing.values import content, key
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Job, JobKind, JobOutcome, JobReleased
from kvtiers.tiers.obj.names import PACK_BELOW_BYTES
from kvtiers.tiers.views import ChunkViews
from tests.servers.fake_s3 import FakeS3
from tests.servers.s3_faults import S3Fault, What
from tests.unit.tiers.tier_kit import page_aligned

LAYOUT = ChunkLayout((GroupLayout(0, 2 * PAGE_BYTES, 16), GroupLayout(1, PACK_BELOW_BYTES, 16)))
NAMESPACE = Namespace({"model": "faults", "format": 1})
REQUEST = RequestContext("r")
PACKED = [key(n, 0) for n in "abc"]
SINGLE = [key(n, 1) for n in "de"]
ALL = PACKED + SINGLE
REQUEST_S, JOB_S, LOOKUP_S = 1.0, 2.5, 1.5
OPTIONS = {
    "request_timeout_s": REQUEST_S,
    "connect_timeout_s": REQUEST_S,
    "max_retries": 1,
    "load_deadline_s": JOB_S,
    "store_deadline_s": JOB_S,
    "lookup_deadline_s": LOOKUP_S,
    "negative_ttl_s": 0.0,
    "breaker_failures": 3,
    "breaker_cooldown_s": 0.05,
    "breaker_max_cooldown_s": 0.1,
    "access_key_id": "somebody",
    "secret_access_key": "a-secret",
}
MARGIN_S = 3.0
"""What a machine that is busy with other things may take besides."""
PATIENCE_S = 30.0


class Tier:
    """A tier at work on a bucket: what is asked of it is answered in time, or the test fails."""

    def __init__(self, server, **options):
        self.tier = build_tier(
            {
                "type": "obj",
                "url": "s3://bucket/prefix",
                "endpoint": server.endpoint,
                "allow_http": True,
                **OPTIONS,
                **options,
            },
            0,
            namespace=NAMESPACE,
            layout=LAYOUT,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self._ids = itertools.count(1)
        self.events = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tier.shutdown(PATIENCE_S)
        self.tier.check()

    def lookup(self, names=ALL):
        """The verdicts, once there is no RETRY among them."""
        began = time.monotonic()
        while Lookup.RETRY in (found := self.tier.lookup(names, REQUEST)):
            assert time.monotonic() - began < LOOKUP_S + MARGIN_S, found
            self.tier.on_schedule_end()
            time.sleep(0.01)
        return found

    def store(self, names=ALL):
        """Those that are said to be stored."""
        return self._run(JobKind.STORE, names, [self._memory(n, content) for n in names])

    def load(self, names=ALL):
        """Those that came; each is verified against what it should be."""
        memory = [self._memory(n, None) for n in names]
        done = self._run(JobKind.LOAD, names, memory)
        for name, view in zip(names, memory, strict=True):
            right = bytes(view) == content(name, LAYOUT.chunk_bytes(name))
            assert right or name not in done, "wrong bytes"
        return done

    def _memory(self, name, fill):
        view = page_aligned(LAYOUT.chunk_bytes(name))
        if fill is not None:
            view[:] = fill(name, view.nbytes)
        return view

    def _run(self, kind, names, memory):
        views = [m[:] if kind is JobKind.LOAD else m.toreadonly() for m in memory]
        slots = tuple(range(len(names)))
        job = Job(next(self._ids), kind, tuple(names), slots, ChunkViews.of(views), REQUEST)
        submit = self.tier.submit_store if kind is JobKind.STORE else self.tier.submit_load
        if not submit(job):
            return set()
        began, outcome, free = time.monotonic(), None, False
        while outcome is None or not free:
            for ended in self.tier.get_finished_jobs():
                if isinstance(ended, JobOutcome):
                    outcome, free = ended, not ended.memory_in_use
                free = free or isinstance(ended, JobReleased)
            took = time.monotonic() - began
            assert outcome is not None or took < JOB_S + MARGIN_S, "no outcome in time"
            assert took < PATIENCE_S, "the memory is not given back"
            time.sleep(0.005)
        self.events += self.tier.take_events()
        return set(outcome.done)

    def served(self):
        """Whether all is found and loaded."""
        found = self.lookup()
        return found == [Lookup.HIT] * len(ALL) and self.load() == set(ALL)

    def recover(self):
        """Until all is served again, written anew if it has to be."""
        end = time.monotonic() + PATIENCE_S
        while not self.served():
            assert time.monotonic() < end, self.tier
            self.store([n for n, v in zip(ALL, self.lookup(), strict=True) if v is Lookup.MISS])
            time.sleep(0.05)

    def settle(self):
        """Until it can say that a chunk is there: its start-up scan had its chance."""
        end = time.monotonic() + PATIENCE_S
        while self.lookup() != [Lookup.HIT] * len(ALL):
            assert time.monotonic() < end, self.tier
            time.sleep(0.05)


@pytest.fixture
def server():
    with FakeS3() as fake:
        yield fake


@pytest.fixture
def stored(server):
    """A server on which another engine left all chunks, and others like them."""
    with Tier(server) as writer:
        assert writer.store() == set(ALL)
    return server


REFUSALS = [
    S3Fault(What.STATUS, status=429, code="TooManyRequests"),
    S3Fault(What.STATUS, status=503, retry_after_s=1),
    S3Fault(What.STATUS, status=500, code="InternalError"),
    S3Fault(What.STATUS, status=403, code="RequestTimeTooSkewed"),
    S3Fault(What.SILENT),
    S3Fault(What.REDIRECT),
]
BROKEN_BODIES = [
    S3Fault(What.RESET, "GET"),
    S3Fault(What.TRUNCATED, "GET"),
    S3Fault(What.SLOW, "GET"),
    S3Fault(What.RANGE, "GET"),
    S3Fault(What.WHOLE, "GET"),
]
LOOKS_DAMAGED = [
    S3Fault(What.SHORT, "GET"),
    S3Fault(What.OTHER, "GET"),
    S3Fault(What.GARBAGE, "GET"),
]
BROKEN_LISTS = [
    S3Fault(What.GARBAGE, "LIST"),
    S3Fault(What.TRUNCATED, "LIST"),
    S3Fault(What.RESET, "LIST"),
    S3Fault(What.SLOW, "LIST"),
    S3Fault(What.STATUS, "LIST"),
    S3Fault(What.SILENT, "LIST"),
]
HARMLESS = [
    S3Fault(What.ETAG),
    S3Fault(What.SKEW, seconds=86400.0),
    S3Fault(What.SKEW, seconds=-86400.0),
]


def named(fault):
    return "-".join(filter(None, (fault.what.value, fault.method, _status(fault))))


def _status(fault):
    return str(fault.status) if fault.what is What.STATUS else ""


faults = pytest.mark.parametrize


@faults("fault", REFUSALS + BROKEN_BODIES, ids=named)
def test_what_fails_is_a_miss_and_comes_back_by_itself(stored, fault):
    with Tier(stored) as tier:
        tier.settle()
        stored.fail(fault)
        # An object that is one chunk is asked for whole, so that no range can be wrong.
        fine = set(ALL[len(PACKED) :]) if fault.what in (What.RANGE, What.WHOLE) else set()
        for _ in range(6):
            tier.lookup()
            assert tier.load() == fine
        stored.fail()
        end = time.monotonic() + PATIENCE_S
        while not tier.served():  # without writing anything again: it was never lost
            assert time.monotonic() < end, tier.tier
            time.sleep(0.05)
        assert not [e for e in tier.events if isinstance(e, ChunksRemoved)]


@faults("fault", REFUSALS, ids=named)
def test_a_server_that_refuses_everything_opens_the_breaker_which_closes_again(stored, fault):
    with Tier(stored) as tier:
        tier.settle()
        stored.fail(fault)
        end = time.monotonic() + PATIENCE_S
        while repr(tier.tier).endswith("closed>"):
            assert time.monotonic() < end, tier.tier
            tier.load()
        stored.fail()
        tier.recover()
        assert repr(tier.tier).endswith("closed>")


@faults("fault", LOOKS_DAMAGED, ids=named)
def test_what_looks_damaged_is_never_delivered_and_can_be_written_again(stored, fault):
    with Tier(stored) as tier:
        tier.settle()
        stored.fail(fault)
        assert tier.load() < set(ALL[: len(PACKED)])  # what lies in front of a cut is whole
        stored.fail()
        tier.recover()


@faults("fault", LOOKS_DAMAGED, ids=named)
def test_an_answer_that_is_wrong_once_costs_nothing(stored, fault):
    once = S3Fault(fault.what, "GET", nth=1)
    with Tier(stored) as tier:
        tier.settle()
        for names in (PACKED, SINGLE):
            stored.fail(once)
            assert tier.load(names) == set(names)
        assert not [e for e in tier.events if isinstance(e, ChunksRemoved)]


@faults("fault", HARMLESS, ids=named)
def test_what_is_wrong_beside_the_bytes_costs_nothing(server, fault):
    server.fail(fault)
    with Tier(server) as tier:
        assert tier.store() == set(ALL)
        assert tier.served()
    with Tier(server) as other:
        other.settle()
        assert other.served()


@faults("fault", BROKEN_LISTS, ids=named)
def test_an_engine_that_cannot_list_finds_single_chunks_and_the_others_later(stored, fault):
    stored.fail(fault)
    with Tier(stored) as tier:
        for _ in range(3):
            found = tier.lookup()
            assert found[: len(PACKED)] == [Lookup.MISS] * len(PACKED)
            tier.load()
        stored.fail()
        tier.recover()


def test_a_stale_listing_is_a_miss_for_what_is_new(stored):
    stored.fail(S3Fault(What.STALE, "LIST", changes=100))
    with Tier(stored) as tier:
        found = dict(zip(ALL, tier.lookup(), strict=True))
        assert [found[n] for n in PACKED] == [Lookup.MISS] * len(PACKED)
        stored.fail()
        tier.settle()
        assert tier.served()


WRITING = [
    *(S3Fault(f.what, "PUT", status=f.status, code=f.code) for f in REFUSALS),
    S3Fault(What.RESET, "PUT"),
    S3Fault(What.LATE, "PUT", status=500, code="InternalError"),
    S3Fault(What.SHORT, "PUT"),
    S3Fault(What.OTHER, "PUT"),
]


@faults("fault", WRITING, ids=named)
def test_a_write_that_fails_or_lies_is_never_read_as_whole(server, fault):
    with Tier(server) as tier:
        server.fail(fault)
        said = tier.store()
        assert said == set() or fault.what in (What.SHORT, What.OTHER)
        server.fail()
        tier.lookup()
        loaded = tier.load()
        assert loaded < set(PACKED) or fault.what is What.LATE
        tier.recover()


@faults("retry_after_s", [None, 0])
@faults("status", [429, 503])
def test_a_storm_that_passes_costs_nothing_but_time(server, status, retry_after_s):
    storm = S3Fault(What.STATUS, "PUT", first=1, status=status, retry_after_s=retry_after_s)
    with Tier(server) as tier:
        server.fail(storm)
        assert tier.store() == set(ALL)
        assert server.struck() == [What.STATUS]
        server.fail(S3Fault(What.STATUS, "GET", first=1, status=status))
        assert tier.load() == set(ALL)


@faults("fault", REFUSALS, ids=named)
def test_a_server_that_fails_from_the_start_is_refused_in_one_sentence(server, fault):
    server.fail(fault)
    began = time.monotonic()
    with pytest.raises(Exception, match=r"\A[^\n]*\Z") as refused, Tier(server):
        pass
    assert time.monotonic() - began < JOB_S + MARGIN_S
    assert "secondary_tiers[0].url" in str(refused.value)
    assert "secret" not in str(refused.value)
