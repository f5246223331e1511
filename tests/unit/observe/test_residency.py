"""Where chunks are now, for who asks beside the engine: real tiers, and those that fail."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtiers.chunks import Key
from kvtiers.errors import Kind
from kvtiers.observe import residency
from kvtiers.observe.residency import Residency
from kvtiers.tiers.base import Capabilities, Peeks
from tests.unit.tiers.tier_kit import EXCLUSIVE, SHARED, Bench, ScriptedStore, error, key

KEYS = [key(n) for n in range(4)]
INSTANT = Capabilities(persistent=False, shared=False, instant=True)


def told(tier: Any, keys: Sequence[Key] = KEYS) -> dict[str, Any]:
    """What is said of one tier."""
    attached = SimpleNamespace(label="1:fake", tier=tier)
    host, found = Residency({KEYS[0]}, [attached]).explain(keys)
    lacking = 1 if len(keys) > 1 else None
    assert (host["tier"], host["there"], host["first_missing"]) == ("0:primary", 1, lacking)
    assert sum(run["count"] for run in found["runs"]) == len(keys)
    return found


def states(found: dict[str, Any]) -> list[tuple[int, str, str | None]]:
    return [(run["count"], run["state"], run["reason"]) for run in found["runs"]]


@pytest.mark.parametrize("capabilities", [EXCLUSIVE, SHARED, INSTANT])
def test_stores_of_every_kind_say_what_they_have(capabilities: Capabilities) -> None:
    with Bench(ScriptedStore(capabilities, stored=[0, 1])).scanned() as bench:
        assert isinstance(bench.tier, Peeks)
        assert states(told(bench.tier)) == [(2, "there", None), (2, "missing", "absent")]
        assert not bench.tier.has_pending_work(), "nothing was asked in the tier's name"


def test_what_was_damaged_is_said() -> None:
    with Bench(ScriptedStore(EXCLUSIVE, stored=[0])).scanned() as bench:
        bench.store.answers["read"] = lambda items: [error(Kind.CORRUPT) for _ in items]
        bench.run(bench.load_job(0))
        assert states(told(bench.tier, KEYS[:1])) == [(1, "missing", "corrupt")]


def test_a_tier_that_is_shut_is_down() -> None:
    with Bench(ScriptedStore(stored=[0])).scanned() as bench:
        bench.tier.shutdown(10)
        assert states(told(bench.tier)) == [(4, "missing", "tier_down")]


def test_a_store_that_fails_is_a_problem_and_no_absence() -> None:
    store = ScriptedStore(SHARED)

    def fail(_: Any) -> Any:
        raise error()

    store.answers["contains"] = fail
    with Bench(store).scanned() as bench:
        found = told(bench.tier)
        assert states(found) == [(4, "unknown", None)]
        assert "told to fail" in found["problem"]
        assert bench.lookup(0)[0].value == "retry", "the breaker was not told"


def test_a_store_that_hangs_is_waited_for_so_long_and_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency, "ASK_S", 0.05)
    store = ScriptedStore(SHARED)
    with Bench(store).scanned() as bench:
        gate = store.hold("contains")
        asker = Residency((), [SimpleNamespace(label="1:fake", tier=bench.tier)])
        _, first = asker.explain(KEYS)
        assert "did not answer within" in first["problem"]
        assert store.entered.acquire(timeout=20)
        _, second = asker.explain(KEYS)
        assert "still busy" in second["problem"]
        gate.set()
        done = threading.Event()
        while not done.is_set():
            _, third = asker.explain(KEYS)
            if third["problem"] is None:
                done.set()
        assert states(third) == [(4, "missing", "absent")]


def test_a_tier_that_cannot_be_asked_says_so() -> None:
    found = told(object())
    assert states(found) == [(4, "unknown", None)]
    assert "cannot be asked" in found["problem"]


def test_a_tier_that_raises_is_a_problem() -> None:
    def peek(keys: Sequence[Key]) -> Any:
        raise RuntimeError("dictionary changed size")

    found = told(SimpleNamespace(peek=peek, ask_store=peek))
    assert "changed size" in found["problem"]
