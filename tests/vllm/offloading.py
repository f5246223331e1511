"""What the engine tests share: the configuration a user writes, and a look behind it."""

import os
from pathlib import Path
from typing import Any

from kvtiers.tiers.urls import open_place

CHUNK_BYTES = {"llama": 512 * 1024}
"""Bytes of a chunk of one block (128 tokens)."""
PEER_LOOKUP_S = 40.0


def offload(cpu_bytes: float = 64e6, **extra: Any) -> dict[str, Any]:
    """The ``kv_transfer_config`` of the README."""
    return {
        "kv_connector": "KVTiersConnector",
        "kv_connector_module_path": "kvtiers.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": int(cpu_bytes), **extra},
    }


def disk(root: Path, **options: Any) -> dict[str, Any]:
    """An entry of ``secondary_tiers``."""
    return {"type": "fs", "root_dir": str(root), "capacity_bytes": 10 << 30, **options}


def peering(port: int = 0, **options: Any) -> dict[str, Any]:
    """An entry of ``secondary_tiers``, patient for several engines on a machine that others load.

    It takes a ``lookup_deadline_s`` of ``PEER_LOOKUP_S`` beside it.
    """
    patient = {f"{what}_deadline_s": 30 for what in ("handshake", "lookup", "silence", "stall")}
    return {"type": "p2p", "port": port, **patient, **options}


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an in-process engine."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def connector_of(engine: Any) -> Any:
    return scheduler_of(engine).connector


def manager_of(engine: Any) -> Any:
    """Our manager: ``.core`` is the engine-neutral one, ``.inert`` must stay False."""
    return connector_of(engine).connector_scheduler.manager


def settle(engine: Any) -> None:
    """Step the engine until nothing is in flight; then everything must add up."""
    engine.steps(lambda: not connector_of(engine).has_pending_push_work())
    manager = manager_of(engine)
    assert not manager.inert
    manager.check()
    ours = getattr(connector_of(engine).connector_scheduler, "check", None)
    if ours is not None:  # None under vLLM's own connector
        ours()
    use = manager.core.use
    assert (use.filling, use.pinned, use.orphaned) == (0, 0, 0), f"not at rest: {manager!r}"


def chunks_in(root: Path) -> int:
    """How many chunks lie under ``root``, in whatever layout."""
    place = open_place(f"fs://{root}", lambda sentence: None)
    return sum(len(list(place.entries(found.id))) for found in place.namespaces())


def files_of(root: Path) -> list[Path]:
    """The chunks on disk."""
    return sorted(root.rglob("*.kvc"))


def shared_memory() -> list[str]:
    """Our files in shared memory."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("kvtiers-")]
