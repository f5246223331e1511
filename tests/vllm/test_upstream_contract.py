"""Both supported vLLMs: 0.32, installed here, and 0.33, whose calls are made by hand."""

import inspect
import logging
from types import FunctionType

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestGroupState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtiers.core.load import NO_SLOT
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.geometry import Geometry, GroupGeometry, opaque_page
from kvtiers.engines.vllm import KVTiersConnector, KVTiersSpec, tripwires
from kvtiers.engines.vllm.manager import VllmManager
from kvtiers.engines.vllm.metrics import definitions
from kvtiers.engines.vllm.scheduler import KVTiersScheduler
from kvtiers.engines.vllm.worker import CopyWorker, KVTiersWorker
from kvtiers.errors import KVTiersError
from kvtiers.host.policies import load_policy
from kvtiers.host.region import Region
from tests.vllm.offloading import connector_of, manager_of, offload, settle

PAGE = 4096


@pytest.fixture
def copying(tmp_path):
    """A worker over one layer of eight pages and a region of four slots, and the pages."""
    pages = torch.arange(8 * PAGE, dtype=torch.int32).to(torch.int8).view(8, PAGE)
    geometry = Geometry((GroupGeometry(0, 16, (opaque_page(0, PAGE, 1, 0),)),), 1)
    region = Region.attach("test", {}, 4, geometry.slot_bytes, str(tmp_path))
    copier = CpuCopier([pages], region.buffer, geometry)
    worker = CopyWorker(copier, geometry, region, reports_failures=False)
    yield worker, pages
    worker.shutdown()


def device(*blocks):
    return GPULoadStoreSpec(list(blocks), group_sizes=(len(blocks),), block_indices=(0,))


def test_an_expedited_load_has_ended_when_wait_returns(copying):
    """0.33 loads small requests within the step: submit_load(expedited=True), then wait."""
    worker, pages = copying
    pages[1:3] = torch.randint(-128, 127, (2, PAGE), dtype=torch.int8)
    assert worker.submit_store(1, device(1, 2), CPULoadStoreSpec([3, 0]))
    worker.wait({1})
    assert worker.submit_load(2, CPULoadStoreSpec([3, 0]), device(5, 6), expedited=True)
    worker.wait({2})
    assert np.array_equal(pages[5:7], pages[1:3])
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(1, True), (2, True)]
    assert worker.take_failed() == set()


def test_the_methods_of_0_33_are_there_with_any_base(engine, prompt):
    with engine(kv_transfer_config=offload()) as e:
        e.ask(prompt(500))
        settle(e)
        manager = manager_of(e)
        with manager.lock:
            assert manager.has_pending_work() is False
        assert manager.config_info() == [{}]
        assert KVTiersSpec.config_info_keys({"cpu_bytes_to_use": 1}) == ()
        assert manager.on_reset_flushed() is None
        settle(e)


def test_a_step_in_the_order_of_0_33(engine, prompt):
    """on_schedule_end comes last, after the stores and the ends of requests of its step."""
    with engine(kv_transfer_config=offload()) as e:
        e.ask(prompt(500))
        settle(e)
        manager = manager_of(e)
        (first, *_) = manager.core._index.ready
        absent = first[:-5] + bytes([first[-5] ^ 1]) + first[-4:]
        context = ReqContext(req_id="by-hand")
        with manager.lock:
            manager.on_new_request(context)
            assert manager.lookup(first, context) is LookupResult.HIT
            assert manager.lookup(absent, context) is LookupResult.MISS
            assert len(manager.prepare_load([first], context).block_ids) == 1
            output = manager.prepare_store([absent], context)
            assert output.keys_to_store == [absent]
            manager.complete_load([first], context)
            manager.complete_store([absent], context)
            manager.on_request_finished(context)
            manager.on_schedule_end(ScheduleEndContext(["by-hand"], set()))
        settle(e)
        assert absent in manager.core._index.ready


def test_reset_and_its_flush_as_0_33_reports_it(engine, prompt):
    """0.33 keeps its own count of stale jobs and calls on_reset_flushed besides ours."""
    with engine(kv_transfer_config=offload()) as e:
        e.ask(prompt(500))
        manager = manager_of(e)
        with manager.lock:
            connector_of(e).reset_cache()
            manager.on_reset_flushed()
            manager.on_reset_flushed()
        settle(e)
        assert manager.core.use.resident == 0


def test_a_load_without_an_owner_fails_without_naming_a_request(engine):
    """0.33 keeps no request for a load within the step."""
    with engine(kv_transfer_config=offload()):
        side = get_kv_transfer_group().connector_worker
        side._load_jobs[99] = None
        side.worker.submit_load(99, CPULoadStoreSpec([NO_SLOT]), device(1), expedited=True)
        side.worker.wait({99})
        assert side.get_transfer_results(set()).failed_recving == set()
        assert side.build_connector_worker_meta().failed_jobs == {99}


