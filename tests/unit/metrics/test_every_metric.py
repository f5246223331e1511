"""Whatever is declared is sent when it happens, and nothing else ever is."""

from collections.abc import Iterator

from kvtiers.chunks import Lookup, make_key
from kvtiers.engines.vllm.metrics import StatsExporter, definitions
from kvtiers.errors import Kind
from kvtiers.events import (
    PRIMARY,
    ChunksDeclined,
    ChunksExchanged,
    ChunksRemoved,
    CopiesFailed,
    DescriptionsDropped,
    Direction,
    Event,
    EventsTold,
    Hop,
    LookupTimed,
    Reason,
    WarmedUp,
)
from kvtiers.host.parts import HostUse
from kvtiers.metrics import Metrics
from kvtiers.metrics.names import BY_NAME, EVENT_QUEUE, SENT_BY_VLLM
from kvtiers.metrics.names import Kind as MetricKind
from kvtiers.observe.gauges import Gauges
from kvtiers.tiers.base import Circuit, Peers, Standing, Usage
from tests.unit.core.core_harness import ScriptedTier, World, key, keys
from tests.unit.metrics.test_distinct import digests

LABEL = "1:scripted"


class Bounded(ScriptedTier):
    def usage(self) -> Usage:
        return Usage(1, 2, 1)

    def standing(self) -> Standing:
        return Standing(Circuit.CLOSED, 0, 0)

    def peers(self) -> Peers:
        return Peers(1, 0, 0, 0, 0)


def up_and_down() -> World:
    """Chunks take every hop, well and badly; a request waits, and one misses."""
    here = digests(1, 300)
    tier = Bounded(holds=[*here[:8], key("damaged")])
    world = World(tiers=[tier], slots=16)
    request = world.request("up")
    world.manager.prompted(here)
    world.manager.prompted(here)
    world.manager.prefilled(500, 1.0)
    tier.verdicts[here[0]] = Lookup.RETRY
    world.lookup(here[:4], request)
    world.step(1.0)
    del tier.verdicts[here[0]]
    world.lookup([*here[:4], key("damaged"), key("absent")], request)
    world.step()
    for job in list(tier.jobs):
        damaged = [k for k in job.keys if k == key("damaged")]
        tier.finish(job, fail=damaged, kind=Kind.CORRUPT)
    world.step()
    world.lookup([*here[:4], key("damaged")], request)
    world.manager.load(here[:4], request)
    world.manager.complete_load(request, now=world.now)
    world.manager.on_request_finished(request)
    for start in range(8, 264, 8):
        plan = world.manager.store(here[start : start + 8], world.request(f"down-{start}"))
        world.manager.complete_store(plan.keys, now=world.now)
        world.step()
        for job in list(tier.jobs):
            tier.finish(job, fail=job.keys[:1])
        world.step(5.0)
    return world


def seldom() -> Iterator[Event]:
    """What needs more than a core and a tier to happen."""
    yield LookupTimed(PRIMARY, seconds=1e-6)
    yield EventsTold("BlockStored", "STORAGE", 2)
    yield DescriptionsDropped(3)
    yield WarmedUp(promoted=1, missing=1, not_asked=1)
    yield ChunksExchanged(LABEL, Direction.OUT, 2, 8192)
    yield CopiesFailed(Hop.LOAD, PRIMARY, 1)
    yield ChunksRemoved(LABEL, (make_key(b"x", 0),), Reason.CORRUPT)
    yield ChunksDeclined(Hop.STORE, PRIMARY, 1, Reason.THRESHOLD)
    yield ChunksDeclined(Hop.PROMOTE, LABEL, 1, Reason.NO_ROOM)
    yield ChunksDeclined(Hop.CASCADE, LABEL, 1, Reason.EVICTED)


def sent(metrics: Metrics, gauges: Gauges, use: HostUse) -> dict[str, set[tuple[str, ...]]]:
    data = StatsExporter(metrics, gauges).take(use, 0.0, quiet=True).data
    (values,) = (v for k, v in data.items() if "data" in str(k).lower())
    return {name: set(by_labels) for name, by_labels in values.items()}


def test_every_metric_that_is_declared_is_sent_and_none_beside() -> None:
    world = up_and_down()
    metrics = Metrics()
    for event in [*world.events, *seldom()]:
        metrics(event)
    manager = world.manager
    gauges = Gauges(metrics, manager.tiers, 4096, lambda: manager.backlogs)
    gauges.watch(EVENT_QUEUE, (), lambda: 0)
    told = sent(metrics, gauges, manager.use)
    assert told.keys() == definitions().keys() == BY_NAME.keys() - SENT_BY_VLLM
    for name, labels in told.items():
        assert {len(values) for values in labels} == {len(BY_NAME[name].labels)}, name
    metrics.check()
    gauges.check()


def test_whatever_the_core_does_has_a_name_in_the_table() -> None:
    metrics = Metrics()
    for event in up_and_down().events:
        metrics(event)
    folds = {metric.fold for metric in BY_NAME.values()}
    sample = metrics.take()
    gathered = [name for name, _ in (*sample.counters, *sample.observations)]
    assert set(gathered) <= folds
    observed = {m.fold for m in BY_NAME.values() if m.kind is MetricKind.HISTOGRAM}
    assert {name for name, _ in sample.observations} <= observed


def test_a_hit_costs_no_event() -> None:
    world = World(slots=16)
    world.stored(keys(*range(8)))
    request = world.request()
    world.events.clear()
    for _ in range(100):
        world.lookup(keys(*range(8)), request)
    assert world.events == []
