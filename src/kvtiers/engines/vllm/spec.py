"""vLLM's ``OffloadingSpec``: builds the worker side in every worker, the manager in the scheduler.

The two meet in the host region. Workers register their KV caches before vLLM builds its scheduler,
so the scheduler finds the region and the record of its geometry, and takes the name away: from then
on the memory goes back to the system however the processes end.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtiers.chunks import Namespace
from kvtiers.config import KVTiersConfig, parse_config
from kvtiers.core.manager import TieringManager
from kvtiers.device.copier import Copier
from kvtiers.device.cores import allowed_cores, copy_threads, use_allowed_cores
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.geometry import Geometry
from kvtiers.device.pages.report import report
from kvtiers.engines.vllm import layout as layouts
from kvtiers.engines.vllm import stages
from kvtiers.engines.vllm.accelerator import own_copier, unfit_for_vllm, vllms_worker
from kvtiers.engines.vllm.events import HOST, KVEvents
from kvtiers.engines.vllm.facts import (
    EngineFacts,
    formats_without_facts,
    namespace_without_facts,
)
from kvtiers.engines.vllm.handover import Handover
from kvtiers.engines.vllm.layout import RegionRecord
from kvtiers.engines.vllm.logs import logger, saying_refusals
from kvtiers.engines.vllm.manager import VllmManager
from kvtiers.engines.vllm.metrics import StatsExporter, definitions
from kvtiers.engines.vllm.refusals import (
    refuse_pipelines,
    refuse_without_asserts,
    refuse_without_facts,
)
from kvtiers.engines.vllm.worker import CopyWorker, ReportingWorker
from kvtiers.events import PRIMARY, Sink, tier_label
from kvtiers.host.region import Region, check_capacity, sweep
from kvtiers.host.slabs import SizeClasses, slab_bytes_for
from kvtiers.kvevents.spans import Place
from kvtiers.metrics.names import EVENT_QUEUE
from kvtiers.observe.assemble import Observed, recorder_of, start_observer
from kvtiers.observe.gauges import Gauges
from kvtiers.tiers.base import SecondaryTierManager
from kvtiers.wiring import wire


class KVTiersSpec(OffloadingSpec):
    """Named by ``spec_name``, or built by our connector, which also passes ``facts``.

    Without them it runs under vLLM's own connector, to which failures must be reported (it ends the
    engine then), and which does not say what distinguishes this engine from others.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """What the manager may report; also the first place where bad settings are refused."""
        with saying_refusals():
            parse_config(extra_config)
        return definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Labels of vLLM 0.33's ``kv_offload_config_info``: none yet."""
        return ()

    def __init__(self, config: OffloadingConfig, facts: EngineFacts | None = None) -> None:
        super().__init__(config)
        with saying_refusals():
            self.settings: KVTiersConfig = parse_config(config.extra_config)
            if facts is None:
                refuse_pipelines(config.parallel.pp_size, "vLLM's own OffloadingConnector")
                refuse_without_asserts()
                refuse_without_facts(self.settings)
        self.facts = facts
        self.namespace_id = ""
        """Of what this engine stores, when there is a manager."""
        self._manager: VllmManager | None = None
        self._worker: ReportingWorker | None = None

    @property
    def region_name(self) -> str:
        """Unique per engine: two engines may have been given one engine id."""
        instance = self.facts.instance if self.facts else "spec"
        return _file_name(f"{self.config.engine_id}-{instance}")

    def note_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The device tensors by layer, which tell how K and V are packed."""
        if self.facts is not None:
            self.facts = self.facts.with_tensors(kv_caches)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The copying side of one rank, over the region it makes or joins."""
        if self._worker is None:
            with saying_refusals(self.config.parallel.rank):
                self._worker = self._build_worker(kv_caches)
            if self.facts is not None:  # the device's memory may be freed before this object
                self.facts = replace(self.facts, tensors={})
        return self._worker

    def get_manager(self) -> OffloadingManager:
        """The deciding side, with the tiers below it."""
        if self._manager is None:
            with saying_refusals():
                self._manager = self._build_manager()
        return self._manager

    def _build_worker(self, kv_caches: CanonicalKVCaches) -> ReportingWorker:
        settings, directory = self.settings, self.settings.region_directory
        device = str(kv_caches.tensors[0].tensor.device.type)
        if self.facts is None:
            refuse_without_facts(settings, device)
        kv_caches, geometry, why_own = self._described(kv_caches, device)
        geometry, layers = stages.across(geometry, self.config)
        geometry.check()
        if geometry.rank == 0:
            for line in report(geometry):
                logger.info("%s", line)
        for path in sweep(directory):
            logger.info("removed %s, left behind by an engine that died", path)
        record = layouts.record_of(geometry, self.config, self._byte_formats(device), layers)
        region = self._attach(geometry, record)
        try:
            return self._copying(kv_caches, geometry, region, why_own)
        except BaseException:
            region.unlink()
            region.close()
            raise

    def _described(
        self, kv_caches: CanonicalKVCaches, device: str
    ) -> tuple[CanonicalKVCaches, Geometry, str | None]:
        """The tensors, where their bytes lie in a chunk, and why our own copier moves them.

        None: vLLM's worker does. Ours can be told more of them.
        """
        why_own: str | None = "it copies from accelerators only"
        if self.config.parallel.pp_size > 1:
            why_own = "it knows the layers of its own pipeline stage only"
        elif device != "cpu":
            geometry = layouts.geometry_of(kv_caches, self.config, self.facts, vllms_bytes=True)
            geometry = replace(geometry, one_size=True)  # it keeps all chunks one stride apart
            why_own = unfit_for_vllm(kv_caches, geometry)
            if why_own is None:
                return kv_caches, geometry, None
        kv_caches = layouts.by_layer(kv_caches, self.facts)
        return kv_caches, layouts.geometry_of(kv_caches, self.config, self.facts), why_own

    def _attach(self, geometry: Geometry, record: RegionRecord) -> Region:
        capacity, directory = self.settings.cpu_bytes_to_use, self.settings.region_directory
        granule = geometry.granule_bytes
        classes = SizeClasses.of(geometry.layout(), granule)
        slab_bytes = slab_bytes_for(capacity, classes, granule)
        num_slabs = check_capacity(capacity, slab_bytes, directory, name=self.region_name)
        slab_slots = slab_bytes // granule
        return Region.attach(
            self.region_name,
            record.to_json(),
            num_slabs * slab_slots,
            granule,
            directory,
            slab_slots=slab_slots,
        )

    def _byte_formats(self, device: str) -> list[str]:
        if self.facts is None:
            return formats_without_facts(self.config, device)
        return self.facts.byte_formats()

    def _copying(
        self, kv_caches: CanonicalKVCaches, geometry: Geometry, region: Region, why_own: str | None
    ) -> ReportingWorker:
        alone = self.facts is None
        if why_own is None:
            return vllms_worker(kv_caches, geometry, region, reports_failures=alone)
        copier: Copier
        if kv_caches.tensors[0].tensor.device.type == "cpu":
            copier = self._cpu_copier(kv_caches, geometry, region)
        else:
            copier = own_copier(kv_caches, geometry, region, why_own)
        return CopyWorker(copier, geometry, region, reports_failures=alone)

    def _cpu_copier(
        self, kv_caches: CanonicalKVCaches, geometry: Geometry, region: Region
    ) -> CpuCopier:
        parallel = self.config.parallel
        region.touch_ahead(parallel.rank, parallel.world_size, prepare=use_allowed_cores)
        threads = copy_threads(len(allowed_cores()), parallel.world_size)
        tensors = [t.tensor for t in kv_caches.tensors]
        return CpuCopier(tensors, region.buffer, geometry, threads=threads)

    def _build_manager(self) -> VllmManager:
        settings = self.settings
        for key, reason in settings.ignored:
            logger.warning("%s has no effect: %s", key, reason)
        region = Region.open(self.region_name, settings.region_directory)
        try:
            # All workers have joined; first of all, so that a refusal leaves no file either.
            region.unlink()
            record = RegionRecord.from_json(region.record)
            layouts.check_world(record, self.config.parallel.world_size)
            return self._wire(region, record)
        except BaseException:
            region.close()
            raise

    def _wire(self, region: Region, record: RegionRecord) -> VllmManager:
        settings = self.settings
        namespace = self._namespace(record)
        self.namespace_id = namespace.id
        events = KVEvents(
            self.kv_events_config.enable_kv_cache_events,
            describe=settings.self_describing_kv_events,
        )
        if settings.secondary_tiers:
            region.touch_ahead()  # their lanes read and write it in this process
        replica = self.config.parallel.data_parallel_index
        recorder = recorder_of(settings.observe)
        listen: list[Sink] = [events] if recorder is None else [events, recorder]
        wired = wire(settings, region, record.layout, namespace, listen=listen, replica=replica)
        events.places = {PRIMARY: HOST, **_places(settings, wired.tiers)}
        self._report(region, record, namespace, wired.manager)
        core = wired.manager
        gauges = Gauges(wired.metrics, core.tiers, region.slot_bytes, lambda: core.backlogs)
        gauges.watch(EVENT_QUEUE, (), lambda: events.queued())
        manager = VllmManager(
            core,
            clock=time.monotonic,
            stats=StatsExporter(wired.metrics, gauges),
            events=events,
            sink=wired.tell,
            on_shutdown=region.close,
            shutdown_deadline_s=settings.shutdown_deadline_s,
        )
        manager.handover = Handover(wired.peers)
        if settings.observe is not None and recorder is not None:
            observed = Observed(
                model=self.config.model.name,
                namespace=namespace,
                layout=record.layout,
                replica=replica,
                manager=core,
                metrics=wired.metrics,
                gauges=gauges,
                inert=lambda: manager.inert,
            )
            manager.observer = start_observer(settings.observe, observed, recorder)
        return manager

    def _namespace(self, record: RegionRecord) -> Namespace:
        if self.facts is None:
            return namespace_without_facts(
                self.config,
                record.named_bytes(),
                model_digest=self.settings.model_digest,
                hash_seed=os.environ.get("PYTHONHASHSEED"),
            )
        own_keys = self.settings.chunk_keys == "own"
        identity = self.facts.identify(self.settings.model_digest, own_keys)
        for warning in identity.warnings:
            logger.warning("%s", warning)
        spans = [g.span for g in self.facts.groups]
        if record.layers:
            spans = [replace(s, layers=n) for s, n in zip(spans, record.layers, strict=True)]
        return layouts.namespace_of(record, identity, spans, own_keys=own_keys)

    def _report(
        self, region: Region, record: RegionRecord, namespace: Namespace, core: TieringManager
    ) -> None:
        alone = self.facts is None
        bound = alone or not record.portable
        logger.info(
            "kvtiers: host memory for %s = %s%d tokens; tiers: %s; namespace %s (%s)",
            layouts.described(record.layout, region),
            "at least " if alone and len(record.layout.groups) > 1 else "",
            layouts.tokens_of(record.layout, region),
            ", ".join(t.label for t in core.tiers) or "none",
            namespace.id,
            "bound to this topology" if bound else "portable",
        )


def _places(settings: KVTiersConfig, tiers: Sequence[SecondaryTierManager]) -> dict[str, Place]:
    places = {}
    for position, (spec, tier) in enumerate(
        zip(settings.secondary_tiers, tiers, strict=True), start=1
    ):
        if spec.options.get("enable_kv_events") and tier.medium is not None:
            label = tier_label(position, tier.name)
            places[label] = Place(tier.medium, tier.locality, ownership=label)
    return places


def _file_name(text: str) -> str:
    """``text`` as a file name of at most 120 characters, still as good as unique."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in text)
    return f"{plain[:100]}.{digest}"
