"""What works: a process each."""

import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvtiers.chunks import Key, Lookup
from kvtiers.chunks import RequestContext as Request
from kvtiers.errors import Kind
from kvtiers.events import ChunksRemoved, ChunksStored
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Item, Job, JobKind, JobOutcome, StoreContext
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.views import ChunkViews
from scripts.soak.chunks import LAYOUT, NAMESPACE, blank, filled, key, right, some
from scripts.soak.trouble import Disk

PROMISED = (None, Kind.FULL, Kind.CORRUPT, Kind.VANISHED)
"""What a write or a read may end with in a soak: every other error is a finding, unless the disk
is in trouble that explains it."""
RUNNER = {"store_deadline_s": 4.0, "load_deadline_s": 2.0, "breaker_max_cooldown_s": 10.0}
"""Shorter than what hangs, so that jobs end before their calls do."""


class Work:
    """Counts what a process does, says so in lines of JSON, and ends when nobody listens."""

    def __init__(self, disk: Disk | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._disk = disk
        self._said_at = 0.0

    def goes_on(self) -> bool:
        if time.monotonic() - self._said_at > 1.0:
            self._said_at = time.monotonic()
            print(json.dumps(self.counts), flush=True)
            if self._disk is not None:
                self._disk.must_have_recovered()
        return not stopping.is_set()

    def saw(self, what: str, error: Any) -> None:
        kind = None if error is None else error.kind
        self.counts[f"{what} {'ok' if kind is None else kind.value}"] += 1
        if kind not in PROMISED and not (self._disk and self._disk.excuses(kind)):
            raise SystemExit(f"{what}: {error!r}")
        if kind is None and self._disk and self._disk.worked(what):
            self.counts["recovered"] += 1


stopping = threading.Event()


def context(work: Work) -> StoreContext:
    def removed(keys: Sequence[Key], reason: Any) -> None:
        work.counts[f"removed {reason}"] += len(keys)

    return StoreContext("fs", "1:fs", NAMESPACE, LAYOUT, time.monotonic, time.time, removed)


def write_files(root: str, capacity: int, dice: random.Random, disk: Disk) -> None:
    """A writer among others on one root."""
    work = Work(disk)
    store = FilesStore(context(work), root, eviction="own", capacity_bytes=capacity)
    threads = [
        threading.Thread(target=_use, args=(store, random.Random(dice.random()), work))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in store.scan():
        pass
    disk.listen()
    while work.goes_on() and all(t.is_alive() for t in threads):
        time.sleep(0.1)
    failed = not stopping.is_set()
    stopping.set()
    for thread in threads:
        thread.join()
    store.close()
    raise SystemExit("a thread ended" if failed else 0)


def _use(store: Any, dice: random.Random, work: Work) -> None:
    try:
        _use_until_stopped(store, dice, work)
    except BaseException as e:
        sys.stderr.write(f"{e!r}\n")
        raise


def _use_until_stopped(store: Any, dice: random.Random, work: Work) -> None:
    while not stopping.is_set():
        ns = some(dice)
        if dice.random() < 0.4:
            for error in store.write([Item(key(n), filled(n)) for n in ns]):
                work.saw("write", error)
            continue
        ns = [n for n, there in zip(ns, store.contains([key(n) for n in ns]), strict=True) if there]
        views = [blank(n) for n in ns]
        errors = store.read([Item(key(n), v) for n, v in zip(ns, views, strict=True)])
        for n, view, error in zip(ns, views, errors, strict=True):
            work.saw("read", error)
            if error is None and not right(n, view):
                raise SystemExit(f"WRONG BYTES: {key(n).hex()}")


def work_on_a_log(root: str, capacity: int, dice: random.Random, disk: Disk) -> None:
    """What an engine does with its tier: asks, loads what is there, stores what is not."""
    work = Work(disk)
    options = {"type": "fs", "layout": "log", "root_dir": root, "capacity_bytes": capacity}
    tier: Any = build_tier(
        {**options, **RUNNER},
        0,
        namespace=NAMESPACE,
        layout=LAYOUT,
        clock=time.monotonic,
        wall_clock=time.time,
    )
    disk.listen()
    jobs: dict[int, tuple[JobKind, dict[Key, tuple[int, memoryview]]]] = {}
    number = 0
    while work.goes_on():
        if len(jobs) < 8:
            number += 1
            _submit(tier, number, dice, jobs)
        else:
            time.sleep(0.001)
        tier.on_schedule_end()
        for outcome in tier.get_finished_jobs():
            if isinstance(outcome, JobOutcome):
                _check(outcome, *jobs.pop(outcome.job_id), work)
        for event in tier.take_events():
            if isinstance(event, ChunksStored):
                work.counts["stored"] += len(event.keys)
            elif isinstance(event, ChunksRemoved):
                work.counts[f"removed {event.reason}"] += len(event.keys)
        if number % 500 == 0:
            tier.check()
    tier.drain_jobs(30)
    tier.store.check()
    tier.shutdown(30)


def _submit(tier: Any, number: int, dice: random.Random, jobs: dict[int, Any]) -> None:
    ns = some(dice)
    keys = [key(n) for n in ns]
    verdicts = tier.lookup(keys, Request("soak"))
    kind = JobKind.LOAD if dice.random() < 0.6 else JobKind.STORE
    wanted = Lookup.HIT if kind is JobKind.LOAD else Lookup.MISS
    ns = [n for n, verdict in zip(ns, verdicts, strict=True) if verdict is wanted]
    if not ns:
        return
    views = [blank(n) if kind is JobKind.LOAD else filled(n) for n in ns]
    shown = [view[:] for view in views]
    keys = [key(n) for n in ns]
    job = Job(number, kind, tuple(keys), tuple(range(len(ns))), ChunkViews.of(shown))
    if (tier.submit_load if kind is JobKind.LOAD else tier.submit_store)(job):
        jobs[number] = (kind, dict(zip(keys, zip(ns, views, strict=True), strict=True)))


def _check(
    outcome: JobOutcome, kind: JobKind, memory: dict[Key, tuple[int, memoryview]], work: Work
) -> None:
    verb = "read" if kind is JobKind.LOAD else "write"
    for done in outcome.done:
        work.saw(verb, None)
        if not right(*memory[done]):
            raise SystemExit(f"WRONG BYTES: {done.hex()}")
    for error in outcome.failed.values():
        work.saw(verb, error)


ROLES = {"files": write_files, "log": work_on_a_log}


def play(role: str, root: str, capacity: int, seed: int) -> None:
    """Be one of those that work, until told to end."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    dice = random.Random(seed)
    ROLES[role](root, capacity, dice, Disk(random.Random(dice.random())))
