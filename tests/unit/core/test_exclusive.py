"""A manager for two threads: every call excludes the others, and tells when chunks came."""

import inspect
import threading

import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, Lookup
from kvtiers.core.exclusive import ExclusiveManager
from kvtiers.core.manager import TieringManager
from kvtiers.core.serving import ManagerParent, Turns
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import load_policy
from tests.unit.core.core_harness import GROUPS, ScriptedTier, World, key, keys

LAYOUT = ChunkLayout(GROUPS)


class Lock:
    """Counts how deep it is held."""

    depth = 0
    taken = 0

    def __enter__(self):
        self.depth += 1
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class Pair(World):
    """A world whose manager is exclusive, and serves."""

    def __init__(self, slots: int = 8, tiers=(), max_pinned: int = 4, lock=None) -> None:
        super().__init__(slots, tiers)
        self.paused: list[float] = []
        self.lock = lock or Lock()
        self.index = HostIndex(slots, load_policy("lru", capacity=slots))
        self.manager = ExclusiveManager(
            lock=self.lock,
            index=self.index,
            layout=LAYOUT,
            view=self._view,
            tiers=tiers,
            sink=self.events.append,
        )
        self.parent = ManagerParent(
            self.manager, LAYOUT, self._view, lambda: self.now, self.paused.append, max_pinned
        )
        self.heard: list[str] = []
        self.parent.listen(lambda: self.heard.append("changed"))
        self.manager.poll(self.now)

    def step(self, seconds: float = 0.01) -> None:
        super().step(seconds)
        self.parent.check()


NOT_CALLS = {"residents", "drain", "shutdown", "reset", "retire", "storing", "use"}
"""Of their own: three that wait, two that tell, what is read while nobody else writes it."""


def test_every_public_call_is_exclusive():
    public = {n for n in vars(TieringManager) if not n.startswith("_")} - NOT_CALLS
    calls = {n for n in public if inspect.isfunction(vars(TieringManager)[n])}
    assert {n for n in calls if n not in vars(ExclusiveManager)} == set()
    world = Pair()
    taken = world.lock.taken
    for name in calls:
        seen = inspect.signature(getattr(TieringManager, name)).parameters
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever comes of nonsense
            getattr(world.manager, name)(*[object()] * (len(seen) + 3))
    assert world.lock.taken - taken == len(calls)
    assert world.lock.depth == 0
    assert world.manager.use.slots == 8


def test_nobody_calls_while_another_does():
    world = Pair(lock=threading.RLock())
    done = []
    with world.manager.exclusive:
        other = threading.Thread(target=lambda: (world.manager.poll(1.0), done.append(1)))
        other.start()
        other.join(0.05)
        assert not done
        world.manager.end_step(2.0)  # who has it may take it again
    other.join(10)
    assert done


def test_listeners_hear_of_chunks_that_came_and_of_nothing_else():
    world = Pair(tiers=[ScriptedTier()])
    request = world.request()
    world.manager.lookup(key("a"), request)
    world.manager.end_step(101.0)
    assert world.heard == []
    world.stored(keys("a"))
    assert world.heard == ["changed"]


def test_who_waits_for_the_tiers_keeps_others_from_them():
    tier = ScriptedTier(holds=keys("a"))
    world = Pair(tiers=[tier])
    asked = []
    tier.drain_jobs = lambda deadline_s: (asked.append(ask()), True)[1]

    def ask():
        before = len(tier.asked)
        verdicts = world.parent.ask(keys("a"), "peer")
        world.parent.advance()
        return verdicts, len(tier.asked) - before

    world.stored(keys("b"))
    world.manager.drain(0.0, lambda: world.now)
    tier.accepts = False
    world.stored(keys("c"))
    clock = iter(range(100))
    world.manager.drain(5.0, lambda: float(next(clock)))
    assert asked
    assert set(map(str, asked)) == {str(([Lookup.RETRY], 0))}
    assert world.parent.ask(keys("c"), "peer") == [Lookup.HIT]


def test_others_get_nothing_from_one_that_was_shut_down_or_switched_off():
    for end in (lambda m: m.shutdown(5.0, lambda: 0.0), lambda m: m.retire()):
        world = Pair()
        world.stored(keys("a"))
        pin = world.parent.pin(keys("a"))
        end(world.manager)
        assert world.parent.ask(keys("a"), "peer") == [Lookup.RETRY]
        assert world.parent.pin(keys("a")) is None
        world.parent.release(pin)
        world.parent.check()


