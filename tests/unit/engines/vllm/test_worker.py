import logging

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtiers.core.load import NO_SLOT
from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.cuda import RegionForVllm
from kvtiers.device.geometry import Geometry, GroupGeometry, opaque_page
from kvtiers.engines.vllm.accelerator import AcceleratorWorker
from kvtiers.engines.vllm.worker import CopyWorker
from kvtiers.errors import Kind, KVTiersError
from kvtiers.host.region import Region

PAGE = 4096
GEOMETRY = Geometry((GroupGeometry(0, 16, (opaque_page(0, PAGE, 1, 0),)),), 1)


def device(*blocks):
    return GPULoadStoreSpec(list(blocks), group_sizes=(len(blocks),), block_indices=(0,))


def slots(*ids):
    return CPULoadStoreSpec(list(ids))


class Inner:
    """vLLM's copy worker, told what to say."""

    def __init__(self) -> None:
        self.answer: bool | Exception = True
        self.submitted: list[tuple[Direction, int]] = []
        self.results: list[TransferResult] = []
        self.waited: list[set[int]] = []
        self.closed = False

    def _submit(self, direction, job_id):
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer:
            self.submitted.append((direction, job_id))
        return self.answer

    def submit_store(self, job_id, src_spec, dst_spec):
        assert isinstance(src_spec, GPULoadStoreSpec)
        return self._submit(Direction.STORE, job_id)

    def submit_load(self, job_id, src_spec, dst_spec):
        assert isinstance(dst_spec, GPULoadStoreSpec)
        return self._submit(Direction.LOAD, job_id)

    def get_finished(self):
        results, self.results = self.results, []
        return results

    def wait(self, job_ids):
        self.waited.append(job_ids)

    def shutdown(self):
        self.closed = True
        raise RuntimeError("the stream is broken")


@pytest.fixture
def region(tmp_path):
    region = Region.attach("test", {}, 4, GEOMETRY.slot_bytes, str(tmp_path))
    yield region
    region.close()


@pytest.fixture(params=[True, False], ids=["reports", "keeps-back"])
def reports(request) -> bool:
    return request.param


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
def on_accelerator(inner, region, reports) -> AcceleratorWorker:
    host = RegionForVllm(region.buffer, GEOMETRY, lambda _: None)
    return AcceleratorWorker(inner, host, GEOMETRY, region, reports_failures=reports)


@pytest.fixture
def on_cpu(region, reports):
    pages = torch.arange(8 * PAGE, dtype=torch.int32).to(torch.int8).view(8, PAGE)
    copier = CpuCopier([pages], region.buffer, GEOMETRY)
    worker = CopyWorker(copier, GEOMETRY, region, reports_failures=reports)
    yield worker
    worker.shutdown()


@pytest.fixture(params=["on_cpu", "on_accelerator"])
def worker(request):
    return request.getfixturevalue(request.param)


def outcome(worker):
    worker.check()
    results = [(r.job_id, r.success) for r in worker.get_finished()]
    worker.check()
    return results, worker.take_failed()


def failed(job_id, reports):
    """What a failed job looks like to vLLM, and beside it."""
    return ([(job_id, not reports)], set() if reports else {job_id})


@pytest.mark.parametrize("direction", list(Direction))
def test_a_chunk_without_a_slot_fails_its_job_either_way(worker, reports, direction) -> None:
    if direction is Direction.STORE:
        assert worker.submit_store(7, device(1, 2), slots(0, NO_SLOT))
    else:
        assert worker.submit_load(7, slots(0, NO_SLOT), device(1, 2), expedited=True)
    worker.wait({7})
    assert outcome(worker) == failed(7, reports)
    assert outcome(worker) == ([], set()), "each once"


def test_a_transfer_that_does_not_add_up_is_refused(worker, reports) -> None:
    assert worker.submit_store(7, device(1, 2), slots(0))
    assert outcome(worker) == failed(7, reports)


