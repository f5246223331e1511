"""A store that knows at once what it holds: lookups are answered in the step that asks."""

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind
from kvtiers.events import ChunksRemoved, ChunksStored, Reason
from kvtiers.tiers.base import Capabilities
from tests.unit.tiers.tier_kit import REQUEST, Bench, ScriptedStore, error, key

INSTANT = Capabilities(persistent=True, shared=False, instant=True)


@pytest.fixture
def bench():
    with Bench(ScriptedStore(INSTANT, stored=[1, 2])) as made:
        yield made


def asked(bench, *ns):
    return bench.tier.lookup([key(n) for n in ns], REQUEST)


def test_the_first_lookup_knows(bench):
    assert asked(bench, 1, 3, 2) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]
    assert not bench.tier.has_pending_work()


def test_nothing_is_kept_twice_and_nothing_is_scanned(bench):
    bench.run(bench.store_job(3, 4))
    assert asked(bench, 3) == [Lookup.HIT]
    assert len(bench.tier._presence) == 0
    assert bench.store.called("scan") == []


BROKEN_WORDS = {
    "raises": lambda keys: 1 // 0,
    "other than bools": lambda keys: ["yes"] * len(keys),
    "too few": lambda keys: [],
    "too many": lambda keys: [True] * (len(keys) + 1),
}


@pytest.mark.parametrize("how", BROKEN_WORDS)
def test_a_store_that_breaks_its_word_is_a_miss_and_in_the_end_left_alone(bench, caplog, how):
    bench.store.answers["contains"] = BROKEN_WORDS[how]
    for _ in range(5):
        assert asked(bench, 1) == [Lookup.MISS]
    (line,) = caplog.messages
    assert "broke its contract: contains" in line
    assert not bench.tier.submit_load(bench.load_job(1))


def test_what_is_there_is_not_written_again(bench):
    outcome = bench.run(bench.store_job(1, 3))
    assert set(outcome.done) == {key(1), key(3)}
    assert bench.store.called("write") == [(key(3),)]
    assert bench.changes() == [ChunksStored("1:fake", (key(3),))]


def test_a_failed_load_is_not_found_for_a_while(bench):
    bench.store.answers["read"] = lambda items: [error(Kind.IO)] * len(items)
    bench.run(bench.load_job(1))
    assert asked(bench, 1, 2) == [Lookup.MISS, Lookup.HIT]
    bench.clock.advance(10)
    assert asked(bench, 1) == [Lookup.HIT]


def test_a_loss_is_said_once_however_often_it_is_noticed(bench):
    del bench.store.chunks[key(1)]
    bench.inbox.removed([key(1)], Reason.EVICTED)
    bench.run(bench.load_job(1))
    bench.inbox.removed([key(1)], Reason.VANISHED)
    bench.tier.get_finished_jobs()
    assert bench.changes() == [ChunksRemoved("1:fake", (key(1),), Reason.EVICTED)]


def test_what_comes_back_can_be_lost_again(bench):
    bench.inbox.removed([key(3)], Reason.EVICTED)
    bench.run(bench.store_job(3))
    del bench.store.chunks[key(3)]
    bench.inbox.removed([key(3)], Reason.EVICTED)
    bench.tier.get_finished_jobs()
    assert [type(e) for e in bench.changes()] == [
        ChunksRemoved,
        ChunksStored,
        ChunksRemoved,
    ]


def test_a_loss_that_is_told_before_the_store_ends_is_the_last_word(bench):
    job = bench.store_job(3)
    written = bench.store.write

    def written_and_evicted(items):
        bench.store.answers.pop("write")
        results = written(items)
        del bench.store.chunks[key(3)]
        bench.inbox.removed([key(3)], Reason.EVICTED)
        return results

    bench.store.answers["write"] = written_and_evicted
    bench.run(job)
    assert [type(e) for e in bench.changes()] == [ChunksRemoved]


def test_a_loss_that_is_told_after_the_chunk_was_written_again_is_none(bench):
    bench.run(bench.store_job(3))
    bench.changes()
    bench.inbox.removed([key(3)], Reason.EVICTED)  # as it was before, by a lane that was slow
    bench.tier.get_finished_jobs()
    assert bench.changes() == []
