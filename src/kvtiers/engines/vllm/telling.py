"""KV events of our tiers in vLLM's classes, in place of its tracker of offloading events.

The scheduler's thread notes references; the announcer's makes of them what GPU events say of the
same blocks (:mod:`kvtiers.engines.vllm.describing`), and hands finished events back.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

from kvtiers.chunks import Key
from kvtiers.config import KVTiersConfig
from kvtiers.engines.vllm.describing import (
    FOUND,
    FOUND_PART,
    STORED,
    STORED_PART,
    Source,
    materialize,
)
from kvtiers.engines.vllm.logs import logger
from kvtiers.events import DescriptionsDropped, EventsTold, Sink
from kvtiers.kvevents import messages
from kvtiers.kvevents.announcer import Announcer
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place
from kvtiers.tiers.fs.folders import path_of

MAX_READY = 65_536
"""Chunks told of that vLLM has not taken; then no more is told until it has."""

_THEIRS: Mapping[type[messages.KVEvent], type[KVCacheEvent]] = {
    messages.BlockStored: BlockStored,
    messages.BlockRemoved: BlockRemoved,
    messages.AllBlocksCleared: AllBlocksCleared,
}


class _Said(NamedTuple):
    """What was said at once."""

    blocks: int
    events: list[KVCacheEvent]
    kinds: "Counter[tuple[str, str]]"
    """How many there are of each class and medium."""


class ReadyEvents:
    """Events in vLLM's classes until it takes them. Made on one thread, taken on another."""

    def __init__(self) -> None:
        self._ready: deque[_Said] = deque()
        self._said = 0
        self._taken = 0

    def room(self) -> int:
        """About how many chunks can be told of before vLLM takes some."""
        return max(0, MAX_READY - self.chunks)

    def say(self, events: Sequence[messages.KVEvent]) -> None:
        """Keep these for vLLM."""
        if not events:
            return
        blocks = sum(len(getattr(e, "block_hashes", ())) for e in events)
        kinds = Counter((type(e).__name__, getattr(e, "medium", None) or "none") for e in events)
        self._said += blocks
        self._ready.append(_Said(blocks, [theirs(e) for e in events], kinds))

    def serve(self, narrator: Narrator) -> float | None:
        """Nothing is due."""
        return None

    def close(self) -> None:
        """Nothing is to be done."""

    def take(self) -> tuple[list[KVCacheEvent], "Counter[tuple[str, str]]"]:
        """What is there, in order, and how many of each class and medium."""
        taken: list[KVCacheEvent] = []
        kinds: Counter[tuple[str, str]] = Counter()
        while self._ready:
            said = self._ready.popleft()
            self._taken += said.blocks
            taken += said.events
            kinds.update(said.kinds)
        return taken, kinds

    @property
    def chunks(self) -> int:
        """About how many are told of in what is there."""
        return self._said - self._taken

    def __len__(self) -> int:
        return len(self._ready)

    def check(self) -> None:
        """Raise AssertionError if more was taken than was said."""
        assert self._taken <= self._said, "more was taken than was said"

    def __repr__(self) -> str:
        return f"<ReadyEvents {len(self)}>"


def theirs(event: messages.KVEvent) -> KVCacheEvent:
    """The event in vLLM's class of the same name."""
    return _THEIRS[type(event)](**msgspec.structs.asdict(event))