def test_a_copy_that_fails_on_the_way(on_cpu, reports) -> None:
    """Block 99 is not there, which is found on the copier's thread."""
    on_cpu.submit_load(1, slots(0), device(99))
    on_cpu.submit_store(2, device(1), slots(3))
    on_cpu.wait({1, 2})
    results, kept_back = outcome(on_cpu)
    assert results == [(1, not reports), (2, True)]
    assert kept_back == (set() if reports else {1})


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("answer", [False, RuntimeError("no stream")], ids=["false", "raises"])
def test_what_vllms_worker_does_not_take_has_failed(
    inner, on_accelerator, reports, direction, answer, caplog
) -> None:
    inner.answer = answer
    with caplog.at_level(logging.ERROR, "kvtiers"):
        if direction is Direction.STORE:
            assert on_accelerator.submit_store(7, device(1), slots(0))
        else:
            assert on_accelerator.submit_load(7, slots(0), device(1))
    assert outcome(on_accelerator) == failed(7, reports)
    assert "copy job 7 could not be started" in caplog.text


def test_what_fails_in_vllms_worker(inner, on_accelerator, reports) -> None:
    on_accelerator.submit_load(1, slots(0), device(1))
    on_accelerator.submit_store(2, device(2), slots(1))
    on_accelerator.wait({1})
    assert inner.submitted == [(Direction.LOAD, 1), (Direction.STORE, 2)]
    assert inner.waited == [{1}]
    inner.results = [TransferResult(1, False), TransferResult(2, True, PAGE, 0.5)]
    ended = on_accelerator.get_finished()
    assert [(r.job_id, r.success) for r in ended] == [(1, not reports), (2, True)]
    assert (ended[1].transfer_size, ended[1].transfer_time) == (PAGE, 0.5)
    assert on_accelerator.take_failed() == (set() if reports else {1})


def test_the_region_is_let_go_of_although_vllms_worker_does_not_stop_well(
    inner, region, on_accelerator
) -> None:
    with pytest.raises(RuntimeError, match="the stream is broken"):
        on_accelerator.shutdown()
    assert inner.closed
    with pytest.raises(KVTiersError) as caught:
        region.view(0, 1, writable=False)
    assert caught.value.kind is Kind.CLOSED


def test_unwritten_parts_of_a_stored_chunk_are_zeroed(inner, tmp_path) -> None:
    """Chunks of two blocks, of which the second is not there."""
    geometry = Geometry((GroupGeometry(0, 32, (opaque_page(0, PAGE, 1, 0),)),), 2)
    with Region.attach("two", {}, 1, geometry.slot_bytes, str(tmp_path)) as region:
        region.buffer[:] = b"\xee" * len(region.buffer)
        host = RegionForVllm(region.buffer, geometry, lambda _: None)
        worker = AcceleratorWorker(inner, host, geometry, region, reports_failures=False)
        worker.submit_store(1, device(5), slots(0))
        content = np.frombuffer(bytes(region.buffer), np.uint8).reshape(2, PAGE)
        assert (content == [[0xEE], [0]]).all()


def test_repr(on_cpu, on_accelerator, reports) -> None:
    on_cpu.submit_load(1, slots(NO_SLOT), device(1))
    assert repr(on_cpu) == (
        "<CopyWorker: 1 unfinished, 1 of them refused, 0 ended, 0 failures to take>"
    )
    on_cpu.get_finished()
    kept_back = 0 if reports else 1
    assert repr(on_cpu) == (
        f"<CopyWorker: 0 unfinished, 0 of them refused, 1 ended, {kept_back} failures to take>"
    )
    assert repr(on_accelerator).startswith("<AcceleratorWorker: 0 unfinished")


def test_check_names_what_is_broken(on_cpu, reports) -> None:
    on_cpu._refused = [1, 1]
    with pytest.raises(AssertionError, match="a job was refused twice"):
        on_cpu.check()
    on_cpu._refused = [1]
    with pytest.raises(AssertionError, match="more jobs refused than submitted"):
        on_cpu.check()
    on_cpu._refused = []
    on_cpu._failed = {1}
    if reports:
        with pytest.raises(AssertionError, match="a reported failure is kept back"):
            on_cpu.check()
    else:
        on_cpu.check()
