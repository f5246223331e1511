"""Time to first token with prefill on another engine, beside prefill here.

    python -m bench.p2p_ttft [--model DIR] [--rounds 5] [--tokens 2000] [--threads N] [--tiny]

Two real vLLM on the CPU, a process each, which share its cores; one works at a time. A round has a
prompt that nobody saw. It is sent to decode, which waits, and to prefill at once; the clock runs
until decode's first token. Then decode forgets all it has and computes the same prompt itself. It
stops with an error unless a hit of that gives what prefill elsewhere gave. Both processes read one
clock. Prints::

    TIME p2p.freed <ms from the end of prefill until it holds no block of its device>
    TIME p2p.taken <ms from the end of prefill until decode holds blocks of its device>
    TIME p2p.ttft <ms with prefill elsewhere, and here>
    RATIO p2p.ttft <the one over the other: median of the rounds>
"""

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.collector import no_collector
from bench.lines import median_of, remark
from bench.ttft import MODEL, TINY, Engine, Size, running, set_environment

_SPAWN = multiprocessing.get_context("spawn")
_TIER = {"type": "p2p", "port": 0, "max_pinned_fraction": 1.0}


@dataclass(frozen=True, slots=True)
class Round:
    """What one prompt took, in seconds."""

    apart: float
    """Until decode's first token, with prefill elsewhere."""
    here: float
    """Until the first token, computed by decode itself."""
    freed: float
    """From the end of prefill until no block of its device was held."""
    taken: float
    """From the end of prefill until decode held blocks of its own."""


def _port_of(engine: Engine) -> int:
    return int(engine.manager.core.tiers[0].tier.port)


def _prefill(pipe: Any, model: str) -> None:
    """The other engine: computes each prompt that comes through the pipe, and says when it had its
    token, and when its device was free.
    """
    with running(model, _TIER) as engine:
        pipe.send(_port_of(engine))
        while True:
            name, prompt = pipe.recv()
            engine.ask(prompt, 1, remote_decoder={"kv_request_id": name})
            ended = time.perf_counter()
            engine.free()
            freed = time.perf_counter()
            engine.rest()
            engine.leave_only("host")
            pipe.send((ended, freed))


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
    report(rounds[1:])  # the first one warms up


def report(rounds: Sequence[Round]) -> None:
    """Print the lines."""

    def ms(times: Iterable[float]) -> str:
        return f"{statistics.median(times) * 1e3:.1f}"

    after = "ms after the end of prefill"
    remark("TIME", "p2p.freed", f"{ms(r.freed for r in rounds)} {after} its device is free")
    remark("TIME", "p2p.taken", f"{ms(r.taken for r in rounds)} {after} decode has blocks of its")
    both = f"{ms(r.apart for r in rounds)} {ms(r.here for r in rounds)}"
    remark("TIME", "p2p.ttft", f"{both} ms: prefill elsewhere, here")
    median_of("RATIO", "p2p.ttft", [r.apart / r.here for r in rounds])


def _round(engine: Engine, pipe: Any, port: int, name: str, prompt: list[int]) -> Round:
    where = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": port}
    pipe.send((name, prompt))
    apart = engine.ask(prompt, remote_prefiller=where)
    ended, freed = pipe.recv()
    engine.rest()
    engine.leave_only("disk")
    here = engine.ask(prompt)
    hit = engine.ask(prompt)  # what is computed first rounds otherwise
    engine.rest()
    engine.leave_only("disk")
    if (apart.tokens, apart.cached) != (hit.tokens, hit.cached) or here.cached or not hit.cached:
        raise SystemExit(f"prefill elsewhere: {apart}, here: {here}, a hit: {hit}")
    return Round(apart.seconds, here.seconds, freed - ended, apart.taken - ended)


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
