"""The kit itself: what it hands out."""

import inspect
import pkgutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvtiers
from kvtiers import testing
from kvtiers.testing import (
    FaultyStore,
    GatedStore,
    LawBroken,
    Laws,
    ManualClock,
    PolicyLaws,
    Slots,
    StoreLaws,
    TierLaws,
    content,
    laws_of,
)
from kvtiers.testing.bench import Environment
from kvtiers.testing.values import NAMESPACE, key, keys, near_misses
from kvtiers.tiers.base import ChunkStore, Item
from tests.laws.honest import HonestStore

FAMILIES = {"S": StoreLaws, "T": TierLaws, "E": PolicyLaws}
WRAPPERS = [FaultyStore, GatedStore]


def methods(cls):
    return [n for n, v in vars(cls).items() if inspect.isfunction(v) and not n.startswith("_")]


@pytest.fixture
def store(tmp_path):
    return HonestStore(tmp_path, Environment(NAMESPACE).context())


def write(store, *names):
    slots = Slots.filled(names)
    views = slots.views(writable=False)
    return store.write([Item(k, v) for k, v in zip(names, views, strict=True)])


def test_the_kit_needs_nothing_but_the_package():
    hidden = ("pytest", "hypothesis", "numpy", "torch", "vllm", "tests")
    modules = ", ".join(f"kvtiers.testing.{m.name}" for m in pkgutil.iter_modules(testing.__path__))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        f"sys.modules.update(dict.fromkeys({hidden})); import {modules}"
    )
    root = str(Path(kvtiers.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code, root], check=True, cwd="/")


# -- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", FAMILIES)
def test_laws_are_numbered_in_order_and_state_their_obligation(letter):
    found = laws_of(FAMILIES[letter])
    assert list(found) == [f"{letter}{n + 1}" for n in range(len(found))]
    for number, name in found.items():
        assert name.startswith(f"test_{number.lower()}_")
        assert getattr(FAMILIES[letter], name).__doc__


def test_what_waits_for_the_medium_is_released_and_blamed():
    class Hasty(Laws):
        patience_s = 0.01

    held = threading.Event()
    with pytest.raises(LawBroken, match="lookup waits"), Hasty().watched("lookup", held.set):
        held.wait(30)


# -- values ---------------------------------------------------------------------------------------


def test_the_clock_moves_when_told():
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock() == 7.5


def test_content_is_a_function_of_the_key_and_nothing_repeats():
    a, b = content(key("a"), 8192), content(key("b"), 8192)
    assert content(key("a"), 8192) == a != b
    assert len({a[i : i + 64] for i in range(0, 8192, 64)}) == 128
    assert a[:4096] == content(key("a"), 4096)


def test_near_misses_are_distinct_and_none_is_the_key():
    others = near_misses(key("a"))
    assert key("a") not in others
    assert len(set(others)) == len(others) > 10


def test_slots_notice_a_byte_outside_and_a_view_that_is_kept():
    slots = Slots(keys("a", "b"), shift=3)
    views = slots.views(writable=True)
    views[0][:] = content(key("a"), views[0].nbytes)
    slots.must_be_guarded()
    kept = views[1][10:20]
    with pytest.raises(LawBroken, match="still in use"):
        slots.must_be_free()
    kept.release()
    slots.must_be_free()
    assert slots.holds(0) == content(key("a"), 4096)
    slots._map[2] = 0
    with pytest.raises(LawBroken, match="outside"):
        slots.must_be_guarded()


# -- wrappers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_defines_every_method_of_a_store(wrapper):
    lacking = [name for name in methods(ChunkStore) if name not in vars(wrapper)]
    assert not lacking
    assert len(methods(ChunkStore)) == 7


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_says_what_it_wraps(wrapper, store):
    wrapped = wrapper(store)
    wrapped.check()
    assert wrapped.capabilities is store.capabilities
    assert "HonestStore" in repr(wrapped)


def test_a_gate_holds_only_what_it_is_told_to_and_lets_go(store):
    gated = GatedStore(store)
    gated.hold("contains")
    assert write(gated, key("a")) == [None]
    answers = []
    lane = threading.Thread(target=lambda: answers.append(gated.contains([key("a")])), daemon=True)
    lane.start()
    gated.wait_until_held()
    assert not answers
    assert "holds contains: 1 calls wait" in repr(gated)
    gated.release()
    lane.join(20)
    assert answers == [[True]]
    with pytest.raises(LawBroken, match="0 of 1 calls"):
        gated.wait_until_held(patience_s=0.0)
