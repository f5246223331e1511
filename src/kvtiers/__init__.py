"""Tiered KV-cache offloading: accelerator -> host memory -> storage, and back.

Inside vLLM nothing of this package is called by name: ``--kv-transfer-config`` names
``kvtiers.engines.vllm``. As a library, :func:`kvtiers.wiring.wire` builds a manager.
"""

from kvtiers.chunks import ChunkLayout, GroupLayout, Key, Lookup, Namespace, make_key
from kvtiers.config import KVTiersConfig, parse_config
from kvtiers.errors import ConfigError, Kind, KVTiersError, Retry

__version__ = "0.1.0"

__all__ = [
    "ChunkLayout",
    "ConfigError",
    "GroupLayout",
    "KVTiersConfig",
    "KVTiersError",
    "Key",
    "Kind",
    "Lookup",
    "Namespace",
    "Retry",
    "make_key",
    "parse_config",
]
