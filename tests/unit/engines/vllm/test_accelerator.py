"""Which worker copies on an accelerator: vLLM's where it can make the chunks, else ours."""

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtiers.device.geometry import Geometry, GroupGeometry, opaque_page
from kvtiers.device.host_device import HostDevice
from kvtiers.engines.vllm import accelerator
from kvtiers.engines.vllm.accelerator import own_copier, unfit_for_vllm, vllms_worker
from kvtiers.engines.vllm.worker import CopyWorker
from kvtiers.errors import ConfigError
from kvtiers.host.region import Region

PAGE = 4096
WHOLE = CanonicalPageMapping(
    canonical_page_size_bytes=PAGE,
    local_page_size_bytes=PAGE,
    runs=(CopyRun(0, 0, PAGE, 1, 0, 0),),
    num_writers=1,
    writer_index=0,
    parallelism_agnostic=True,
)


def model(*groups: list[int], mapping: CanonicalPageMapping | None = WHOLE):
    """One group per list of the tensors that hold its layers."""
    tensors = [torch.full((8, PAGE), n + 1, dtype=torch.int8) for n in range(2)]
    refs = [[CanonicalKVCacheRef(n, PAGE, mapping) for n in group] for group in groups]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(t, PAGE) for t in tensors], refs)
    pages = [tuple(opaque_page(n, PAGE, 1, 0) for n in group) for group in groups]
    groups_of = tuple(GroupGeometry(i, 16, p) for i, p in enumerate(pages))
    return caches, Geometry(groups_of, 1, one_size=True)


UNFIT = [
    (model([0, 1], [1, 0]), "the groups of this model do not cover the tensors in one order"),
    (model([0, 1], mapping=None), "some layers has no canonical form"),
]


@pytest.fixture
def region(tmp_path):
    with Region.attach("test", {}, 4, 2 * PAGE, str(tmp_path)) as made:
        yield made


@pytest.mark.parametrize(("given", "reason"), UNFIT)
def test_ours_copies_what_vllms_worker_cannot(region, monkeypatch, caplog, given, reason):
    caches, geometry = given
    monkeypatch.setitem(accelerator.OWN_DEVICES, "cpu", lambda device: HostDevice())
    why = unfit_for_vllm(caches, geometry)
    assert reason in why
    copier = own_copier(caches, geometry, region, why)
    worker = CopyWorker(copier, geometry, region, reports_failures=False)
    assert "not run on a GPU" in caplog.text
    assert reason in caplog.text
    sizes = (1,) + (0,) * (len(geometry.groups) - 1)
    indices = (0,) * len(sizes)
    blocks = GPULoadStoreSpec([5], group_sizes=sizes, block_indices=indices)
    worker.submit_store(1, blocks, CPULoadStoreSpec([2]))
    worker.wait({1})
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(1, True)]
    assert bytes(region.view(2, 2 * PAGE, False)) == b"\1" * PAGE + b"\2" * PAGE
    worker.check()
    worker.shutdown()


@pytest.mark.parametrize(("given", "reason"), UNFIT)
def test_a_device_that_has_no_copier_of_ours_is_refused(region, given, reason):
    caches, geometry = given
    with pytest.raises(ConfigError, match=reason) as caught:
        own_copier(caches, geometry, region, unfit_for_vllm(caches, geometry))
    assert str(caught.value).startswith("this model cannot be offloaded from this cpu device")


def test_vllms_worker_copies_what_it_can(region, monkeypatch):
    built = {}

    def build(**given):
        built.update(given)

    monkeypatch.setattr(accelerator, "CPUOffloadingWorker", build)
    caches, geometry = model([0, 1], [0])
    assert unfit_for_vllm(caches, geometry) is None
    worker = vllms_worker(caches, geometry, region, reports_failures=True)
    assert isinstance(worker, accelerator.AcceleratorWorker)
    assert (built["num_cpu_chunks"], built["canonical_layout"]) == (4, True)
    built["mmap_region"].cleanup()
