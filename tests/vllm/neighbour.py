"""Another connector beside ours under vLLM's MultiConnector: it serves what a request names.

A request that carries ``kv_transfer_params={"neighbour": how, "neighbour_tokens": n}`` is given its
first ``n`` tokens by this connector, whose bytes are ``HALF`` while they load and ``WHOLE`` after:

- ``slow``: between steps, ready ``STEPS`` steps later, as connectors over a network do;
- ``failing``: within the step, as vLLM's ExampleConnector does; then it says that it failed.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

HALF, WHOLE = 5.0, 0.25
STEPS = 3
ENTRY = {
    "kv_connector": "Neighbour",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}
"""Its place among the ``connectors`` of a MultiConnector."""


@dataclass
class Loads(KVConnectorMetadata):
    """What the workers begin in this step."""

    slow: dict[str, list[int]] = field(default_factory=dict)
    failing: list[int] = field(default_factory=list)


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """Both sides; see the module."""

    on_write: Any = staticmethod(lambda: None)
    """Called when bytes of a load have been written."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: list[torch.Tensor] = []
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._next = Loads()
        self._loading: dict[str, tuple[list[int], int]] = {}
        self._failed: set[int] = set()

    # -- scheduler -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        params = request.kv_transfer_params or {}
        more = max(0, params.get("neighbour_tokens", 0) - num_computed_tokens)
        if request.num_preemptions or not more:
            return 0, False
        return more, params["neighbour"] == "slow"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            params = request.kv_transfer_params
            end = params["neighbour_tokens"] // self._block_size
            ids = blocks.get_block_ids()[0][end - num_external_tokens // self._block_size : end]
            if params["neighbour"] == "slow":
                self._next.slow[request.request_id] = ids
            else:
                self._next.failing += ids

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta, self._next = self._next, Loads()
        return meta

    def has_pending_push_work(self) -> bool:
        return False

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    # -- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta: Any = self._get_connector_metadata()
        for request, ids in meta.slow.items():
            self._write(ids, HALF)
            self._loading[request] = ids, STEPS
        if meta.failing:
            self._write(meta.failing, HALF)
            self._failed.update(meta.failing)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for request, (ids, steps) in list(self._loading.items()):
            self._loading[request] = ids, steps - 1
            if steps == 1:
                self._write(ids, WHOLE)
                del self._loading[request]
                results.finished_recving.add(request)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _write(self, ids: list[int], value: float) -> None:
        for cache in self._caches:
            cache[ids] = value
        type(self).on_write()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
