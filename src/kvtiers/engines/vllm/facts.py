"""What only the connector knows of an engine, and the spec needs: gathered once, passed along."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtiers.chunks import Namespace
from kvtiers.engines.vllm.identity import cpu_byte_format, identity_from_vllm
from kvtiers.engines.vllm.namespace import FORMAT_VERSION, GroupSpan, Identity
from kvtiers.engines.vllm.ownkeys import tokens_per_link
from kvtiers.hashing import seed_id

_MODEL_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV-cache group that is offloaded."""

    span: GroupSpan
    keeps_every_chunk: bool
    spec: KVCacheSpec = field(repr=False)
    layer_specs: tuple[KVCacheSpec, ...] = field(default=(), repr=False)
    """One for each layer of the span, in their order."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine, seen by its connector."""

    instance: str
    """Tells apart two engines that were given the same engine id."""
    device: str
    """vLLM's name of the platform: ``cpu``, ``cuda``, ``rocm``, ``xpu``, ..."""
    kv_cache_layout: str
    kv_cache_dtype: str
    model_dtype: Any
    groups: tuple[GroupFacts, ...]
    identify: Callable[[str | None, bool], Identity] = field(repr=False)
    """Reads the engine's identity, the checkpoint included; takes the user's model digest, and
    whether chunks have names of our own."""
    packing: str = "unknown"
    """How K and V lie in a page: see :func:`packing_of`."""
    tensors: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The device tensor of each layer, in workers."""
    total_kv_heads: int = 0
    """Of all ranks."""
    conv_dim_first: bool | None = None
    """Whether channels are outermost in the state of a convolution; None: unknown."""
    state_groups: int | None = None
    """Groups of heads that share B and C in Mamba2, by the model's config; None: unknown."""

    def with_tensors(self, kv_caches: Mapping[str, Any]) -> "EngineFacts":
        """The same, with what the device tensors tell."""
        return replace(self, packing=packing_of(kv_caches), tensors=kv_caches)

    def byte_formats(self) -> list[str]:
        """The id of the bytes of each group's pages."""
        return [self._byte_format(g.spec) for g in self.groups]

    def _byte_format(self, spec: KVCacheSpec) -> str:
        if self.device == "cpu" and isinstance(spec, AttentionSpec):
            return cpu_byte_format(
                self.model_dtype, spec.block_size, spec.head_size, self.kv_cache_dtype
            )
        if self.device == "cpu":
            return f"cpu-{type(spec).__name__}"
        packed = f"{self.kv_cache_layout.lower()}-{self.packing}"
        # Kernels elsewhere keep other bytes in pages of equal shape: ROCm's those of indexers.
        return packed if self.device == "cuda" else f"{self.device}-{packed}"


def formats_without_facts(config: OffloadingConfig, device: str) -> list[str]:
    """The id of the bytes of each group's pages, under vLLM's own connector.

    It does not say how large a head is, which the model's name stands for; nor what the model's
    dtype is where KV has one of its own: then the packing for either kind of model is named.
    """
    if device != "cpu":
        return [f"{str(config.kv_cache_layout).lower()}-unknown"] * len(config.groups)
    stored = config.model.dtype
    own = stored not in _MODEL_DTYPES
    return [
        "+".join(
            cpu_byte_format(dtype, group.tokens_per_block, 0, stored if own else "auto")
            for dtype in (_MODEL_DTYPES if own else (stored,))
        )
        for group in config.groups
    ]


