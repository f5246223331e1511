"""Our copier for CUDA with CPU tensors, and with streams and events that are told what to do."""

from contextlib import contextmanager

import pytest
import torch

from kvtiers.device.copier import Direction
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.host_device import HostDevice
from kvtiers.device.plans import plan_copies
from kvtiers.errors import Kind, KVTiersError
from tests.unit.device.device_kv import Model, copier, tensors_of
from tests.unit.device.device_plans import BLOCKS, fresh_region, plan_of

MODEL = Model("hnd", heads=2, layers=3, blocks_per_chunk=1)
PAGE = MODEL.page_map(0, 1, 0).local_bytes
GEOMETRY = MODEL.geometry(1, 0)
BROKEN = "device-side assert triggered"


class Event:
    def __init__(self, device: "Device", name: str) -> None:
        self.device, self.name = device, name

    def done(self) -> bool:
        if self.device.is_broken:
            raise RuntimeError(BROKEN)
        return self.name in self.device.ended

    def wait(self) -> None:
        self.device.said.append(f"host waits for {self.name}")
        self.device.ended.add(self.name)
        self.done()

    def seconds_since(self, start: "Event") -> float:
        assert self.name in self.device.ended
        return 0.5


class Stream:
    def __init__(self, device: "Device", name: str) -> None:
        self.device, self.name, self.marks = device, name, 0

    def wait_for(self, event: Event) -> None:
        self.device.said.append(f"{self.name} waits for {event.name}")

    def mark(self) -> Event:
        self.marks += 1
        return Event(self.device, f"{self.name} {self.marks}")

    @contextmanager
    def running(self):
        self.device.said.append(f"{self.name} runs")
        self.device.is_running = True
        yield
        self.device.is_running = False