# -- what peers get -------------------------------------------------------------------------------


def test_pinned_chunks_stay_and_are_read_where_they_are():
    world = Pair(slots=4)
    names = keys(*"abc")
    world.stored(names)
    pin = world.parent.pin([*names, key("absent")])
    assert list(pin.keys) == names
    assert [bytes(view) for view in pin.views] == [n.ljust(PAGE_BYTES, b"\0") for n in names]
    assert all(view.readonly for view in pin.views)
    world.stored(keys(*"wxyz"))
    world.step()
    assert world.lookup(names, world.request()) == [Lookup.HIT] * 3
    view = pin.views[0]
    world.parent.release(pin)
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    world.step()
    assert world.manager._ledger.requests.keys() == {"r"} | {
        name for name in world.manager._ledger.requests if name.startswith("store")
    }
    world.stored(keys(*"stuv"))
    assert world.index.held == 0


def test_nothing_that_is_absent_is_pinned():
    world = Pair()
    assert world.parent.pin(keys("a")) is None
    assert world.parent.pin([]) is None


def test_room_is_counted_in_chunks_however_many_peers_have_them():
    world = Pair(max_pinned=2)
    world.stored(keys(*"abc"))
    first, second = (world.parent.pin(keys(*"ab")) for _ in range(2))
    assert world.parent.room == 0
    assert world.parent.pin(keys("c")) is None
    third = world.parent.pin(keys(*"abc"))
    assert list(third.keys) == keys(*"ab")
    for pin in (first, second):
        world.parent.release(pin)
    assert world.parent.room == 0
    world.parent.release(third)
    assert world.parent.room == 2
    world.step()


def test_what_a_peer_asks_for_comes_up_without_the_engine():
    tier = ScriptedTier(holds=keys("a"))
    world = Pair(tiers=[tier])
    assert world.parent.ask(keys("a", "b"), "peer") == [Lookup.HIT_PENDING, Lookup.MISS]
    world.parent.advance()
    tier.finish_all()
    world.parent.advance()
    assert world.heard
    assert world.parent.ask(keys("a"), "peer") == [Lookup.HIT]
    world.parent.end("peer")
    world.parent.end("peer")
    assert not world.manager._ledger.requests
    world.step()


def test_a_reset_kills_pins_and_their_end_is_harmless():
    world = Pair()
    world.stored(keys("a"))
    pin = world.parent.pin(keys("a"))
    view = pin.views[0]
    orphans = world.manager.reset()
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with pytest.raises(ValueError, match="released"):
        bytes(pin.views[0])
    world.manager.release_device(orphans)
    world.parent.release(pin)
    world.step()
    assert world.index.free == 8


# -- who waits for the lock gets it ---------------------------------------------------------------


class Watch:
    """A clock that goes on by ``step`` each time it is read, and while somebody pauses."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step
        self.paused = 0

    def read(self) -> float:
        self.now += self.step
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.paused += 1


def test_who_takes_the_lock_again_and_again_leaves_it_alone_now_and_then():
    """A lock is not fair: a scheduler was seen to wait for it for more than a second."""
    watch = Watch(0.00004)
    world = Pair()
    turn = Turns(world.lock, watch.read, watch.pause)
    for _ in range(100):
        with turn:
            assert world.lock.depth == 1
    assert world.lock.depth == 0
    busy = 100 * 2 * watch.step
    assert busy / 0.0007 < watch.paused < busy / 0.0005


def test_who_takes_it_seldom_does_not_wait():
    watch = Watch(0.0)
    turn = Turns(Lock(), watch.read, watch.pause)
    for _ in range(100):
        with turn:
            watch.now += 0.0001
        watch.now += 0.0002
    assert watch.paused == 0


def test_the_lock_is_left_alone_when_a_call_fails():
    world = Pair()
    with pytest.raises(ZeroDivisionError), Turns(world.lock, lambda: 0.0, print):
        1 / 0  # noqa: B018
    assert world.lock.depth == 0


def test_what_is_not_there_is_seen_without_the_lock():
    world = Pair()
    taken = world.lock.taken
    assert world.parent.pin(keys("a")) is None
    assert world.lock.taken == taken
