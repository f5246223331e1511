"""What is timed at a manager, one request at a time: processor seconds of the scheduler's thread.

What other processes take from the machine meanwhile does not count. The keys were hashed before,
by the request's book of positions, as in vLLM.
"""

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

from bench.sides import Side
from kvtiers.engines.vllm.manager import VllmManager

Operation = Callable[[Side, Sequence[Any], Any], float]
"""(side, keys of the request, its context) -> seconds."""


def lookup_one(side: Side, names: Sequence[Any], context: Any) -> float:
    """One call per key, as vLLM's scheduler asks."""
    lookup = side.manager.lookup
    began = thread_time()
    for name in names:
        lookup(name, context)
    return thread_time() - began


def lookup_many(side: Side, names: Sequence[Any], context: Any) -> float:
    """Our batched lookup, for engines that ask for a prefix at once; vLLM's has one-key calls."""
    if not isinstance(side.manager, VllmManager):
        return lookup_one(side, names, context)
    core = side.manager.core
    request = core.request(context.req_id)
    assert request is not None
    began = thread_time()
    core.lookup_many(names, request)
    return thread_time() - began


def store(side: Side, names: Sequence[Any], context: Any) -> float:
    """The whole life of stored chunks: slots, confirmation, cascade and its end, recency.

    vLLM books recency when the request ends, so that belongs to it; ours sends the cascade when the
    step ends and takes in its outcome with the next, so both steps do. vLLM confirms a set of keys.
    """
    manager = side.manager
    began = thread_time()
    output = manager.prepare_store(names, context)
    manager.complete_store(set(output.keys_to_store), context)
    side.step()
    side.finish(context)
    side.step()
    spent = thread_time() - began
    assert len(output.keys_to_store) == len(names), "a chunk was not stored"
    return spent


def load(side: Side, names: Sequence[Any], context: Any) -> float:
    """Pinning, letting go, recency (vLLM: when the request ends). The lookups are not timed."""
    lookup_one(side, names, context)
    manager = side.manager
    began = thread_time()
    manager.prepare_load(names, context)
    manager.complete_load(set(names), context)
    side.finish(context)
    return thread_time() - began


def touch(side: Side, names: Sequence[Any], context: Any) -> float:
    """Recency here and in the tier: ours tells the tier when the step ends."""
    manager = side.manager
    began = thread_time()
    manager.touch(names, context)
    side.step()
    return thread_time() - began


def run(operation: Operation, side: Side, work: Sequence[Sequence[Any]]) -> float:
    """Seconds that ``operation`` takes over all requests of ``work``."""
    spent = 0.0
    for names in work:
        context = side.request(names)
        spent += operation(side, names, context)
        side.finish(context)
        side.step()
    return spent
