"""Of the chunks that are stored, only those that a request will read are brought up.

vLLM asks for chunks group by group: full attention from the left, then windows and states from the
right. What full attention has below host memory would be on its way up before a window turns out
to lack its tail; the prefix is shorter then, and the rest is read by nobody.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import LookupResult

from kvtiers.chunks import Key
from kvtiers.engines.vllm import offers
from kvtiers.engines.vllm.manager import VllmManager


class PlanningScheduler(OffloadingConnectorScheduler):
    """vLLM's offloading scheduler, which knows how much can be loaded before anything moves."""

    config: Any
    manager: VllmManager
    _events_tracker: Any

    def _lookup_complete_chunks(
        self, req_status: Any, max_num_new_tokens: int | None = None
    ) -> int | None:
        """How many tokens can be loaded; None: not known yet.

        Upstream's answer, if all came up that it takes. What cannot come (for want of room, say)
        is left out in a second plan, which takes only what is in host memory or on its way there.
        """
        upstream = super()._lookup_complete_chunks
        groups = self.config.kv_group_configs
        if self.manager.inert or (len(groups) == 1 and not offers.has_window(groups[0])):
            return upstream(req_status, max_num_new_tokens)
        for coming in (False, True):
            found, below = self._plan(lambda: upstream(req_status, max_num_new_tokens), coming)
            if not found:
                return found
            verdicts = self._fenced_bring_up(req_status, found, below)
            if LookupResult.MISS not in verdicts:
                return found if verdicts <= {LookupResult.HIT} else None
        return 0

    def _plan(self, ask: Callable[[], int | None], coming: bool) -> tuple[int | None, set[Key]]:
        """VLLM's answer, and what of it is below. No event tells of it: it may stay there."""
        tracker, self._events_tracker = self._events_tracker, _NoRecord()
        try:
            with self.manager.planning(coming=coming) as below:
                return ask(), below
        finally:
            self._events_tracker = tracker

    def _fenced_bring_up(
        self, status: Any, tokens: int, below: Collection[Key]
    ) -> set[LookupResult]:
        try:
            return self._bring_up(status, tokens, below)
        except Exception:  # the fence: a bug of ours must not end the engine
            self.manager.become_inert("_bring_up")
            return {LookupResult.MISS}

    def _bring_up(self, status: Any, tokens: int, below: Collection[Key]) -> set[LookupResult]:
        """The verdicts on those chunks ``below`` that the next ``tokens`` tokens take."""
        verdicts = set()
        for config, index, key in self._chunks_read(status, tokens):
            verdict = LookupResult.HIT
            if key in below:
                verdict = self.manager.lookup(key, status.req_context)
                verdicts.add(verdict)
            if verdict is LookupResult.HIT and not offers.has_window(config):
                self._events_tracker.record_lookup(status.req, config, index, key)
        return verdicts

    def _chunks_read(self, status: Any, tokens: int) -> Iterator[tuple[Any, int, Key]]:
        """The chunks that vLLM loads for the next ``tokens`` tokens: configuration of the group,
        index of the chunk, key. Of a group with a window or state, those at its end.
        """
        start = status.num_locally_computed_tokens
        end = start + tokens
        for config, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            first, stop = start // config.tokens_per_chunk, -(-end // config.tokens_per_chunk)
            window = config.load_window_size_in_chunks(end)
            if window is not None:
                first = max(first, stop - window)
            for index in range(first, min(stop, len(state.offload_keys))):
                yield config, index, state.offload_keys[index]


class _NoRecord:
    """Stands in for vLLM's tracker of KV events."""

    def record_lookup(self, *found: Any) -> None:
        """Nothing is said of a plan."""
