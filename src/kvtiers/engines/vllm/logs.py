"""Our log lines through vLLM's handlers, so that an operator sees them among the engine's."""

import logging

logger = logging.getLogger("kvtiers")


def adopt_vllm_logging() -> None:
    """Give the ``kvtiers`` logger vLLM's handlers and level, unless the user configured it."""
    if logger.handlers:
        return
    theirs = logging.getLogger("vllm")
    if theirs.handlers:
        logger.propagate = False
        for handler in theirs.handlers:
            logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(theirs.getEffectiveLevel())
