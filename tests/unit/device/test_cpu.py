import mmap
import threading

import pytest

from kvtiers.device import cpu
from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.errors import Kind, KVTiersError
from tests.unit.device.device_kv import Model, copier, tensors_of
from tests.unit.device.device_plans import BLOCKS, OLD, SLOTS, fresh_region, plan_of

MODEL = Model("hnd", heads=2, layers=3, blocks_per_chunk=1)
PAGE = MODEL.page_map(0, 1, 0).local_bytes


class Gate:
    """A clock that stops the copier's thread before each job until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.seconds = 0.0

    def __call__(self) -> float:
        self.reached.set()
        assert self.open.wait(60)
        self.seconds += 1
        return self.seconds


@pytest.fixture
def tensors():
    return tensors_of(MODEL.pages(MODEL.logical(BLOCKS), 1, 0))


@pytest.fixture
def region():
    return fresh_region(MODEL.geometry(1, 0))


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open.set()


@pytest.fixture
def gated(tensors, region, gate):
    made = CpuCopier(tensors, memoryview(region), MODEL.geometry(1, 0), clock=gate)
    yield made
    gate.open.set()
    made.close()


def test_submit_returns_before_any_byte_moves_and_jobs_end_in_order(gated, gate, region):
    gated.submit(4, Direction.STORE, plan_of((0, 1)))
    gated.submit(3, Direction.LOAD, plan_of((0, 2)))
    assert gate.reached.wait(60)
    assert gated.poll() == []
    assert set(region) == {OLD}
    gated.check()
    assert repr(gated) == "<CpuCopier open: 2 unfinished, 0 done, 0 failed>"
    gate.open.set()
    gated.wait([3])
    outcomes = gated.poll()
    assert [(o.job_id, o.ok, o.bytes, o.seconds) for o in outcomes] == [
        (4, True, 3 * PAGE, 1.0),
        (3, True, 3 * PAGE, 1.0),
    ]
    assert gated.poll() == []
    assert repr(gated) == "<CpuCopier open: 0 unfinished, 2 done, 0 failed>"


def test_wait_blocks_until_the_job_is_done(gated, gate):
    gated.submit(1, Direction.STORE, plan_of((0, 1)))
    assert gate.reached.wait(60)
    opener = threading.Thread(target=gate.open.set)
    opener.start()
    gated.wait({1, 99})
    assert [o.ok for o in gated.poll()] == [True]
    opener.join(60)


def test_an_error_of_the_memory_itself_is_an_outcome(tensors, tmp_path):
    geometry = MODEL.geometry(1, 0)
    path = tmp_path / "region"
    path.write_bytes(bytes(geometry.slot_bytes))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as readonly:
        made = CpuCopier(tensors, memoryview(readonly), geometry)
        made.submit(1, Direction.STORE, plan_of((0, 1)))
        made.wait([1])
        assert "read-only" in made.poll()[0].error
        made.close()


def test_an_error_on_any_of_its_threads_fails_the_job_when_all_have_let_go(
    tensors, region, monkeypatch
):
    move, others = cpu.move, []

    def fail(layers, chosen, direction):
        if threading.current_thread().name != "kvtiers-copier" and len(others) < 2:
            others.append(threading.current_thread().name)
            raise OSError("told to fail")
        return move(layers, chosen, direction)

    monkeypatch.setattr(cpu, "move", fail)
    with copier(tensors, region, MODEL.geometry(1, 0), threads=3) as made:
        made.submit(1, Direction.STORE, plan_of((0, 1)))
        made.submit(2, Direction.STORE, plan_of((1, 3)))
        made.wait([1, 2])
        outcomes = [(o.job_id, o.ok, o.bytes, o.error) for o in made.poll()]
    assert outcomes == [(1, False, 0, "OSError: told to fail"), (2, True, 3 * PAGE, None)]
    assert len(others) == 2


@pytest.mark.parametrize("last", [1, 2, 3])
def test_without_all_its_threads_there_is_no_copier(tensors, region, monkeypatch, last):
    """Its parts of a job that failed for want of a thread would wait for one to come."""
    start, started = threading.Thread.start, []

    def scarce(thread):
        if len(started) + 1 == last:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(RuntimeError, match="can't start"):
        CpuCopier(tensors, memoryview(region), MODEL.geometry(1, 0), threads=3)
    assert len(started) == last - 1
    assert not any(thread.is_alive() for thread in started)


def test_a_job_of_which_a_part_cannot_begin_ends_after_the_parts_that_did(
    tensors, region, monkeypatch
):
    gate, moved, seen = threading.Event(), [], []
    move = cpu.move

    def slow(layers, chosen, direction):
        gate.wait(60)
        moved.append(move(layers, chosen, direction))
        return moved[-1]

    def clock():
        seen.append(len(moved))
        return 0.0

    monkeypatch.setattr(cpu, "move", slow)
    with copier(tensors, region, MODEL.geometry(1, 0), threads=3, clock=clock) as made:
        submit, submitted = made._pool.submit, []

        def once(*work):
            if submitted:
                gate.set()
                raise RuntimeError("cannot schedule new futures after shutdown")
            submitted.append(submit(*work))
            return submitted[0]

        monkeypatch.setattr(made._pool, "submit", once)
        made.submit(1, Direction.STORE, plan_of((0, 1)))
        made.wait([1])
        (outcome,) = made.poll()
    assert not outcome.ok
    assert seen == [0, 1]


def test_a_job_id_cannot_be_in_flight_twice(gated):
    gated.submit(1, Direction.STORE, plan_of((0, 1)))
    with pytest.raises(KVTiersError, match="submitted twice") as caught:
        gated.submit(1, Direction.LOAD, plan_of((0, 1)))
    assert caught.value.kind is Kind.BROKEN


def test_close_finishes_the_running_job_fails_the_waiting_ones_and_frees_the_memory(tensors):
    geometry = MODEL.geometry(1, 0)
    gate = Gate()
    memory = mmap.mmap(-1, SLOTS * geometry.slot_bytes)
    view = memoryview(memory)
    made = CpuCopier(tensors, view, geometry, clock=gate)
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    assert gate.reached.wait(60)
    made.submit(2, Direction.STORE, plan_of((1, 2)))
    closer = threading.Thread(target=made.close)
    closer.start()
    made.wait([2])
    gate.open.set()
    closer.join(60)
    made.close()
    made.wait([1, 2])
    outcomes = {o.job_id: o for o in made.poll()}
    assert outcomes[1].ok
    assert (outcomes[2].ok, outcomes[2].error) == (False, "the copier was closed")
    with pytest.raises(KVTiersError, match="after the copier was closed") as caught:
        made.submit(3, Direction.STORE, plan_of((0, 1)))
    assert caught.value.kind is Kind.CLOSED
    made.check()
    assert repr(made) == "<CpuCopier closed: 0 unfinished, 1 done, 1 failed>"
    view.release()
    memory.close()
