"""What an engine is refused at its start, because wrong bytes could come of it later."""

from kvtiers.config import WHERE, KVTiersConfig
from kvtiers.errors import ConfigError

_ENDS_WITH_THE_ENGINE = ("memory",)
"""Built-in tiers of which nothing is left when the engine ends."""


def refuse_pipelines(number: int, where: str) -> None:
    """Raise ConfigError for pipeline parallelism where it is not supported."""
    if number > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {number}, but under {where} kvtiers supports 1 only; "
            "use tensor_parallel_size instead",
            key="pipeline_parallel_size",
        )


def refuse_without_asserts(asserts: bool = __debug__) -> None:
    """Raise ConfigError where vLLM's own connector would take a failed copy for a good one."""
    if not asserts:
        raise ConfigError(
            "python -O (or PYTHONOPTIMIZE) removes the assertions by which vLLM's own "
            "OffloadingConnector notices a failed copy; run without it, or use KVTiersConnector",
            key="PYTHONOPTIMIZE",
        )


def refuse_without_facts(settings: KVTiersConfig, device: str = "cpu") -> None:
    """Raise ConfigError for what vLLM's own connector does not tell enough about.

    It names the model by a path, and does not say how K and V lie in a page, which on a ``device``
    other than the CPU depends on the attention backend. That will do for tiers that end with the
    engine; in others, bytes of two engines could meet under one key.
    """
    if settings.chunk_keys == "own":
        raise ConfigError(
            f"chunk_keys in {WHERE} is own, but vLLM's own OffloadingConnector names the chunks; "
            "use KVTiersConnector, or leave chunk_keys out",
            key="chunk_keys",
        )
    for position, tier in enumerate(settings.secondary_tiers):
        if tier.module_path is None and tier.type == "p2p":
            raise ConfigError(
                f"secondary_tiers[{position}] in {WHERE} is p2p, but under vLLM's own "
                "OffloadingConnector a chunk that a peer's request pushed out of host memory would "
                "end the engine; use KVTiersConnector",
                key=f"secondary_tiers[{position}]",
            )
        if tier.module_path is None and tier.type in _ENDS_WITH_THE_ENGINE:
            continue
        where = f"secondary_tiers[{position}] in {WHERE} outlives the engine"
        if settings.model_digest is None:
            raise ConfigError(
                f"{where}, but vLLM's own OffloadingConnector gives the model's name only; use "
                "KVTiersConnector, or set model_digest to a name that changes with the model's "
                "weights, dtype, rope and quantization",
                key="model_digest",
            )
        if device != "cpu":
            raise ConfigError(
                f"{where}, but vLLM's own OffloadingConnector does not tell how KV lies in the "
                f"memory of this {device} device; use KVTiersConnector",
                key=f"secondary_tiers[{position}]",
            )
