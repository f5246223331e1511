"""Time to first token with prefill on another engine, beside prefill here.

    python -m bench.p2p_ttft [--model DIR] [--rounds 5] [--tokens 2000] [--threads N] [--tiny]

Two real vLLM on the CPU, a process each, which share its cores; one works at a time. A round has a
prompt that nobody saw. It is sent to decode, which waits, and to prefill at once; the clock runs
until decode's first token. Then decode forgets all it has and computes the same prompt itself. It
stops with an error unless a hit of that gives what prefill elsewhere gave. Prints::

    TIME p2p.ttft <ms with prefill elsewhere, and here>
    RATIO p2p.ttft <the one over the other: median of the rounds>
"""

import argparse
import multiprocessing
import os
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.collector import no_collector
from bench.lines import median_of, remark
from bench.ttft import MODEL, TINY, Engine, Size, running, set_environment

_SPAWN = multiprocessing.get_context("spawn")
_TIER = {"type": "p2p", "port": 0, "max_pinned_fraction": 1.0}


def _port_of(engine: Engine) -> int:
    return int(engine.manager.core.tiers[0].tier.port)


def _prefill(pipe: Any, model: str) -> None:
    """The other engine: computes each prompt that comes through the pipe."""
    with running(model, _TIER) as engine:
        pipe.send(_port_of(engine))
        while True:
            name, prompt = pipe.recv()
            engine.ask(prompt, remote_decoder={"kv_request_id": name})
            engine.rest()
            engine.leave_only("host")


@contextmanager
def prefill(model: str) -> Iterator[tuple[Any, int]]:
    """The pipe to it, and its port."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_prefill, args=(theirs, model), daemon=True)
    process.start()
    try:
        yield ours, ours.recv()
    finally:
        process.kill()
        process.join()


def measure(model: str, size: Size) -> None:
    """Print every line."""
    with prefill(model) as (pipe, port), running(model, _TIER) as engine:
        numbers = random.Random(0)
        rounds = []
        with no_collector():
            for n in range(size.rounds + 1):
                prompt = numbers.choices(range(3, engine.vocabulary), k=size.tokens)
                rounds.append(_round(engine, pipe, port, f"round{n}", prompt))
        apart, here = zip(*rounds[1:], strict=True)  # the first one warms up
    words = [f"{statistics.median(times) * 1e3:.1f}" for times in (apart, here)]
    remark("TIME", "p2p.ttft", f"{' '.join(words)} ms: prefill elsewhere, here")
    median_of("RATIO", "p2p.ttft", [a / h for a, h in zip(apart, here, strict=True)])


def _round(
    engine: Engine, pipe: Any, port: int, name: str, prompt: list[int]
) -> tuple[float, float]:
    where = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": port}
    pipe.send((name, prompt))
    apart = engine.ask(prompt, remote_prefiller=where)
    engine.rest()
    engine.leave_only("disk")
    here = engine.ask(prompt)
    hit = engine.ask(prompt)  # what is computed first rounds otherwise
    engine.rest()
    engine.leave_only("disk")
    if (apart.tokens, apart.cached) != (hit.tokens, hit.cached) or here.cached or not hit.cached:
        raise SystemExit(f"prefill elsewhere: {apart}, here: {here}, a hit: {hit}")
    return apart.seconds, here.seconds


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=MODEL, help="folder of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    set_environment(given.threads)
    size = TINY if given.tiny else Size(given.tokens, given.rounds)
    measure(str(Path(given.model).resolve()), size)


if __name__ == "__main__":
    main()
