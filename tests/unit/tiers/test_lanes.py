import threading
from collections.abc import Callable, Iterator

import pytest

from kvtiers.errors import ConfigError
from kvtiers.events import Reason
from kvtiers.tiers.lanes import Inbox, Lanes, Priority, Removed, Work, start_daemon
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.runner import StoreTier, TierIdentity
from tests.unit.tiers.tier_kit import ManualClock, ScriptedStore


class Task(Work):
    def __init__(self, priority: Priority, act: Callable[[], None]) -> None:
        super().__init__()
        self.priority = priority
        self.ended = threading.Event()
        self._act = act

    def run(self) -> None:
        try:
            self._act()
        finally:
            self.ended.set()


class Held(Task):
    """Runs until it is let go."""

    def __init__(self, priority: Priority = Priority.STORE) -> None:
        self.running = threading.Event()
        self.let_go = threading.Event()
        super().__init__(priority, self._hang)

    def _hang(self) -> None:
        self.running.set()
        assert self.let_go.wait(30)


@pytest.fixture
def lanes() -> Iterator[Callable[..., Lanes]]:
    made: list[Lanes] = []

    def make(n_read: int, n_write: int, replacements: int = 2) -> Lanes:
        made.append(Lanes(n_read, n_write, replacements, "test"))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.stop()
        assert each.join(20)


def test_a_busy_write_lane_takes_lookups_then_loads_then_stores(
    lanes: Callable[..., Lanes],
) -> None:
    pool, order = lanes(0, 1), []
    first = Held()
    pool.put(first)
    assert first.running.wait(20)
    tasks = [Task(p, lambda p=p: order.append(p)) for p in reversed(Priority)]
    for task in tasks:
        pool.put(task)
    first.let_go.set()
    assert all(task.ended.wait(20) for task in tasks)
    assert order == list(Priority)


def test_read_lanes_never_store(lanes: Callable[..., Lanes]) -> None:
    pool = lanes(1, 1)
    blocker = Held()
    pool.put(blocker)
    assert blocker.running.wait(20)
    store, load = Task(Priority.STORE, lambda: None), Task(Priority.LOAD, lambda: None)
    pool.put(store)
    pool.put(load)
    assert load.ended.wait(20)
    again = Task(Priority.LOOKUP, lambda: None)
    pool.put(again)
    assert again.ended.wait(20)
    assert not store.ended.is_set()
    blocker.let_go.set()
    assert store.ended.wait(20)


def test_only_one_of_lane_and_canceller_gets_the_work(lanes: Callable[..., Lanes]) -> None:
    pool = lanes(0, 1)
    blocker, cancelled, after = Held(), Task(Priority.STORE, lambda: None), Held()
    pool.put(blocker)
    assert blocker.running.wait(20)
    assert not blocker.claim()
    pool.put(cancelled)
    pool.put(after)
    assert cancelled.claim()
    blocker.let_go.set()
    assert after.running.wait(20)
    assert not cancelled.ended.is_set()
    after.let_go.set()


def test_hung_lane_is_replaced_and_ends_when_it_returns(lanes: Callable[..., Lanes]) -> None:
    pool = lanes(0, 1, replacements=1)
    hung, more = Held(), Held()
    pool.put(hung)
    assert hung.running.wait(20)
    assert pool.abandon(hung)
    pool.put(more)
    assert more.running.wait(20)
    assert not pool.abandon(more), "bound of replacements"
    pool.check()
    retired = [t for t in threading.enumerate() if t.name == "test-write-0"]
    hung.let_go.set()
    for thread in retired:
        thread.join(20)
    assert pool.abandon(more), "the first one is over"
    more.let_go.set()


def test_work_that_does_not_run_cannot_be_abandoned(lanes: Callable[..., Lanes]) -> None:
    assert not lanes(1, 1).abandon(Task(Priority.LOAD, lambda: None))


def test_work_that_raises_does_not_kill_a_lane(
    lanes: Callable[..., Lanes], caplog: pytest.LogCaptureFixture
) -> None:
    pool = lanes(0, 1)

    def fail() -> None:
        raise SystemExit

    bad, good = Task(Priority.STORE, fail), Task(Priority.STORE, lambda: None)
    pool.put(bad)
    pool.put(good)
    assert good.ended.wait(20)
    assert "work raised on a lane" in caplog.text


def test_stop_does_not_start_what_is_queued() -> None:
    pool = Lanes(1, 1, 1, "test")
    blockers = [Held(Priority.STORE), Held(Priority.LOAD)]
    for blocker in blockers:
        pool.put(blocker)
        assert blocker.running.wait(20)
    queued = Task(Priority.STORE, lambda: None)
    pool.put(queued)
    pool.stop()
    assert not pool.join(0)
    for blocker in blockers:
        blocker.let_go.set()
    assert pool.join(20)
    assert not queued.ended.is_set()
    assert "0/2 busy" in repr(pool)


def test_inbox_keeps_order_and_takes_what_was_there() -> None:
    inbox = Inbox()
    inbox.removed([], Reason.EVICTED)
    inbox.removed([], Reason.CORRUPT)
    taken = []
    for note in inbox.take():
        assert isinstance(note, Removed)
        taken.append(note.reason)
        inbox.removed([], Reason.RESET)
    assert taken == [Reason.EVICTED, Reason.CORRUPT]
    assert "2 notes" in repr(inbox)


class FewThreads:
    """Starts so many threads, then refuses as the system does."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.started: list[threading.Thread] = []

    def __call__(self, target: Callable[[], None], name: str) -> threading.Thread:
        if len(self.started) == self.limit:
            raise RuntimeError("can't start new thread")
        self.started.append(start_daemon(target, name))
        return self.started[-1]


def test_lanes_that_cannot_all_start_leave_no_thread_behind() -> None:
    few = FewThreads(3)
    with pytest.raises(ConfigError, match="ask for 4 threads, of which the system starts 3"):
        Lanes(2, 2, 1, "test", few)
    for thread in few.started:
        thread.join(20)
        assert not thread.is_alive()


def test_a_tier_without_its_threads_closes_the_store() -> None:
    store = ScriptedStore()
    identity = TierIdentity("fake", "1:fake")
    with pytest.raises(ConfigError, match="n_read_threads and n_write_threads ask for 16"):
        StoreTier(store, identity, RunnerOptions(), Inbox(), ManualClock(), FewThreads(5))
    assert store.closed == 1


def test_a_lane_that_cannot_be_replaced_stays(caplog: pytest.LogCaptureFixture) -> None:
    pool, hung = Lanes(0, 1, 1, "test", FewThreads(1)), Held()
    pool.put(hung)
    assert hung.running.wait(20)
    assert not pool.abandon(hung)
    assert "cannot be replaced" in caplog.text
    hung.let_go.set()
    after = Task(Priority.STORE, lambda: None)
    pool.put(after)
    assert after.ended.wait(20)
    pool.check()
    pool.stop()
    assert pool.join(20)
