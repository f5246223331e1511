"""Names for chunks that do not depend on how an engine cuts and hashes its blocks.

The chain is vLLM's (``H((parent, tokens, extra keys))``) with chunks in place of blocks and one
algorithm and seed for all engines: :mod:`kvtiers.hashing` computes the same names for tools. Where
groups have chunks of unequal spans, a link of the chain is their greatest common divisor.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_offload.base import make_offload_key

from kvtiers.hashing import OWN_ALGORITHM, hasher, next_hash, none_hash


def tokens_per_link(tokens_per_chunk: Iterable[int]) -> int:
    """How many tokens a hash of the chain covers, from what the chunks of the groups span."""
    return math.gcd(*tokens_per_chunk)


@dataclass(slots=True)
class OwnKeyedState(RequestOffloadState):
    """vLLM's books of one request, with names of our own for its chunks."""

    tokens_per_link: int = field(kw_only=True)
    on_fault: Callable[[str], None] = field(kw_only=True)
    """Told where a fault of ours was met; vLLM's names serve from then on."""
    chain: list[bytes] = field(default_factory=list, init=False)
    """Hashes of the prefixes that end after each ``tokens_per_link`` tokens."""

    def update_offload_keys(self) -> None:
        """Name the chunks that the request has the tokens of by now."""
        try:
            self._extend_chain()
            self._name_chunks()
        except Exception:  # the fence: a bug of ours must not end the engine
            self.on_fault("update_offload_keys")
            RequestOffloadState.update_offload_keys(self)

    def _extend_chain(self) -> None:
        request, span = self.req, self.tokens_per_link
        for start in range(len(self.chain) * span, request.num_tokens - span + 1, span):
            extra, _ = generate_block_hash_extra_keys(request, start, start + span, 0)
            parent = self.chain[-1] if self.chain else _FIRST_PARENT
            tokens = request.all_token_ids[start : start + span]
            self.chain.append(next_hash(_HASH, parent, tokens, extra))

    def _name_chunks(self) -> None:
        for config, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            links = config.tokens_per_chunk // self.tokens_per_link
            for index in range(len(state.offload_keys), len(self.chain) // links):
                key = make_offload_key(self.chain[(index + 1) * links - 1], config.group_idx)
                state.offload_keys.append(key)
                end = (index + 1) * config.tokens_per_chunk
                self.req_context.set_offload_key_position(key, end)


_HASH = hasher(OWN_ALGORITHM)
_FIRST_PARENT = none_hash(OWN_ALGORITHM)
