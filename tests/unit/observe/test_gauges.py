from kvtiers.events import Hop, TransferStarted
from kvtiers.metrics import Metrics, names
from kvtiers.observe.gauges import INTERVAL_S, Gauges
from kvtiers.tiers.base import Circuit, Peers, Standing, Usage
from tests.unit.observe.observe_kit import BUSY, REST, Tier
from tests.unit.test_checks import broken


def test_resident_pinned_and_capacity_are_three_values() -> None:
    gauges = Gauges(Metrics(), [], 100)
    gauges.refresh(BUSY, 0.0)
    states = {labels[0]: v for (name, labels), v in gauges.values.items() if labels}
    assert states == {"capacity": 1000, "resident": 400, "pinned": 200, "filling": 100}
    assert gauges.values[names.USED_FRACTION, ()] == 0.3


def test_a_tier_says_what_it_does() -> None:
    tier = Tier("1:fs", Usage(7, 10, 5), Standing(Circuit.OPEN, 3, 4096))
    gauges = Gauges(Metrics(), [tier], 100, lambda: {"1:fs": 9})
    gauges.refresh(REST, 0.0)
    of_tier = {name: v for (name, labels), v in gauges.values.items() if labels == ("1:fs",)}
    assert of_tier[names.TIER_STATE] == 2
    assert of_tier[names.QUEUE_JOBS] == 3
    assert of_tier[names.QUEUE_BYTES] == 4096
    assert of_tier[names.BACKLOG] == 9
    assert gauges.values[names.TIER_BYTES, ("1:fs", "resident")] == 5
    gauges.check()


def test_what_a_tier_does_not_know_of_itself_is_not_shown() -> None:
    gauges = Gauges(Metrics(), [Tier("1:mine", stands=Standing(Circuit.OPEN, None, None))], 100)
    gauges.refresh(REST, 0.0)
    shown = {name for (name, labels) in gauges.values if labels == ("1:mine",)}
    assert names.TIER_STATE in shown
    assert shown.isdisjoint({names.QUEUE_JOBS, names.QUEUE_BYTES})


def test_peers_of_all_tiers_are_added_up_and_none_where_nobody_has_any() -> None:
    tiers = [Tier("1:p2p", knows=Peers(1, 2, 0, 0, 3)), Tier("2:fs"), Tier("3:p2p")]
    gauges = Gauges(Metrics(), tiers, 100)

    def peers() -> dict[str, float]:
        return {labels[0]: v for (name, labels), v in gauges.values.items() if name == names.PEERS}

    gauges.refresh(REST, 0.0)
    whole = {"connected": 1, "dialling": 2, "left_alone": 0, "idle": 0, "served": 3}
    assert peers() == whole
    tiers[2].knows = Peers(1, 0, 1, 0, 0)
    gauges.refresh(REST, INTERVAL_S)
    assert peers() == {**whole, "connected": 2, "left_alone": 1}
    tiers[0].knows = tiers[2].knows = None
    gauges.refresh(REST, 2 * INTERVAL_S)
    assert peers() == {}


def test_chunks_in_flight_take_their_average_part_of_host_memory() -> None:
    metrics = Metrics()
    gauges = Gauges(metrics, [Tier("1:fs")], 100)
    metrics(TransferStarted(Hop.CASCADE, "1:fs", 2))
    gauges.refresh(BUSY._replace(per_chunk=1.5), 0.0)
    assert gauges.values[names.CASCADED_FRACTION, ("1:fs",)] == 0.3
    assert gauges.values[names.PROMOTED_FRACTION, ("1:fs",)] == 0.0
    assert gauges.values[names.CASCADES, ("1:fs",)] == 1


def test_gauges_in_motion_are_sampled_and_the_end_of_motion_is_seen_at_once() -> None:
    gauges = Gauges(Metrics(), [], 100)
    assert gauges.refresh(REST, 0.0)
    assert not gauges.refresh(BUSY, INTERVAL_S / 2)
    assert gauges.refresh(BUSY, INTERVAL_S)
    assert not gauges.refresh(BUSY._replace(pinned=3), INTERVAL_S * 1.5)
    assert gauges.refresh(REST, INTERVAL_S * 1.6)
    assert gauges.values[names.USED_FRACTION, ()] == 0.0


def test_a_look_at_old_values_is_not_disturbed() -> None:
    gauges = Gauges(Metrics(), [], 100)
    gauges.refresh(REST, 0.0)
    before = gauges.values
    gauges.refresh(REST._replace(resident=9), 1.0)
    assert before[names.HOST_BYTES, ("resident",)] == 400


def test_others_may_have_a_gauge_here() -> None:
    gauges = Gauges(Metrics(), [], 100)
    depth: list[float | None] = [None]
    gauges.watch(names.TIER_STATE, ("7:mine",), lambda: depth[0])
    gauges.refresh(REST, 0.0)
    assert (names.TIER_STATE, ("7:mine",)) not in gauges.values
    depth[0] = 2
    gauges.refresh(REST, INTERVAL_S)
    assert gauges.values[names.TIER_STATE, ("7:mine",)] == 2


def test_a_gauge_has_the_labels_that_were_declared() -> None:
    gauges = Gauges(Metrics(), [], 100)
    gauges.watch(names.TIER_STATE, (), lambda: 1)
    gauges.refresh(REST, 0.0)
    with broken("other labels"):
        gauges.check()


def test_it_shows_whose_they_are() -> None:
    gauges = Gauges(Metrics(), [Tier("1:fs"), Tier("2:memory")], 4096)
    assert repr(gauges) == "<Gauges: 0 known; 1:fs, 2:memory, slots of 4096 bytes>"
    assert "no tiers" in repr(Gauges(Metrics(), [], 4096))
