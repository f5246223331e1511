"""Read an engine's identity from vLLM's configuration, and the CPU backend's byte format.

What is read here is what :mod:`kvtiers.engines.vllm.namespace` turns into a namespace.
"""

import hashlib
import inspect
import os
import platform
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtiers.engines.vllm.checkpoint import config_digest, find_checkpoint, model_digest, plain
from kvtiers.engines.vllm.namespace import GroupSpan, Identity, ModelIdentity, build_namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.hashing import DEFAULT_SEED, OWN_ALGORITHM

__all__ = ["GroupSpan", "Identity", "build_namespace", "cpu_byte_format", "identity_from_vllm"]

_READS_THE_CHECKPOINT = {
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "pt",
    "npcache",
    "gguf",
    "bitsandbytes",
    "sharded_state",
    "runai_streamer",
    "runai_streamer_sharded",
}
_ROPE = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "max_position_embeddings",
)
_MEDIA = (
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
_DRAFTS_WITHOUT_KV = {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"}


def identity_from_vllm(
    vllm_config: Any,
    *,
    tokens_per_hash: int,
    digest: str | None = None,
    own_keys: bool = False,
    environ: Mapping[str, str] = os.environ,
    unique: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> Identity:
    """Read an engine's identity from its ``VllmConfig``.

    ``digest`` is the user's own name for the model, instead of a digest of its checkpoint; it does
    not name a draft model that comes from elsewhere. With ``own_keys`` chunks have names of our
    own, whatever the engine's hashes. Reads up to 16 MiB of the checkpoint. Raises
    KVTiersError ``UNSUPPORTED`` when the configuration lacks what is needed.
    """
    try:
        identity = _identity(vllm_config, tokens_per_hash, digest)
        if own_keys:
            return replace(identity, hash_algorithm=OWN_ALGORITHM, hash_seed=DEFAULT_SEED)
        algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        seed, warning = _hash_seed(algorithm, environ.get("PYTHONHASHSEED"), unique)
        warnings = (*identity.warnings, *([warning] if warning else ()))
        return replace(identity, hash_algorithm=algorithm, hash_seed=seed, warnings=warnings)
    except AttributeError as e:
        raise KVTiersError(
            "cannot tell which engines may share KV cache, because this vLLM's configuration has"
            f" changed ({e}); use a version of vLLM that kvtiers supports",
            kind=Kind.UNSUPPORTED,
            operation="identify",
        ) from e


def _identity(config: Any, tokens_per_hash: int, digest: str | None) -> Identity:
    """All but the engine's hashes."""
    cache = config.cache_config
    warnings: list[str] = []
    model = _model(config.model_config, config.load_config, digest, warnings)
    draft_method, draft = _draft(config, digest, warnings)
    return Identity(
        model=model,
        draft=draft,
        draft_method=draft_method,
        kv_dtype=model.dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        kv_settings=_kv_settings(config),
        lora_dtype=_lora_dtype(config.lora_config, model.dtype),
        tokens_per_hash=tokens_per_hash,
        topology=_topology(config.parallel_config),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _model(model: Any, load: Any, digest: str | None, warnings: list[str]) -> ModelIdentity:
    weights = None
    if digest is None:
        digest, weights = _checkpoint(model, load, warnings)
    text = model.hf_text_config
    return ModelIdentity(
        digest=digest,
        weights=weights,
        overrides=_overrides(model),
        rope=_given(text, _ROPE),
        context=_context(text, model.max_model_len),
        quantization=_quantization(model),
        dtype=plain(model.dtype),
        media=_given(model.multimodal_config, _MEDIA),
        sliding_window_disabled=bool(model.disable_sliding_window),
    )


def _checkpoint(model: Any, load: Any, warnings: list[str]) -> tuple[str, str | None]:
    """Digest of the model, and why its weights are not part of it (``None``: they are)."""
    load_format = str(load.load_format)
    if load_format == "dummy":
        return config_digest(model.hf_config.to_dict()), "dummy"
    source = getattr(model, "model_weights", "") or model.model
    try:
        if load_format not in _READS_THE_CHECKPOINT:
            raise _unread(f"load_format {load_format!r} takes them from elsewhere")
        found = find_checkpoint(source, model.revision, load.download_dir)
        if found is None:
            raise _unread("they are not on this machine")
        digest = model_digest(found, load_format)
        if found.is_file():  # a file of weights, whose config comes from elsewhere
            digest = config_digest({"file": digest, "config": model.hf_config.to_dict()})
        return digest, None
    except KVTiersError as e:
        warnings.append(
            f"the weights of {source!r} cannot be told from others ({e}), so its KV cache is kept"
            " apart by the model's name and revision only; set model_digest in"
            " kv_connector_extra_config to a name that changes with the weights"
        )
        return (
            config_digest(model.hf_config.to_dict()),
            f"unverified:{source}:{model.revision}",
        )


def _unread(why: str) -> KVTiersError:
    return KVTiersError(why, kind=Kind.VANISHED, operation="digest")


def _draft(
    config: Any, digest: str | None, warnings: list[str]
) -> tuple[str | None, ModelIdentity | None]:
    speculative = config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return None, None
    draft = speculative.draft_model_config
    if draft is None:
        return speculative.method, None
    load = getattr(speculative, "draft_load_config", None) or config.load_config
    # Multi-token prediction layers come with the model itself.
    own = digest if draft.model == config.model_config.model else None
    return speculative.method, _model(draft, load, own, warnings)


def _overrides(model: Any) -> dict[str, Any]:
    asked = model.hf_overrides
    result = _given(model, ("model_class_overrides", "code_revision"))
    if callable(asked) or getattr(model, "hf_config_path", None):
        # Code, or a config from elsewhere: what came of it is all that can be named.
        return {**result, "effective_config": config_digest(model.hf_config.to_dict())}
    return {**result, "config": plain(asked)} if asked else result


def _given(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Those of ``names`` that ``config`` has and that ask for something.

    So a setting that is new in a version of vLLM leaves namespaces as they were until it is used.
    """
    values = {name: getattr(config, name, None) for name in names}
    return {
        name: plain(v)
        for name, v in values.items()
        if v is not None and v is not False and v not in ("auto", "", {}, [])
    }


def _context(text: Any, max_model_len: int) -> dict[str, bool]:
    """Phi-3's LongRoPE and Llama 4's temperature tuning switch on the engine's longest context."""
    result = {}
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        result["long_rope"] = original is not None and max_model_len > original
    if str(getattr(text, "model_type", "")).startswith("llama4"):
        result["attention_temperature"] = max_model_len > 32_768
    return result


def _quantization(model: Any) -> dict[str, Any]:
    hf = model.hf_config
    of_checkpoint = getattr(hf, "quantization_config", None) or getattr(
        hf, "compression_config", None
    )
    return {
        "method": model.quantization,
        "checkpoint": plain(of_checkpoint),
        "engine": plain(getattr(model, "quantization_config", None)),
    }


def _kv_settings(config: Any) -> dict[str, Any]:
    cache = config.cache_config
    result = _given(
        cache,
        (
            "calculate_kv_scales",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "kv_cache_dtype_skip_layers",
            "sliding_window",
        ),
    )
    if str(cache.cache_dtype).startswith("fp8"):
        result["fp8_format"] = _fp8_format()  # some ROCm devices have one of their own
    draft_dtype = getattr(config.speculative_config, "kv_cache_dtype", None)
    if draft_dtype is not None:
        result["draft_kv_dtype"] = str(draft_dtype)
    return result


def _fp8_format() -> str:
    from vllm.platforms import current_platform

    return str(plain(current_platform.fp8_dtype()))


def _lora_dtype(lora: Any, model_dtype: str) -> str | None:
    if lora is None:
        return None
    dtype = str(plain(lora.lora_dtype))
    return None if dtype in ("auto", model_dtype) else dtype


def _hash_seed(
    algorithm: str, given: str | None, unique: Callable[[], str]
) -> tuple[str, str | None]:
    """What to call the seed, which the xxhash algorithms need secret, and a warning."""
    if given is not None:
        return f"sha256:{hashlib.sha256(given.encode()).hexdigest()[:16]}", None
    if not algorithm.startswith("xxhash"):
        return DEFAULT_SEED, None
    return f"random:{unique()}", (
        f"prefix-caching-hash-algo {algorithm} draws a new seed in every process, so chunks are"
        " shared neither with other engines nor with the next start; set PYTHONHASHSEED to a"
        " number, or use sha256"
    )


def _topology(parallel: Any) -> dict[str, int]:
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "cp_interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
        "world_size": parallel.world_size,
    }


def cpu_byte_format(
    dtype: Any, tokens_per_block: int, head_size: int, kv_cache_dtype: str = "auto"
) -> str:
    """The id of the bytes that vLLM's CPU backend keeps for a block of one layer.

    It stores K transposed or packed for an instruction set, per block: the bytes depend on the set,
    the block's span and the dtype (a ``torch.dtype`` or its name). Every set has an id of its own,
    also ``vec`` and ``vec16``, and every processor architecture. Raises KVTiersError
    ``UNSUPPORTED`` when vLLM no longer says which set it uses.
    """
    import torch

    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    isa = _attention_isa(dtype, tokens_per_block, head_size, kv_cache_dtype)
    stored = plain(dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
    return f"cpu-{platform.machine().lower()}-{isa}-bs{tokens_per_block}-hs{head_size}-{stored}"


def _attention_isa(dtype: Any, tokens_per_block: int, head_size: int, kv_cache_dtype: str) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        expected = ["dtype", "block_size", "head_size", "kv_cache_dtype"]
        if list(inspect.signature(_get_attn_isa).parameters) != expected:
            raise ImportError("its arguments are others")
    except ImportError as e:
        raise KVTiersError(
            "cannot tell how vLLM's CPU backend packs K, because _get_attn_isa in"
            f" vllm.v1.attention.backends.cpu_attn has changed ({e}); use a version of vLLM that"
            " kvtiers supports",
            kind=Kind.UNSUPPORTED,
            operation="identify",
        ) from e
    return str(_get_attn_isa(dtype, tokens_per_block, head_size, kv_cache_dtype))
