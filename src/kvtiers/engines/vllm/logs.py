"""Our log lines through vLLM's handlers, so that an operator sees them among the engine's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvtiers.errors import KVTiersError

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


@contextmanager
def saying_refusals(rank: int = 0) -> Iterator[None]:
    """Say a refusal as one ERROR line, through however many of these it passes.

    vLLM shows an exception at the end of two long tracebacks, or of another process only. Of
    several ranks, which all refuse the same, only the first one speaks.
    """
    adopt_vllm_logging()
    try:
        yield
    except KVTiersError as e:
        if not e.said and rank == 0:
            e.said = True
            logger.error("%s", e)
        raise