def test_every_call_of_both_versions_fits_our_signatures():
    calls = {
        CopyWorker.submit_load: [(1, "src", "dst"), (1, "src", "dst", True)],
        CopyWorker.submit_store: [(1, "src", "dst")],
        CopyWorker.wait: [({1},)],
        VllmManager.lookup: [("key", "context")],
        VllmManager.get_load_source: [("key", "context")],
        VllmManager.prepare_load: [(["key"], "context")],
        VllmManager.complete_load: [(["key"], "context")],
        VllmManager.touch: [(["key"], "context")],
        VllmManager.prepare_store: [(["key"], "context")],
        VllmManager.complete_store: [(["key"], "context"), (["key"], "context", False)],
        VllmManager.on_new_request: [("context",)],
        VllmManager.on_request_finished: [("context",)],
        VllmManager.on_schedule_end: [("context",)],
        VllmManager.on_reset_flushed: [()],
        VllmManager.config_info: [()],
        KVTiersSpec.config_info_keys: [({},)],
        KVTiersSpec.build_metric_definitions: [({},)],
    }
    for method, arguments in calls.items():
        signature = inspect.signature(method)
        unbound = "self" in signature.parameters
        for given in arguments:
            signature.bind(*((None, *given) if unbound else given))
    inspect.signature(CopyWorker.submit_load).bind(None, 1, "src", "dst", expedited=True)


def test_metrics_are_upstreams_with_label_and_buckets():
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    tier = {"type": "fs", "root_dir": "/x", "backpressure": True}
    extra = {"cpu_bytes_to_use": 1, "secondary_tiers": [tier]}
    theirs = TieringOffloadingSpec.build_metric_definitions(extra)
    ours = definitions()
    absent = {
        "vllm:kv_offload_tiering_backpressure_store_latency_ema",  # a detector we do not have
        "vllm:kv_offload_tiering_backpressure_stores_dropped",
        "vllm:kv_offload_tiering_promotion_latency_seconds",  # new in 0.33
    }
    assert theirs.keys() - ours.keys() <= absent
    for name in theirs.keys() & ours.keys():
        assert type(ours[name]) is type(theirs[name]), name
        assert ours[name].labelnames == theirs[name].labelnames, name
        assert getattr(ours[name], "buckets", ()) == getattr(theirs[name], "buckets", ()), name
    for name, metadata in ours.items():
        assert isinstance(metadata, OffloadingGaugeMetadata | OffloadingCounterMetadata) or (
            metadata.buckets
        ), name


def test_a_policy_written_for_vllm_is_refused_with_what_it_lacks():
    with pytest.raises(KVTiersError, match=r'eviction_policy "LRUCachePolicy".*lacks ') as caught:
        load_policy("LRUCachePolicy", "vllm.v1.kv_offload.cpu.policies.lru", capacity=4)
    assert "kvtiers.host.policies.base.EvictionPolicy" in str(caught.value)


# --- tripwires


def test_this_vllm_is_as_it_was_when_we_were_tested():
    assert tripwires.complaints() == []


def other_parameters(self, scheduler_output, something_new):
    """A method that takes more than it did."""


def more_attributes(self, vllm_config, role, kv_cache_config):
    self.connector_scheduler = self.connector_worker = self._canonical_layout = None
    self.something_new = 1


def fewer_attributes(self, *args):
    self.other = 1


@pytest.mark.parametrize(
    ("owner", "name", "change", "complaint"),
    [
        (
            OffloadingConnectorScheduler,
            "_build_store_jobs",
            other_parameters,
            "OffloadingConnectorScheduler._build_store_jobs takes"
            " ('scheduler_output', 'something_new')",
        ),
        (OffloadingConnectorScheduler, "reset_cache", None, "reset_cache is gone"),
        (OffloadingConnector, "register_kv_caches", None, "register_kv_caches is gone"),
    ],
    ids=["parameters", "gone", "inherited"],
)
def test_a_changed_method_refuses_the_start_in_plain_words(
    engine, monkeypatch, owner, name, change, complaint
):
    monkeypatch.setattr(owner, name, change)
    lines = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("kvtiers").addHandler(handler)
    try:
        with pytest.raises(KVTiersError) as caught, engine(kv_transfer_config=offload()):
            pass
    finally:
        logging.getLogger("kvtiers").removeHandler(handler)
    message = str(caught.value)
    assert message.startswith("this vLLM is not one that kvtiers supports (>= 0.32, < 0.34): ")
    assert complaint in message
    assert lines == [message]


def test_what_else_would_trip(monkeypatch):
    def with_constructor(table, owner, constructor):
        (old,) = [c for c in getattr(tripwires, table) if c is owner.__init__]
        changed = {constructor if c is old else c: n for c, n in getattr(tripwires, table).items()}
        monkeypatch.setattr(tripwires, table, changed)

    with_constructor("ATTRIBUTES", OffloadPromMetrics, fewer_attributes)
    with_constructor("REPLACED", OffloadingConnector, more_attributes)
    monkeypatch.setitem(tripwires.FIELDS, RequestGroupState, ("block_ids", "lost"))
    assert tripwires.complaints() == [
        "fewer_attributes sets no _observe_deprecated_metrics",
        "more_attributes sets something_new",
        "RequestGroupState has no lost",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (KVTiersConnector, OffloadingConnector),
        (KVTiersScheduler, OffloadingConnectorScheduler),
        (KVTiersWorker, OffloadingConnectorWorker),
    ],
)
def test_every_override_is_in_the_table(ours, theirs):
    """One that is not would not trip."""
    listed = {w.name for w in tripwires.SIGNATURES if w.owner is theirs}
    methods = {n for n, v in vars(ours).items() if isinstance(v, classmethod | FunctionType)}
    plain = object()
    overridden = {n for n in methods if getattr(theirs, n, plain) is not getattr(object, n, plain)}
    assert overridden <= listed
