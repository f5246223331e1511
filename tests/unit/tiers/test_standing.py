import pytest

from kvtiers.events import Reason
from kvtiers.tiers.base import Capabilities, Circuit, KnowsResidents, KnowsStanding, Standing
from tests.unit.tiers.tier_kit import CHUNK, Bench, ScriptedStore, error, key


def test_jobs_of_both_kinds_and_their_bytes_count_until_they_end() -> None:
    store = ScriptedStore()
    let_write, let_read = store.hold("write"), store.hold("read")
    with Bench(store) as bench:
        assert isinstance(bench.tier, KnowsStanding)
        assert bench.tier.standing() == Standing(Circuit.CLOSED, 0, 0)
        assert bench.tier.submit_store(bench.store_job(1, 2))
        assert bench.tier.submit_load(bench.load_job(3))
        assert bench.tier.standing() == Standing(Circuit.CLOSED, 2, 3 * CHUNK)
        let_write.set()
        let_read.set()
        bench.finished(2)
        assert bench.tier.standing() == Standing(Circuit.CLOSED, 0, 0)


def test_a_tier_that_keeps_failing_is_left_alone_and_then_tried() -> None:
    store = ScriptedStore()
    with Bench(store, breaker_failures=1, breaker_cooldown_s=5.0) as bench:
        store.answers["write"] = lambda items: [error()] * len(items)
        assert bench.run(bench.store_job(1)).failed
        assert bench.tier.standing().circuit is Circuit.OPEN
        bench.clock.advance(5.0)
        del store.answers["write"]
        let_go = store.hold("write")
        assert bench.tier.submit_store(bench.store_job(2))
        assert bench.tier.standing().circuit is Circuit.TRIAL
        let_go.set()
        bench.finished(1)
        assert bench.tier.standing().circuit is Circuit.CLOSED


@pytest.mark.parametrize("instant", [False, True])
def test_it_says_what_it_holds_by_its_table_or_by_the_store(instant: bool) -> None:
    store = ScriptedStore(Capabilities(persistent=False, shared=False, instant=instant))
    with Bench(store) as bench:
        assert isinstance(bench.tier, KnowsResidents)
        assert bench.tier.residents() == []
        bench.run(bench.store_job(1, 2))
        assert sorted(bench.tier.residents()) == [key(1), key(2)]
        bench.store.delete([key(1)])
        bench.inbox.removed([key(1)], Reason.EVICTED)
        bench.tier.on_schedule_end()
        assert bench.tier.residents() == [key(2)]
