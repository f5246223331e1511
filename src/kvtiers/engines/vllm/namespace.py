"""Everything that makes an engine's bytes different, and the namespace that it adds up to.

Two engines whose identities differ in any field get different namespace ids and never meet.

The LoRA adapter of a request is part of its block hashes, by name and path (vLLM's choice). That is
the limit: an adapter replaced in place, under the same name and path, finds its predecessor's
chunks. So does a model whose weights are updated while the engine runs. A reset empties host memory
only: secondary tiers keep the old chunks under the same name, so restart the engine instead, on a
checkpoint that holds the new weights or with another ``model_digest``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvtiers.chunks import Namespace
from kvtiers.engines.vllm.checkpoint import plain
from kvtiers.hashing import DEFAULT_SEED

FORMAT_VERSION = 1
"""Part of every namespace. It grows when the same fields come to mean other bytes; a release that
raises it to N still reads the namespaces of N-1, or its changelog says how to migrate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """One model: its checkpoint, and what the engine's settings make of it. JSON values only."""

    digest: str
    """Of config and weights; of the config alone when ``weights`` is set; or the user's own."""
    weights: str | None = None
    """Why the weights are not in ``digest``: ``unverified:<model>:<revision>`` or ``dummy``."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the checkpoint's config and code asked of the engine."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Effective settings of the rotary embedding."""
    context: Mapping[str, bool] = field(default_factory=dict)
    """Switches that model code derives from ``max_model_len``."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """Method and settings, of checkpoint and engine."""
    dtype: str = ""
    media: Mapping[str, Any] = field(default_factory=dict)
    """How images, sound and video become tokens and embeddings."""
    sliding_window_disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything about an engine that makes bytes or keys different. JSON values only."""

    model: ModelIdentity
    draft: ModelIdentity | None = None
    """The draft model, where its KV is part of the cache."""
    draft_method: str | None = None
    kv_dtype: str = ""
    kv_settings: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else decides how KV is stored: scales, skipped layers, state dtypes, windows."""
    lora_dtype: str | None = None
    """Where adapters compute in another dtype than the model."""
    hash_algorithm: str = "sha256"
    hash_seed: str = DEFAULT_SEED
    """The default, ``sha256:`` and part of the seed's digest, or ``random:`` and a unique id."""
    tokens_per_hash: int = 0
    topology: Mapping[str, int] = field(default_factory=dict)
    """How workers divide the model; counts only for bytes that are not portable."""
    warnings: tuple[str, ...] = ()
    """For the log, one sentence each; no part of the namespace."""


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """What a KV-cache group's chunks span."""

    group: int
    kind: str
    """vLLM's name, such as ``full_attention`` or ``sliding_window``."""
    tokens_per_block: int
    blocks_per_chunk: int
    window_tokens: int | None = None
    layers: tuple[str, ...] = ()

    def as_one_block(self) -> "GroupSpan":
        """The span of an engine whose block is the chunk."""
        tokens = self.tokens_per_block * self.blocks_per_chunk
        return replace(self, tokens_per_block=tokens, blocks_per_chunk=1)


def build_namespace(
    identity: Identity,
    groups: Sequence[GroupSpan],
    certificate: Mapping[str, Any],
    *,
    portable: bool,
) -> Namespace:
    """The namespace of an engine's chunks.

    ``certificate`` says what geometry vouches for: byte order, packing, sizes (JSON values).
    ``portable`` is false when those bytes hold only under this engine's exact topology, which then
    becomes part of the namespace.
    """
    known = {k: v for k, v in asdict(identity).items() if k not in ("topology", "warnings")}
    fields = {
        **known,
        "format": FORMAT_VERSION,
        "groups": [asdict(g) for g in sorted(groups, key=lambda g: g.group)],
        "bytes": dict(certificate),
        "topology": None if portable else dict(identity.topology),
    }
    return Namespace(plain(fields))
