"""What a checkpoint is called: a digest of its config and weights, never of its path.

Weights are not read in full. Of each file the size, a safetensors file's header, and 4 KiB samples
count: one in the middle of every tensor (of evenly chosen tensors where there are too many), and
evenly spread ones. A change that misses every sample - an edit of a few numbers that keeps names,
shapes and sizes - goes unseen; give ``model_digest`` in the configuration to be sure.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from kvtiers.errors import Kind, KVTiersError, map_errors

SAMPLE_BYTES = 4096
SAMPLES = 4096
"""Of a checkpoint; at most 16 MiB are read, whatever its size."""

_SAMPLES_PER_FILE = 16
_LARGEST_HEADER = 100_000_000  # the safetensors format's own limit
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_WEIGHTS_BY_FORMAT = {"pt": (".pt",), "npcache": (".bin", ".pt"), "gguf": (".gguf",)}
_LEFT_BY_TRAINING = {
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
}
_CONFIGS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
)
_SAYS_NOTHING = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
# The model's dtype is a setting of the engine and named apart from the checkpoint.
_SAYS_DTYPE = {"torch_dtype", "dtype"}


def find_checkpoint(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """The folder or file of ``model``: itself, or its snapshot in the local Hugging Face cache.

    Never goes online. ``None`` when there is no such thing on this machine.
    """
    if os.path.exists(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    for cache in dict.fromkeys((cache_dir, None)):
        try:
            return Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
        except (OSError, ValueError):  # absent, or not the form of a repository's name
            continue
    return None


def model_digest(checkpoint: Path, load_format: str = "auto") -> str:
    """Digest (64 hex digits) of a checkpoint's configs and weights.

    ``load_format`` is vLLM's: it decides which weights are loaded when there are several kinds.
    Names of weight files do not count, nor does their order. Raises KVTiersError: ``VANISHED``
    when there are no weights, else when something cannot be read.
    """
    with map_errors("digest", str(checkpoint)):
        weights = _weight_files(checkpoint, load_format)
        if not weights:
            raise KVTiersError(
                f"{checkpoint} holds no weights ({', '.join('*' + s for s in _WEIGHTS)})",
                kind=Kind.VANISHED,
                operation="digest",
            )
        samples = max(_SAMPLES_PER_FILE, SAMPLES // len(weights))
        parts = [f"weights {_file_digest(path, samples)}" for path in weights]
        if checkpoint.is_dir():
            parts += _config_parts(checkpoint, weights[0].suffix)
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest (64 hex digits) of a model's config without what does not change bytes."""
    canonical = json.dumps(_meaning(plain(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def plain(value: Any) -> Any:
    """``value`` in terms of JSON: mappings, lists, strings, finite numbers, booleans, null."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if callable(getattr(value, "to_dict", None)):
        return plain(value.to_dict())
    return str(value).removeprefix("torch.")


def _meaning(config: Any, in_model: bool = True) -> Any:
    """Without keys that do not change bytes; ``in_model``: ``dtype`` here is the model's."""
    if isinstance(config, list):
        return [_meaning(v, False) for v in config]
    if not isinstance(config, dict):
        return config
    dropped = _SAYS_NOTHING | (_SAYS_DTYPE if in_model else set())
    return {
        key: _meaning(v, in_model and key.endswith("_config") and key != "quantization_config")
        for key, v in config.items()
        if key not in dropped
    }


def _weight_files(checkpoint: Path, load_format: str) -> list[Path]:
    if checkpoint.is_file():
        return [checkpoint]
    for suffix in _WEIGHTS_BY_FORMAT.get(load_format, _WEIGHTS):
        found = sorted(p for p in checkpoint.glob(f"*{suffix}") if p.name not in _LEFT_BY_TRAINING)
        if found:
            return found
    return []


def _config_parts(checkpoint: Path, suffix: str) -> list[str]:
    names = [name for name in _CONFIGS if (checkpoint / name).is_file()]
    parts = [f"{name} {config_digest(_json(checkpoint / name))}" for name in names]
    indexes = sorted(checkpoint.glob(f"*{suffix}.index.json"))
    parts += [f"index {config_digest(_json(path))}" for path in indexes]
    if "config.json" in names and "auto_map" in _json(checkpoint / "config.json"):
        # The model's own code is part of what computes the bytes.
        parts += [
            f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            for path in sorted(checkpoint.glob("*.py"))
        ]
    return parts


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as e:
        raise KVTiersError(
            f"{path} is not valid JSON ({e})", kind=Kind.CORRUPT, operation="digest"
        ) from e
    return value if isinstance(value, dict) else {"": value}


def _file_digest(path: Path, samples: int) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        header = _header(fd, size) if path.suffix == ".safetensors" else b""
        digest = hashlib.sha256(size.to_bytes(8, "little") + header)
        offsets = _sample_offsets(size, _tensor_middles(header), samples)
        _announce(fd, offsets)
        for offset in offsets:
            digest.update(offset.to_bytes(8, "little"))
            digest.update(os.pread(fd, SAMPLE_BYTES, offset))
    finally:
        os.close(fd)
    return digest.hexdigest()


def _header(fd: int, size: int) -> bytes:
    """A safetensors file's header: its length (u64, little-endian), then JSON; empty if damaged."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(size - 8, _LARGEST_HEADER):
        return b""
    return os.pread(fd, 8 + length, 0)


def _tensor_middles(header: bytes) -> list[int]:
    """File offsets of the middle of each tensor, in order; empty for what is no header."""
    try:
        tensors = json.loads(header[8:]).items() if header else ()
        spans = [t["data_offsets"] for name, t in tensors if name != "__metadata__"]
        return sorted(len(header) + (begin + end) // 2 for begin, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _sample_offsets(size: int, middles: Sequence[int], samples: int) -> list[int]:
    """Page-aligned offsets: half of ``samples`` from ``middles``, half spread over the file."""
    half = samples // 2
    chosen = middles if len(middles) <= half else [middles[i] for i in _spread(len(middles), half)]
    points = [*chosen, *(_spread(size, half) if size else ())]
    return sorted({p // SAMPLE_BYTES * SAMPLE_BYTES for p in points if 0 <= p < size})


def _spread(length: int, count: int) -> Iterable[int]:
    """``count`` indexes below ``length``, evenly spread, first and last among them."""
    return (i * (length - 1) // (count - 1) for i in range(count))


def _announce(fd: int, offsets: Sequence[int]) -> None:
    """Let the system read the samples at once, and no more than them, where it can be told."""
    if not hasattr(os, "posix_fadvise"):
        return
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for offset in offsets:
        os.posix_fadvise(fd, offset, SAMPLE_BYTES, os.POSIX_FADV_WILLNEED)
