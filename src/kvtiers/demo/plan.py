"""How the server of each pass is configured: sizes from the model, JSON for vLLM. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 128
"""Tokens of a block: vLLM's default on the CPU."""
MAX_MODEL_LEN = 2688
"""Tokens a conversation may reach: 21 blocks."""
SMALL_DEVICE_BLOCKS = MAX_MODEL_LEN // BLOCK_TOKENS + 1
"""One conversation and the block that vLLM keeps for itself."""
LARGE_DEVICE_BLOCKS = 128
SMALL_HOST_CHUNKS = 24
"""One conversation with some room for the answer, never two."""
LARGE_HOST_CHUNKS = 96
MAX_THREADS = 8
"""More do not help a model of this size."""

SERVED_NAME = "SmolLM2-135M-Instruct"
_MODULE = "kvtiers.engines.vllm"


class Mode(Enum):
    """What stands behind the device cache in a pass."""

    REFERENCE = "reference"
    NONE = "none"
    HOST = "host"
    DISK = "disk"

    @property
    def title(self) -> str:
        """What a person reads in tables and pictures."""
        return {
            Mode.REFERENCE: "reference (large device cache)",
            Mode.NONE: "no offload",
            Mode.HOST: "host tier",
            Mode.DISK: "host + disk",
        }[self]


class Break(Enum):
    """A tier to spoil on purpose, to see that the demo notices."""

    HOST = "host"
    """The host tier has room for a single chunk."""
    DISK = "disk"
    """Bytes of every stored chunk are overwritten while the server is down."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Size of a model's KV cache."""

    layers: int
    kv_heads: int
    head_size: int
    element_bytes: int = 2

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk (one block), keys and values of all layers."""
        per_token = self.layers * self.kv_heads * self.head_size * 2 * self.element_bytes
        return per_token * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What a server is started with, its port aside."""

    device_blocks: int
    offload: Mapping[str, Any] | None = field(default=None)
    """vLLM's ``--kv-transfer-config``; None: no offload."""


def geometry_from_config(config: Mapping[str, Any]) -> ModelGeometry:
    """Read the geometry from the fields of a model's ``config.json``."""
    heads = int(config["num_attention_heads"])
    return ModelGeometry(
        layers=int(config["num_hidden_layers"]),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
    )


def read_geometry(model: Path) -> ModelGeometry:
    """Geometry of the checkpoint in the folder ``model``."""
    return geometry_from_config(json.loads((model / "config.json").read_text()))


def server_plan(
    mode: Mode, geometry: ModelGeometry, tier: Mapping[str, Any], broken: Break | None = None
) -> ServerPlan:
    """The plan of the pass ``mode``; ``tier`` stands behind host memory where one does."""
    if mode is Mode.REFERENCE:
        return ServerPlan(LARGE_DEVICE_BLOCKS)
    if mode is Mode.NONE:
        return ServerPlan(SMALL_DEVICE_BLOCKS)
    if mode is Mode.HOST:
        chunks = 1 if broken is Break.HOST else LARGE_HOST_CHUNKS
        return ServerPlan(SMALL_DEVICE_BLOCKS, connector(chunks * geometry.chunk_bytes))
    host_bytes = SMALL_HOST_CHUNKS * geometry.chunk_bytes
    return ServerPlan(SMALL_DEVICE_BLOCKS, connector(host_bytes, tier))


def disk_tier(root: Path) -> dict[str, Any]:
    """The tier that the demo has of its own, in the folder ``root``."""
    return {"type": "fs", "root_dir": str(root), "capacity_fraction": 0.5}


def connector(host_bytes: int, tier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``--kv-transfer-config`` for a host tier, and for ``tier`` behind it."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes, "offload_prompt_only": False}
    if tier is not None:
        extra["secondary_tiers"] = [dict(tier)]
    return {
        "kv_connector": "KVTiersConnector",
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def server_arguments(plan: ServerPlan, model: Path, port: int) -> list[str]:
    """Arguments of vLLM's server module for ``plan``."""
    arguments = [
        *("--model", str(model)),
        *("--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--block-size", str(BLOCK_TOKENS)),
        *("--num-gpu-blocks-override", str(plan.device_blocks)),
        *("--shutdown-timeout", "30"),
        "--enforce-eager",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
    ]
    if plan.offload is not None:
        arguments += ["--kv-transfer-config", json.dumps(plan.offload)]
    return arguments


def server_environment(inherited: Mapping[str, str], cpus: int) -> dict[str, str]:
    """Environment of the server: nothing is fetched or reported, and no compiler is needed.

    Left alone, vLLM takes another number of threads when a connector is configured, which changes
    both the speed and the rounding; one of ``cpus`` stays free for the server and the copies.
    """
    return {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, min(cpus - 1, MAX_THREADS))),
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "no_proxy": "127.0.0.1",
    }
