"""vLLM's ``OffloadingSpec``: builds the worker side in every worker, the manager in the scheduler.

The two meet in the host region. Workers register their KV caches before vLLM builds its scheduler,
so the scheduler finds the region and the record of its geometry, and takes the name away: from then
on the memory goes back to the system however the processes end.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    Locality,
    Medium,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtiers.chunks import Namespace
from kvtiers.config import KVTiersConfig, parse_config
from kvtiers.core.manager import TieringManager
from kvtiers.device.cpu import CpuCopier
from kvtiers.engines.vllm import layout as layouts
from kvtiers.engines.vllm.events import KVEvents, Place
from kvtiers.engines.vllm.facts import EngineFacts
from kvtiers.engines.vllm.logs import logger, saying_refusals
from kvtiers.engines.vllm.manager import VllmManager
from kvtiers.engines.vllm.metrics import StatsExporter, definitions
from kvtiers.engines.vllm.namespace import build_namespace
from kvtiers.engines.vllm.worker import CopyWorker
from kvtiers.errors import ConfigError
from kvtiers.host.region import Region, check_capacity, sweep
from kvtiers.tiers.base import SecondaryTier
from kvtiers.wiring import wire


class KVTiersSpec(OffloadingSpec):
    """Named by ``spec_name``, or built by our connector, which also passes ``facts``."""

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
            refuse_pipelines(config.parallel.pp_size)
        self.facts = facts
        self._manager: VllmManager | None = None
        self._worker: OffloadingWorker | None = None

    @property
    def region_name(self) -> str:
        """Unique per engine: two engines may have been given one engine id."""
        instance = self.facts.instance if self.facts else "spec"
        return _file_name(f"{self.config.engine_id}-{instance}")

    def note_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The device tensors by layer, which tell how K and V are packed."""
        if self.facts is not None:
            self.facts = self.facts.with_packing(kv_caches)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The copying side of one rank, over the region it makes or joins."""
        if self._worker is None:
            with saying_refusals():
                self._worker = self._build_worker(kv_caches)
        return self._worker

    def get_manager(self) -> OffloadingManager:
        """The deciding side, with the tiers below it."""
        if self._manager is None:
            with saying_refusals():
                self._manager = self._build_manager()
        return self._manager

    def _build_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        settings, directory = self.settings, self.settings.region_directory
        geometry = layouts.geometry_of(kv_caches, self.config, self.facts)
        geometry.check()
        for path in sweep(directory):
            logger.info("removed %s, left behind by an engine that died", path)
        num_slots = check_capacity(
            settings.cpu_bytes_to_use, geometry.slot_bytes, directory, name=self.region_name
        )
        region = Region.attach(
            self.region_name,
            layouts.record_of(geometry, self.config, self.facts),
            num_slots,
            geometry.slot_bytes,
            directory,
        )
        try:
            return self._copying(kv_caches, geometry, region)
        except BaseException:
            region.unlink()
            region.close()
            raise

    def _copying(self, kv_caches: CanonicalKVCaches, geometry: Any, region: Region) -> Any:
        tensors = [t.tensor for t in kv_caches.tensors]
        if tensors[0].device.type == "cpu":
            return CopyWorker(CpuCopier(tensors, region.buffer, geometry), geometry, region)
        from kvtiers.engines.vllm.accelerator import accelerator_worker

        return accelerator_worker(kv_caches, geometry, region)

    def _build_manager(self) -> VllmManager:
        settings = self.settings
        for key, reason in settings.ignored:
            logger.warning("%s has no effect: %s", key, reason)
        region = Region.open(self.region_name, settings.region_directory)
        try:
            # All workers have joined; first of all, so that a refusal leaves no file either.
            region.unlink()
            layouts.check_world(region.record, self.config.parallel.world_size)
            return self._wire(region)
        except BaseException:
            region.close()
            raise

    def _wire(self, region: Region) -> VllmManager:
        settings, record = self.settings, region.record
        layout = layouts.layout_of(record)
        namespace = self._namespace(record)
        events = KVEvents(
            self.kv_events_config.enable_kv_cache_events,
            describe=settings.self_describing_kv_events,
        )
        wired = wire(settings, region, layout, namespace, listen=events)
        events.places.update(_places(settings, wired.tiers))
        _report(region, layout, namespace, wired.manager)
        labels = [t.label for t in wired.manager.tiers]
        return VllmManager(
            wired.manager,
            clock=time.monotonic,
            stats=StatsExporter(wired.metrics, labels, region.slot_bytes),
            events=events,
            sink=wired.metrics,
            on_shutdown=region.close,
            shutdown_deadline_s=settings.shutdown_deadline_s,
        )

    def _namespace(self, record: Mapping[str, Any]) -> Namespace:
        certificate = {**record["certificate"], "byte_formats": record["byte_formats"]}
        if self.facts is None:
            return self._namespace_without_facts(certificate)
        identity = self.facts.identify(self.settings.model_digest)
        for warning in identity.warnings:
            logger.warning("%s", warning)
        spans = [g.span for g in self.facts.groups]
        return build_namespace(identity, spans, certificate, portable=record["portable"])

    def _namespace_without_facts(self, certificate: dict[str, Any]) -> Namespace:
        """Under vLLM's own connector: all that is known is the model's name."""
        config = self.config
        return Namespace(
            {
                "model": self.settings.model_digest or f"name:{config.model.name}",
                "kv_dtype": config.model.dtype,
                "tokens_per_hash": config.cache.tokens_per_hash,
                "world_size": config.parallel.world_size,
                "groups": [
                    [g.group_id, g.tokens_per_block, len(g.layer_names)] for g in config.groups
                ],
                "bytes": certificate,
            }
        )


def refuse_pipelines(stages: int) -> None:
    """Raise ConfigError for pipeline parallelism."""
    if stages > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, but kvtiers supports 1 only so far; "
            "use tensor_parallel_size instead",
            key="pipeline_parallel_size",
        )


def _places(settings: KVTiersConfig, tiers: Sequence[SecondaryTier]) -> dict[str, Place]:
    places = {}
    for position, (spec, tier) in enumerate(
        zip(settings.secondary_tiers, tiers, strict=True), start=1
    ):
        if spec.options.get("enable_kv_events") and tier.medium is not None:
            locality = Locality(tier.locality) if tier.locality else None
            label = f"{position}:{tier.name}"
            places[label] = Place(Medium(tier.medium), locality, ownership=label)
    return places


def _report(region: Region, layout: Any, namespace: Namespace, core: TieringManager) -> None:
    logger.info(
        "kvtiers: host memory for %d chunks of at most %d bytes = %d tokens; tiers: %s; "
        "namespace %s (%s)",
        region.num_slots,
        region.slot_bytes,
        layouts.tokens_of(layout, region.num_slots),
        ", ".join(t.label for t in core.tiers) or "none",
        namespace.id,
        "portable" if region.record["portable"] else "bound to this topology",
    )


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)[:200]
