"""What part of the manager's time goes into watching it.

    python -m bench.observe [--rounds 15] [--tiny]

One engine's manager serves conversations that return: of a prompt's 64 chunks the first 32 are in
host memory, are looked up one by one and loaded; the rest is missing, computed and stored over
what was used longest ago; then the request ends, and another is live all the time. A step ends
before and after the store, with its statistics asked for, and the tier takes every cascade at once.
That is timed as it is, in processor time of the thread. After every few requests what was told
meanwhile is told again, event by event, to metrics of its own, and statistics are asked for at the
same times: that is the watching.
The share is of the time of both: an engine that is watched takes so much longer.
Prints::

    SHARE observe.metrics <counting events, reading gauges, sending; over the whole>
    TIME observe.request <microseconds of a request, and of watching it>
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, NamedTuple

from bench.collector import no_collector
from bench.lines import median_of, remark
from bench.sides import BATCH, CHUNK_BYTES, Side, ours, request_keys
from kvtiers.engines.vllm.metrics import StatsExporter
from kvtiers.events import ChunksPrompted, Event
from kvtiers.host.parts import HostUse
from kvtiers.metrics import Metrics
from kvtiers.observe.gauges import Gauges
from kvtiers.wiring import apart

THERE = BATCH // 2
IN_A_ROW = 16
"""Requests between two tellings."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    slots: int = 10_240
    requests: int = 400
    """Of a round."""
    warm_up: int = 1000
    """Requests that metrics were told of before."""


TINY = Size(slots=256, requests=8, warm_up=8)


class Step(NamedTuple):
    """Statistics were asked for."""

    use: HostUse
    now: float
    """Of the thread: what others take from the machine is no time that passes."""
    quiet: bool


@dataclass(slots=True)
class Tape:
    """What a manager told, and when statistics were asked for."""

    told: list[Event | Step] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        """Keep it."""
        self.told.append(event)

    def take(self) -> list[Event | Step]:
        """What was kept since the last call."""
        told, self.told = self.told, []
        return told


class Engine:
    """A manager with chunks of conversations in host memory."""

    def __init__(self, size: Size) -> None:
        self.tape = Tape()
        self.side = Side(ours(size.slots, listen=self.tape))
        self.side.fill(size.slots)
        self.side.request([])
        self._size = size
        self._turn = 0
        self._fresh = size.slots

    def prompts(self) -> list[list[Any]]:
        """The keys of the requests of a round, new objects with every call."""
        found = []
        for _ in range(self._size.requests):
            first = self._fresh - self._size.slots // 2
            found.append(request_keys(first)[:THERE] + request_keys(self._fresh)[:THERE])
            self._fresh += THERE
        return found

    def serve(self, prompts: Sequence[Sequence[Any]]) -> float:
        """Serve these; seconds."""
        side, manager = self.side, self.side.manager
        spent = 0.0
        for names in prompts:
            context = side.request(names)
            began = thread_time()
            manager.core.prompted(names)
            for name in names[: THERE + 1]:
                manager.lookup(name, context)
            manager.prepare_load(names[:THERE], context)
            self._step()
            manager.complete_load(set(names[:THERE]), context)
            output = manager.prepare_store(names[THERE:], context)
            manager.complete_store(set(output.keys_to_store), context)
            side.finish(context)
            self._step()
            spent += thread_time() - began
        return spent

    def _step(self) -> None:
        self.side.step()
        core = self.side.manager.core
        self.tape.told.append(Step(core.use, thread_time(), core.quiet))


class Watcher:
    """Metrics of their own, as an engine has them that has run for a while."""

    def __init__(self, engine: Engine, size: Size) -> None:
        core = engine.side.manager.core
        self._metrics = Metrics()
        self._tell = apart([self._metrics])
        gauges = Gauges(self._metrics, core.tiers, CHUNK_BYTES, lambda: core.backlogs)
        self._exporter = StatsExporter(self._metrics, gauges)
        for n in range(size.warm_up):
            self._metrics(ChunksPrompted(request_keys((1 << 40) + n * BATCH)))

    def hear(self, told: Sequence[Event | Step]) -> float:
        """Be told; seconds."""
        tell, exporter = self._tell, self._exporter
        began = thread_time()
        for entry in told:
            if type(entry) is Step:
                exporter.take(entry.use, entry.now, quiet=entry.quiet)
            else:
                tell(entry)
        return thread_time() - began


def share(engine: Engine, watcher: Watcher) -> tuple[float, float, int]:
    """Of a round: seconds of watching, of all, and how many events there were."""
    watching = whole = 0.0
    events = 0
    prompts = engine.prompts()
    for first in range(0, len(prompts), IN_A_ROW):
        served = engine.serve(prompts[first : first + IN_A_ROW])
        told = engine.tape.take()
        watched = watcher.hear(told)
        watching += watched
        whole += served + watched
        events += sum(type(entry) is not Step for entry in told)
    return watching, whole, events


def measure(size: Size, rounds: int) -> None:
    """Print every figure."""
    engine = Engine(size)
    watcher = Watcher(engine, size)
    watcher.hear(engine.tape.take())
    with no_collector():
        share(engine, watcher)
        measured = [share(engine, watcher) for _ in range(rounds)]
    median_of("SHARE", "observe.metrics", [watching / whole for watching, whole, _ in measured])
    watching, whole, events = (
        statistics.median(m) / size.requests for m in zip(*measured, strict=True)
    )
    words = f"{whole * 1e6:.0f} us a request, {watching * 1e6:.1f} of them for {events:.1f} events"
    remark("TIME", "observe.request", words)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    measure(TINY if given.tiny else Size(), 3 if given.tiny else given.rounds)


if __name__ == "__main__":
    main()