class Device(HostDevice):
    """Copies at once, and says that work has ended when it is told to."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended: set[str] = set()
        self.uploads = 0
        self.is_broken = self.is_running = self.is_mapped = False
        self._names = iter(["store", "load"])

    def map_host(self, buffer):
        self.is_mapped = True
        return super().map_host(buffer)

    def unmap_host(self):
        self.is_mapped = False

    def stream(self):
        return Stream(self, next(self._names))

    def mark_model(self):
        return Event(self, "model")

    def indices(self, rows):
        assert self.is_running
        self.uploads += 1
        return super().indices(rows)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def tensors():
    return tensors_of(MODEL.pages(MODEL.logical(BLOCKS), 1, 0))


@pytest.fixture
def region():
    return fresh_region(GEOMETRY)


@pytest.fixture
def made(tensors, region, device):
    with copier(tensors, region, GEOMETRY, CudaCopier, device=device) as made:
        yield made


def ended(made):
    made.check()
    return [(o.job_id, o.ok) for o in made.poll()]


def test_a_job_waits_for_the_model_and_ends_with_its_event(made, device, region):
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    made.submit(2, Direction.LOAD, plan_of((3, 2)))
    assert device.said == [
        "store waits for model",
        "store runs",
        "load waits for model",
        "load runs",
    ]
    assert ended(made) == []
    assert repr(made) == "<CudaCopier open: 2 unfinished, 0 done, 0 failed>"
    device.ended.add("load 2")
    (outcome,) = made.poll()
    assert (outcome.job_id, outcome.bytes, outcome.seconds) == (2, 3 * PAGE, 0.5)
    made.wait([1, 7])
    assert device.said[-1] == "host waits for store 2"
    assert ended(made) == [(1, True)]
    assert ended(made) == []
    assert repr(made) == "<CudaCopier open: 0 unfinished, 2 done, 0 failed>"


@pytest.mark.parametrize(
    ("second", "waits"),
    [((0, 9), True), ((4, 1), True), ((4, 9), False)],
    ids=["same slot", "same block", "nothing in common"],
)
def test_a_job_waits_for_what_goes_the_other_way_if_both_touch_the_same(
    made, device, second, waits
):
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    made.submit(2, Direction.LOAD, plan_of(second))
    assert ("load waits for store 2" in device.said) is waits
    device.ended |= {"store 2"}
    made.poll()
    device.said.clear()
    made.submit(3, Direction.LOAD, plan_of((0, 1)))
    assert device.said == ["load waits for model", "load runs"], "job 1 has ended"


def test_tables_of_indices_are_uploaded_once_for_all_layers(region, device):
    """Layers in memory of their own; two chunks of two blocks, of which one is not there."""
    model = Model("hnd", heads=2, layers=3, blocks_per_chunk=2)
    geometry = model.geometry(1, 0)
    tensors = tensors_of(model.pages(model.logical(BLOCKS), 1, 0), shared=False)
    plan = plan_copies([3], [0], [1, 2, 3], [0, 1], geometry)
    with copier(tensors, fresh_region(geometry), geometry, CudaCopier, device=device) as made:
        made.submit(1, Direction.STORE, plan)
        assert device.uploads == 3, "slots with a tail, what is missing, what is there"
        made.submit(2, Direction.LOAD, plan)
        assert device.uploads == 4
        made.wait([1, 2])
        assert ended(made) == [(1, True), (2, True)]


def test_a_job_that_fails_on_the_way_ends_when_what_was_submitted_of_it_has(
    made, device, monkeypatch
):
    def fail(rows):
        raise MemoryError("told to fail")

    monkeypatch.setattr(device, "indices", fail)
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    assert ended(made) == []
    device.ended.add("store 2")
    (outcome,) = made.poll()
    assert (outcome.ok, outcome.error) == (False, "MemoryError: told to fail")
    assert repr(made) == "<CudaCopier open: 0 unfinished, 0 done, 1 failed>"


def test_a_broken_device_is_an_outcome_of_each_job(made, device):
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    made.submit(2, Direction.LOAD, plan_of((0, 2)))
    device.is_broken = True
    made.wait([2])
    outcomes = made.poll()
    assert [(o.job_id, o.ok, o.error) for o in outcomes] == [
        (2, False, f"RuntimeError: {BROKEN}"),
        (1, False, f"RuntimeError: {BROKEN}"),
    ]


def test_a_job_id_cannot_be_in_flight_twice(made):
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    with pytest.raises(KVTiersError, match="submitted twice") as caught:
        made.submit(1, Direction.LOAD, plan_of((0, 1)))
    assert caught.value.kind is Kind.BROKEN


def test_close_finishes_what_the_device_has_and_lets_go_of_the_memory(made, device, region):
    made.submit(1, Direction.STORE, plan_of((0, 1)))
    assert device.is_mapped
    made.close()
    made.close()
    assert not device.is_mapped
    assert ended(made) == [(1, True)]
    with pytest.raises(KVTiersError, match="after the copier was closed") as caught:
        made.submit(2, Direction.STORE, plan_of((0, 1)))
    assert caught.value.kind is Kind.CLOSED
    region.clear()  # raises BufferError while anybody has a view of it


def test_tensors_on_another_device_are_refused(tensors, region):
    device = Device()
    device.kind = "cuda"
    with pytest.raises(KVTiersError, match="on a cuda device"):
        CudaCopier(tensors, memoryview(region), GEOMETRY, device)
    assert not device.is_mapped


def test_nothing_stays_pinned_when_the_device_has_no_stream_to_give(tensors, region, device):
    def fail():
        raise RuntimeError("told to fail")

    device.stream = fail
    with pytest.raises(RuntimeError, match="told to fail"):
        CudaCopier(tensors, memoryview(region), GEOMETRY, device)
    assert not device.is_mapped


def test_a_copier_needs_no_more_than_words_of_eight_bytes_where_all_is_aligned(tensors, region):
    with copier(tensors, region, GEOMETRY, CudaCopier, device=HostDevice()) as made:
        ((layers,),) = made._layers
        assert [run.host.dtype for run in layers.runs] == [torch.int64]
