"""Inside vLLM: the connector and the spec that ``--kv-transfer-config`` names."""

from kvtiers.engines.vllm.connector import KVTiersConnector
from kvtiers.engines.vllm.spec import KVTiersSpec

__all__ = ["KVTiersConnector", "KVTiersSpec"]
