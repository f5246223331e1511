"""The one place where parts become a manager: index, policy, tiers, metrics."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import ChunkLayout, Key, Namespace, key_group
from kvtiers.config import KVTiersConfig
from kvtiers.core.exclusive import ExclusiveManager
from kvtiers.core.manager import ManagerOptions, TieringManager
from kvtiers.core.promote import PromoteOptions
from kvtiers.core.serving import ManagerParent
from kvtiers.errors import ConfigError
from kvtiers.events import Event, Sink
from kvtiers.host.chunkindex import ChunkIndex
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import EvictionPolicy, load_policy
from kvtiers.host.region import Region
from kvtiers.host.sized import SizedIndex
from kvtiers.host.slabs import SizeClasses
from kvtiers.metrics import Metrics
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Around, SecondaryTierManager
from kvtiers.tiers.hot import read_hot_list
from kvtiers.tiers.p2p.parent import ServesPeers

_log = logging.getLogger("kvtiers")


@dataclass(frozen=True, slots=True)
class Wired:
    """A manager and what was wired to it."""

    manager: TieringManager
    metrics: Metrics
    tell: Sink
    """Tells all who listen, metrics among them, what happens beside the manager."""
    tiers: tuple[SecondaryTierManager, ...]
    peers: ServesPeers | None = None
    """The tier that gives chunks to other engines, if there is one."""


def wire(
    config: KVTiersConfig,
    region: Region,
    layout: ChunkLayout,
    namespace: Namespace,
    *,
    listen: Sequence[Sink] = (),
    replica: int = 0,
) -> Wired:
    """Build the manager of one engine over ``region``.

    Where one of its tiers serves peers, several threads may call it. ``listen`` are told every
    event; ``replica`` is the index of a data-parallel engine. Raises ConfigError, with nothing left
    running, if a policy or a tier cannot be had.
    """
    hot = () if config.warm_manifest is None else _hot(config.warm_manifest, namespace, layout)
    index = _index(config, region, layout)
    tiers = _tiers(config, namespace, layout, Around(replica, lambda: region.buffer[:]))
    metrics = Metrics()
    tell = apart([metrics, *listen])
    manager, peers = _manager(
        index=index,
        layout=layout,
        view=lambda slot, nbytes, writable: region.view(slot, nbytes, writable=writable),
        tiers=tiers,
        sink=tell,
        options=_options(config),
    )
    if hot:
        manager.warm(hot)
    return Wired(manager, metrics, tell, tiers, peers)


def _manager(**parts: Any) -> tuple[TieringManager, ServesPeers | None]:
    """Of the ``parts`` of a ``TieringManager``; and the tier that serves peers from it."""
    peers = next((t for t in parts["tiers"] if isinstance(t, ServesPeers)), None)
    if peers is None:
        return TieringManager(**parts), None
    manager = ExclusiveManager(lock=threading.RLock(), **parts)
    max_pinned = max(1, int(manager.capacity * peers.max_pinned_fraction))
    layout, view = parts["layout"], parts["view"]
    peers.serve(ManagerParent(manager, layout, view, time.monotonic, time.sleep, max_pinned))
    return manager, peers


def _index(config: KVTiersConfig, region: Region, layout: ChunkLayout) -> ChunkIndex:
    """The index of all chunks, by sizes if the workers cut the region so."""

    def policy(capacity: int) -> EvictionPolicy:
        path = config.cache_policy_module_path
        return load_policy(config.eviction_policy, path, capacity=capacity)

    classes = SizeClasses.of(layout, region.slot_bytes)
    if len(classes.spans) == 1:
        return HostIndex(region.num_slots, policy(region.num_slots))
    num_slabs = region.num_slots // region.slab_slots
    return SizedIndex(num_slabs, region.slab_slots, classes, policy)


def _hot(path: str, namespace: Namespace, layout: ChunkLayout) -> list[Key]:
    """Chunks of this engine that the hot list names. Raises ConfigError naming the option."""
    try:
        prefixes = read_hot_list(path)
    except ConfigError as e:
        raise ConfigError(f"warm_manifest: {e}", key="warm_manifest") from e.__cause__
    groups = {g.group for g in layout.groups}
    ours = [k for p in prefixes if p.namespace == namespace.id for k in p.keys]
    hot = [k for k in ours if key_group(k) in groups]
    if not hot:
        _log.warning(
            "%s names no chunk of this engine, whose namespace is %s: nothing is warmed up",
            path,
            namespace.id,
        )
    return hot


def _tiers(
    config: KVTiersConfig,
    namespace: Namespace,
    layout: ChunkLayout,
    around: Around,
) -> tuple[SecondaryTierManager, ...]:
    built: list[SecondaryTierManager] = []
    try:
        for position, spec in enumerate(config.secondary_tiers):
            built.append(
                build_tier(
                    spec.as_mapping(),
                    position,
                    namespace=namespace,
                    layout=layout,
                    clock=time.monotonic,
                    wall_clock=time.time,
                    engine=around,
                )
            )
    except BaseException:
        for tier in built:
            tier.shutdown(1.0)
        raise
    return tuple(built)


def _options(config: KVTiersConfig) -> ManagerOptions:
    return ManagerOptions(
        promote=PromoteOptions(
            lookup_deadline_s=config.lookup_deadline_s,
            promote_deadline_s=config.promote_deadline_s,
            promotion_wait_s=config.promotion_wait_s,
        ),
        cascade_max_pinned_fraction=config.cascade_max_pinned_fraction,
        store_threshold=config.store_threshold,
        max_tracker_size=config.max_tracker_size,
        trace_lookups=config.observe is not None,
    )


def apart(listeners: Sequence[Sink]) -> Sink:
    """A sink that passes every event on to all of these, in their order.

    Who fails is told no more, and the log says so: who watches must not end what is watched.
    """
    listening = tuple(listeners)

    def sink(event: Event) -> None:
        nonlocal listening
        for listener in listening:
            try:
                listener(event)
            except Exception:
                listening = tuple(other for other in listening if other is not listener)
                _log.exception(
                    "%r failed and is told of no more events; the engine goes on with all the rest."
                    " Please report the traceback.",
                    listener,
                )

    return sink
