"""The length of a block, which the engine process of a server forgets."""

from collections.abc import Callable
from typing import Any

from kvtiers.engines.vllm.logs import logger


def keeper_of(cache_config: Any) -> Callable[[], None]:
    """What sets ``cache_config.block_size`` (tokens) back to what it is now.

    vLLM 0.32 initialises its configuration anew when the scheduler of a server has been made
    (``EngineCoreProc._perform_handshakes``). On CPUs the block size becomes the default of the
    platform again, unless the user named one, while blocks keep the length that the model needs.
    By that number the scheduler cuts prefill where states are to be kept. Where it is too small
    most prompts leave no state behind, and some leave one that ends earlier than its name says:
    whoever finds that one, on the device or in a tier, computes from a wrong state.
    """
    tokens = cache_config.block_size

    def keep_block_size() -> None:
        if cache_config.block_size != tokens:
            logger.info(
                "vLLM took a block for %d tokens after its start; it has %d, and was told so. "
                "With --block-size %d it does not forget.",
                cache_config.block_size,
                tokens,
                tokens,
            )
            cache_config.block_size = tokens

    return keep_block_size