class TiersTracker:
    """What vLLM's scheduler calls in place of its ``OffloadingEventsTracker``.

    vLLM tells of chunks with a window or a state by their hash alone; here they are described too.
    """

    def __init__(self, announcer: Announcer, ready: ReadyEvents, *, describe: bool) -> None:
        self.announcer = announcer
        self._ready = ready
        self._describe = describe
        self._note: Callable[[Source], None] = announcer.capture
        self._dropped = 0
        """Descriptions that were said to have been dropped."""
        self.sink: Sink = lambda event: None
        """Is told what vLLM took, for metrics."""

    def record_store(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Key) -> None:
        """A chunk of this request is about to be stored."""
        if self._describe:
            self._note((req, group_config, chunk_idx, offload_key, STORED))

    def record_lookup(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Key) -> None:
        """A chunk of this request is in host memory, perhaps by another engine's doing."""
        wanted = self.announcer.wanted
        if wanted and offload_key in wanted:
            self._note((req, group_config, chunk_idx, offload_key, FOUND))

    def record_partial_store(
        self, req: Any, group_config: Any, boundary_tokens: int, offload_key: Key
    ) -> None:
        """A state that ends within a block is about to be stored."""
        if self._describe:
            self._note((req, group_config, boundary_tokens, offload_key, STORED_PART))

    def record_partial_lookup(
        self, req: Any, group_config: Any, boundary_tokens: int, offload_key: Key
    ) -> None:
        """A state that ends within a block is in host memory."""
        if offload_key in self.announcer.wanted:
            self._note((req, group_config, boundary_tokens, offload_key, FOUND_PART))

    def take_events(self, events: Iterable[Any]) -> Iterable[KVCacheEvent]:
        """What there is to say by now; ``events``, of the manager, are none."""
        self.announcer.send_captured()
        if not self._ready:
            return events
        was_full = not self._ready.room()
        taken, kinds = self._ready.take()
        if was_full:
            self.announcer.wake()
        self._count(kinds)
        return [*events, *taken]

    def _count(self, kinds: Mapping[tuple[str, str], int]) -> None:
        for (name, medium), count in kinds.items():
            self.sink(EventsTold(name, medium, count))
        dropped, self._dropped = self._dropped, self.announcer.notes.dropped
        if self._dropped > dropped:
            self.sink(DescriptionsDropped(self._dropped - dropped))

    def reset(self) -> None:
        """Host memory was reset; the manager has told of that."""

    @property
    def queued(self) -> int:
        """About how many chunks there is news of that vLLM has not taken."""
        return self.announcer.notes.queued + self._ready.chunks

    @property
    def pending(self) -> bool:
        """Whether the engine should go on stepping, so that events are taken."""
        return bool(self._ready) or self.announcer.pending

    def __repr__(self) -> str:
        return f"<TiersTracker {self.announcer!r} {self._ready!r}>"


def build_tracker(
    settings: KVTiersConfig,
    places: Mapping[str, Place],
    configs: Sequence[Any],
    namespace: str,
    algorithm: str,
) -> TiersTracker:
    """The tracker of an engine whose KV-cache groups vLLM has configured so.

    ``algorithm``: of block hashes. Descriptions are kept in a file without a name if the folder for
    them cannot be used.
    """
    describe = settings.self_describing_kv_events
    groups = {
        c.group_idx: Group(
            c.kv_event_group_spec.kv_cache_spec_kind,
            c.kv_event_group_spec.kv_cache_spec_sliding_window,
        )
        for c in configs
    }
    narrator = None
    if describe:
        folder = _folder(settings, places, namespace, algorithm)
        dialect = _dialect(configs, algorithm)
        narrator = _with_side(places, groups, folder, f"{namespace} {dialect}", settings)
    narrator = narrator or Narrator(places, groups, None)
    ready = ReadyEvents()
    return TiersTracker(Announcer(narrator, ready, materialize, values=5), ready, describe=describe)


def _with_side(
    places: Mapping[str, Place],
    groups: Mapping[int, Group],
    folder: str | None,
    dialect: str,
    settings: KVTiersConfig,
) -> Narrator | None:
    max_bytes = settings.kv_event_descriptions_bytes
    for where in dict.fromkeys((folder, None)):
        try:
            return Narrator(places, groups, SideFile(where, dialect, max_bytes))
        except OSError as e:
            logger.warning(
                "what describes KV cache cannot be kept in %s (%s)%s",
                where or "a temporary file",
                e,
                ": it will not outlive this process" if where else ": events tell hashes only",
            )
    return None


def _folder(
    settings: KVTiersConfig, places: Mapping[str, Place], namespace: str, algorithm: str
) -> str | None:
    """Where descriptions outlive the engine: as asked for, or beside the first ``fs`` tier.

    Nowhere if each engine gives blocks other hashes: vLLM draws a seed for xxhash if it has none.
    """
    if algorithm.startswith("xx") and _hash_seed() is None:
        return None
    if settings.kv_event_descriptions_directory is not None:
        return os.path.join(settings.kv_event_descriptions_directory, namespace)
    for position, spec in enumerate(settings.secondary_tiers, start=1):
        if spec.type == "fs" and f"{position}:fs" in places:
            return os.path.join(path_of(spec.options["root_dir"]), ".kv-events", namespace)
    outlive = [label for label, place in places.items() if place.medium == "STORAGE"]
    if outlive:
        logger.warning(
            "after a restart KV events of what is in %s tell hashes only, until it is asked for:"
            " name a folder in kv_event_descriptions_directory",
            ", ".join(outlive),
        )
    return None


def _dialect(configs: Sequence[Any], algorithm: str) -> str:
    """How blocks are cut and named: descriptions of another dialect say nothing here."""
    cut = [
        (c.group_idx, c.tokens_per_block, c.tokens_per_chunk, c.hashes_per_chunk) for c in configs
    ]
    return f"{algorithm} {_hash_seed()} {cut}"


def _hash_seed() -> str | None:
    return os.environ.get("PYTHONHASHSEED")
