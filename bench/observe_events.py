"""What KV events cost the scheduler's thread, as a share of the manager's time there.

    python -m bench.observe_events [--requests 400] [--tiny]

Requests of chunks that are absent are looked up and stored, which evicts as many; each chunk is
described, and a step takes what is to be said. Times are of the thread's processor time, without
that of reading it. What vLLM pays for calling a tracker that does nothing is not counted: it calls
one for each chunk anyway. The announcer's own thread is told apart. Prints::

    SHARE observe.events <described: time for events over the manager's time>
    SHARE observe.events.hashes <the same, hashes only>
    TIME observe.events <us a chunk: scheduler's thread> <announcer's thread>
    COST observe.events.memory_bytes <for each block>
"""

import argparse
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

from bench.sides import BATCH, TOKENS, Side, key, ours, request_keys
from kvtiers.config import parse_config
from kvtiers.engines.vllm.events import HOST
from kvtiers.engines.vllm.telling import ReadyEvents, TiersTracker, build_tracker
from kvtiers.events import PRIMARY, Event

RESIDENT = 10_240
_GROUP = SimpleNamespace(
    group_idx=0,
    tokens_per_block=TOKENS,
    tokens_per_chunk=TOKENS,
    hashes_per_chunk=1,
    kv_event_group_spec=SimpleNamespace(
        kv_cache_spec_kind="full_attention", kv_cache_spec_sliding_window=None
    ),
)


class Watch:
    """Processor time of this thread between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since = 0.0
        self._times = 0

    def start(self) -> None:
        self._since = time.thread_time()

    def stop(self) -> None:
        self._total += time.thread_time() - self._since
        self._times += 1

    @property
    def seconds(self) -> float:
        """Without what an empty measurement takes."""
        return self._total - self._times * _empty()


@cache
def _empty() -> float:
    watch = Watch()
    for _ in range(20_000):
        watch.start()
        watch.stop()
    return watch._total / watch._times


def asked(first: int) -> Any:
    """A request as the tracker sees it, for the chunks from ``first`` on."""
    return SimpleNamespace(
        all_token_ids=list(range(BATCH * TOKENS)),
        block_hashes=[key(first + i)[:-4] for i in range(BATCH)],
        lora_request=None,
        mm_features=(),
        cache_salt=None,
        prompt_embeds=None,
    )


def tracker_of(describe: bool) -> TiersTracker:
    """As an engine with host memory alone builds it."""
    settings = parse_config({"cpu_bytes_to_use": 1, "self_describing_kv_events": describe})
    return build_tracker(settings, {PRIMARY: HOST}, [_GROUP], "bench", "sha256")


def measure(requests: int, describe: bool) -> tuple[float, float, float, float]:
    """The share, then us a chunk of the scheduler's and the announcer's thread, bytes a block."""
    tracker = tracker_of(describe)
    idle = TiersTracker(tracker.announcer, ReadyEvents(), describe=False)
    telling, managing, noting, calling = Watch(), Watch(), Watch(), Watch()

    def sink(event: Event) -> None:
        telling.start()
        tracker.announcer(event)
        telling.stop()

    manager = ours(RESIDENT)
    side = Side(manager)
    side.fill(RESIDENT)
    manager.core._stores._emit = sink
    emit = manager.core._emit
    manager.core._emit = lambda event: (emit(event), sink(event))
    begun = time.process_time() - time.thread_time()
    for n in range(requests):
        first = RESIDENT * 2 + n * BATCH
        names, request = request_keys(first), asked(first)
        managing.start()
        context = side.request(names)
        manager.lookup(names[0], context)
        manager.prepare_store(names, context)
        managing.stop()
        for one, watch in ((tracker, noting), (idle, calling)):
            watch.start()
            for i, name in enumerate(names):
                one.record_store(request, _GROUP, i, name)
            watch.stop()
        managing.start()
        manager.complete_store(set(names), context)
        side.finish(context)
        side.step()
        managing.stop()
        noting.start()
        list(tracker.take_events(()))
        noting.stop()
    tracker.announcer.flush(60.0)
    others = time.process_time() - time.thread_time() - begun
    chunks = requests * BATCH
    narrator = tracker.announcer._narrator
    nbytes = narrator.nbytes / max(1, len(narrator._table))
    tracker.announcer.close(10.0)
    told = telling.seconds + noting.seconds - calling.seconds
    share = told / (managing.seconds - telling.seconds)
    return share, told / chunks * 1e6, others / chunks * 1e6, nbytes


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    requests = 20 if given.tiny else given.requests
    for name, describe in (("observe.events", True), ("observe.events.hashes", False)):
        share, here, there, nbytes = measure(requests, describe)
        print(f"SHARE {name} {share:.4f}")
        print(f"TIME {name} {here:.3f} {there:.3f}")
        if describe:
            print(f"COST {name}.memory_bytes {nbytes:.1f}")


if __name__ == "__main__":
    main()