def namespace_without_facts(
    config: OffloadingConfig,
    named_bytes: Mapping[str, Any],
    *,
    model_digest: str | None,
    hash_seed: str | None,
) -> Namespace:
    """The namespace under vLLM's own connector, always bound to the exact topology.

    The model goes by ``model_digest``, or by its name: that will do for what ends with the engine.
    ``hash_seed`` is PYTHONHASHSEED. The hash algorithm is not known; other ones give other keys.
    """
    parallel = config.parallel
    return Namespace(
        {
            "format": FORMAT_VERSION,
            "model": model_digest or f"name:{config.model.name}",
            "kv_dtype": config.model.dtype,
            "tokens_per_hash": config.cache.tokens_per_hash,
            "hash_seed": seed_id(hash_seed),
            "topology": [
                parallel.world_size,
                parallel.tp_size,
                parallel.pp_size,
                parallel.pcp_size,
                parallel.dcp_size,
            ],
            "groups": [[g.group_id, g.tokens_per_block, len(g.layer_names)] for g in config.groups],
            "bytes": dict(named_bytes),
        }
    )


def packing_of(kv_caches: Mapping[str, Any]) -> str:
    """``packed`` (K beside V per head), ``split`` (K before V per block), else the ranks seen."""
    kinds = set()
    for tensor in kv_caches.values():
        shape = tuple(getattr(tensor, "shape", ()))
        if len(shape) == 4:
            kinds.add("packed")
        elif len(shape) == 5 and shape[1] == 2:
            kinds.add("split")
        else:
            kinds.add(f"rank{len(shape)}")
    return "+".join(sorted(kinds)) or "none"


def gather(vllm_config: Any, kv_cache_config: Any, config: OffloadingConfig) -> EngineFacts:
    """Read the facts from vLLM's configuration."""
    from vllm.platforms import current_platform  # not before it is known which one it is

    cache = vllm_config.cache_config
    groups = tuple(
        _group_facts(group, kv_cache_config.kv_cache_groups[group.group_id], config)
        for group in config.groups
    )
    tokens_per_hash = config.cache.tokens_per_hash
    link = tokens_per_link(g.span.tokens_per_block * g.span.blocks_per_chunk for g in groups)
    model = vllm_config.model_config
    states = any(isinstance(spec, MambaSpec) for g in groups for spec in g.layer_specs)
    return EngineFacts(
        instance=str(vllm_config.instance_id),
        device=str(current_platform.device_name),
        kv_cache_layout=str(config.kv_cache_layout or "unknown"),
        kv_cache_dtype=str(cache.cache_dtype),
        model_dtype=model.dtype,
        groups=groups,
        total_kv_heads=model.get_total_num_kv_heads(),
        conv_dim_first=_conv_dim_first() if states else None,
        state_groups=_state_groups(model.hf_text_config) if states else None,
        identify=lambda digest, own_keys: identity_from_vllm(
            vllm_config,
            tokens_per_hash=link if own_keys else tokens_per_hash,
            digest=digest,
            own_keys=own_keys,
        ),
    )


def _group_facts(group: Any, cache_group: Any, config: OffloadingConfig) -> GroupFacts:
    spec = _representative(cache_group.kv_cache_spec)
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    full = isinstance(spec, FullAttentionSpec) and not window
    return GroupFacts(
        span=GroupSpan(
            group=group.group_id,
            kind=type(spec).__name__,
            tokens_per_block=group.tokens_per_block,
            blocks_per_chunk=config.cache.blocks_per_chunk,
            window_tokens=window,
            layers=tuple(group.layer_names),
        ),
        keeps_every_chunk=full,
        spec=spec,
        layer_specs=_layer_specs(cache_group),
    )


def _layer_specs(cache_group: Any) -> tuple[KVCacheSpec, ...]:
    spec = cache_group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return (spec,) * len(cache_group.layer_names)
    return tuple(spec.kv_cache_specs[name] for name in cache_group.layer_names)


def _conv_dim_first() -> bool:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def _state_groups(text_config: Any) -> int | None:
    told = {getattr(text_config, n, None) for n in ("n_groups", "mamba_n_groups", "mamba_ngroups")}
    told.discard(None)
    return told.pop() if len(told) == 1 else None


def _representative(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs: Sequence[KVCacheSpec] = tuple(spec.kv_cache_specs.values())
        return specs[0]
    return spec
