"""Minutes of eviction, verification, several writers and faults: nothing wrong, nothing stuck.

``python scripts/soak.py [SECONDS] [--dir PLACE]``. Two writers share a root of layout ``files``
under one quota, an engine's tier works on a ``log``. Meanwhile files are damaged, and processes
killed and started again with another capacity. What lies on the disk is watched. At the end
everything is read, and ``kvtiers verify`` has to find nothing. The last line is ``RESULT ok``, or
says what went wrong.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Lookup, Namespace
from kvtiers.chunks import RequestContext as Request
from kvtiers.errors import Kind
from kvtiers.testing.values import content
from kvtiers.testing.values import key as named
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Item, Job, JobKind, JobOutcome, StoreContext
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.views import ChunkViews

SIZES = (PAGE_BYTES, 4 * PAGE_BYTES, 16 * PAGE_BYTES)
LAYOUT = ChunkLayout(tuple(GroupLayout(i, size, 16) for i, size in enumerate(SIZES)))
NAMESPACE = Namespace({"model": "soak", "format": 1})
KEYS = 6000
CAPACITIES = (24 << 20, 32 << 20, 40 << 20)
"""Bytes; all chunks together are six times as many."""
FAULT_EVERY_S, REPORT_EVERY_S, WATCH_EVERY_S = 2.0, 10.0, 0.2
SPOILT = 20
"""Places that one fault damages."""
SETTLES_S = 20.0
"""After a smaller capacity was stated: by then it is kept."""
STUCK_S = 60.0
"""A process that says nothing for so long is stuck."""
PROMISED = (None, Kind.FULL, Kind.CORRUPT, Kind.VANISHED)
"""What a write or a read may end with in a soak: every other error is a finding."""


def key(n: int) -> Key:
    return named(n, n % len(SIZES))


def filled(n: int) -> memoryview:
    view = blank(n)
    view[:] = content(key(n), view.nbytes)
    return view


def blank(n: int) -> memoryview:
    return memoryview(mmap.mmap(-1, SIZES[n % len(SIZES)]))


def right(n: int, view: memoryview) -> bool:
    return bytes(view) == content(key(n), view.nbytes)


def some(dice: random.Random, most: int = 12) -> list[int]:
    """Chunks of which some are asked for far more often than others."""
    return list({int(KEYS * dice.random() ** 3) for _ in range(dice.randint(1, most))})


# -- what works: a process each --------------------------------------------------------------------


class Work:
    """Counts what a process does, says so in lines of JSON, and ends when nobody listens."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said_at = 0.0

    def goes_on(self) -> bool:
        if time.monotonic() - self._said_at > 1.0:
            self._said_at = time.monotonic()
            print(json.dumps(self.counts), flush=True)
        return not stopping.is_set()

    def saw(self, what: str, error: Any) -> None:
        kind = None if error is None else error.kind
        self.counts[f"{what} {'ok' if kind is None else kind.value}"] += 1
        if kind not in PROMISED:
            raise SystemExit(f"{what}: {error!r}")


stopping = threading.Event()


def write_files(root: str, capacity: int, seed: int) -> None:
    """A writer among others on one root."""
    work, dice = Work(), random.Random(seed)
    store = FilesStore(_context(work), root, eviction="own", capacity_bytes=capacity)
    threads = [
        threading.Thread(target=_use, args=(store, random.Random(dice.random()), work))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in store.scan():
        pass
    while work.goes_on() and all(t.is_alive() for t in threads):
        time.sleep(0.1)
    failed = not stopping.is_set()
    stopping.set()
    for thread in threads:
        thread.join()
    store.close()
    raise SystemExit("a thread ended" if failed else 0)


def _context(work: Work) -> StoreContext:
    def removed(keys: Sequence[Key], reason: Any) -> None:
        work.counts[f"removed {reason}"] += len(keys)

    return StoreContext("fs", "1:fs", NAMESPACE, LAYOUT, time.monotonic, time.time, removed)


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


def work_on_a_log(root: str, capacity: int, seed: int) -> None:
    """What an engine does with its tier: asks, loads what is there, stores what is not."""
    work, dice = Work(), random.Random(seed)
    tier: Any = build_tier(
        {"type": "fs", "layout": "log", "root_dir": root, "capacity_bytes": capacity},
        0,
        namespace=NAMESPACE,
        layout=LAYOUT,
        clock=time.monotonic,
        wall_clock=time.time,
    )
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
            reason = getattr(event, "reason", None)
            work.counts["stored" if reason is None else f"removed {reason}"] += len(event.keys)
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


# -- what goes wrong meanwhile ---------------------------------------------------------------------


class Worker:
    """One process, which may be killed and started again."""

    def __init__(self, role: str, root: Path, dice: random.Random) -> None:
        self.role, self.root, self._dice = role, root, dice
        self.counts: Counter[str] = Counter()
        """Of all its lives."""
        self.capacity = CAPACITIES[-1]
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        arguments = ["--role", self.role, self.root, self.capacity, self._dice.randrange(1 << 30)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )
        self.heard_at = time.monotonic()
        self._listener = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self._listener.start()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        before: Counter[str] = Counter()
        for line in process.stdout:
            self.heard_at = time.monotonic()
            now = Counter(json.loads(line))
            self.counts += now - before
            before = now

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def stop(self) -> None:
        """As an engine ends. Raises SystemExit if it does not."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STUCK_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SystemExit(f"a process on {self.role} did not end") from None
        self._end()
        if code:
            raise SystemExit(f"a process on {self.role} ended with {code}")

    def _end(self) -> None:
        self.process.wait()
        self._listener.join()

    def must_be_well(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"a process on {self.role} ended with {self.process.returncode}")
        if time.monotonic() - self.heard_at > STUCK_S:
            raise SystemExit(f"a process on {self.role} is stuck: {self.counts}")


class Watch:
    """Whether a root stays within the capacities that rule."""

    def __init__(self, root: Path, workers: Sequence[Worker]) -> None:
        self.root, self._workers = root, workers
        self._stated: list[tuple[float, int]] = [(time.monotonic(), CAPACITIES[-1])]
        self.most = self._before = 0

    def changed(self) -> None:
        """A capacity was stated. The smallest of the living rules, so that while one of them was
        away another may have gone as far as its own.
        """
        now, stated = time.monotonic(), [w.capacity for w in self._workers]
        self._stated += [(now, max(stated)), (now, min(stated))]

    def look(self) -> None:
        """Raises SystemExit if there is more than allowed, or above it more than a moment ago.

        What was promised to readers before a capacity was lowered stays until they are done, who
        here read all of it again and again: it may take long, but nothing is added meanwhile.
        """
        now, rules = time.monotonic(), self._stated[-1][1]
        recent = [bound for since, bound in self._stated if now - since < SETTLES_S]
        older = [bound for since, bound in self._stated if now - since >= SETTLES_S][-1:]
        allowed = max([rules, *recent, *(older if recent else [])])
        there = disk_bytes(self.root)
        self.most = max(self.most, there)
        before, self._before = self._before, there
        if there > max(allowed, before):
            raise SystemExit(f"over capacity: {there} bytes in {self.root}, {allowed} are allowed")


def disk_bytes(root: Path) -> int:
    """Of all files but locks; one that is renamed meanwhile is counted once."""
    sizes: dict[int, int] = {}
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            info = path.lstat()
            if path.name != "lock" and not path.is_dir():
                sizes[info.st_ino] = info.st_size
    return sum(sizes.values())


def damage(root: Path, dice: random.Random) -> str:
    """Spoil a page, or the end, of some file; what was done."""
    files = [*root.glob("*/*/*.kvc"), *root.glob("log/*.kvs")]
    paths = [p for p in files if "quarantine" not in p.parts]
    if not paths:
        return "nothing"
    path = dice.choice(paths)
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as f:
        pages = max(1, os.fstat(f.fileno()).st_size // PAGE_BYTES)
        at = dice.randrange(pages) * PAGE_BYTES
        how = dice.choice(["flip", "zero", "foreign", "cut"])
        if how == "cut":
            os.ftruncate(f.fileno(), at)
        else:
            page = os.pread(f.fileno(), PAGE_BYTES, at) or bytes(PAGE_BYTES)
            spoilt = {
                "flip": bytes([page[0] ^ 1]) + page[1:],
                "zero": bytes(len(page)),
                "foreign": dice.randbytes(len(page)),
            }[how]
            os.pwrite(f.fileno(), spoilt, at)
        return how
    return "nothing"


def fault(workers: Sequence[Worker], watches: Sequence[Watch], dice: random.Random) -> str:
    """One thing that goes wrong; what."""
    worker = dice.choice(workers)
    if dice.random() < 0.7:
        return f"x{SPOILT} damage {[damage(worker.root, dice) for _ in range(SPOILT)][-1]}"
    how = dice.choice(["kill", "restart"])
    worker.kill() if how == "kill" else worker.stop()
    worker.capacity = dice.choice(CAPACITIES)
    for watch in watches:
        watch.changed()
    worker.start()
    return how


# -- the whole -------------------------------------------------------------------------------------


def soak(seconds: float, place: Path, seed: int) -> None:
    """Raises SystemExit that says what went wrong."""
    dice = random.Random(seed)
    files, log = place / "files", place / "log"
    workers = [Worker(role, root, dice) for role, root in (("files", files), ("log", log))]
    workers.append(Worker("files", files, dice))
    of_files = [w for w in workers if w.role == "files"]
    watches = [Watch(files, of_files), Watch(log, [workers[1]])]
    faults: Counter[str] = Counter()
    began = time.monotonic()
    try:
        for _ in _every(WATCH_EVERY_S, began, seconds):
            now = time.monotonic() - began
            for watch in watches:
                watch.look()
            for worker in workers:
                worker.must_be_well()
            if now > FAULT_EVERY_S * (1 + faults.total()):
                faults[fault(workers, watches, dice)] += 1
            if now > REPORT_EVERY_S * (1 + faults["reports"]):
                faults["reports"] += 1
                _report(now, workers, watches, faults)
        for worker in workers:
            worker.stop()
    finally:
        for worker in workers:
            worker.kill()
    _report(time.monotonic() - began, workers, watches, faults)
    read_all("files", files, min(w.capacity for w in of_files))
    read_all("log", log, workers[1].capacity)


def _every(period_s: float, began: float, seconds: float) -> Iterator[None]:
    while time.monotonic() - began < seconds:
        yield
        time.sleep(period_s)


def _report(
    now: float, workers: Sequence[Worker], watches: Sequence[Watch], faults: Counter[str]
) -> None:
    total: Counter[str] = Counter()
    for worker in workers:
        total += worker.counts
    did = ", ".join(f"{n} {what}" for what, n in sorted(total.items()))
    struck = ", ".join(f"{n} {what}" for what, n in sorted(faults.items()) if what != "reports")
    most = ", ".join(f"{watch.most >> 20}" for watch in watches)
    lives = sum(worker.lives for worker in workers)
    print(f"{now:5.0f} s: {did}; faults: {struck}; {lives} lives; at most {most} MiB", flush=True)


def read_all(role: str, root: Path, capacity: int) -> None:
    """Each chunk is right, or is damaged, said to be, and gone; then nothing is wrong any more."""
    work = Work()
    make: Any = FilesStore if role == "files" else LogStore
    store = make(_context(work), str(root), capacity_bytes=capacity)
    settle(role, root, store, capacity)
    kinds: list[Counter[str]] = []
    for _ in range(2):
        kinds.append(Counter())
        for entry in list(store.scan()):
            n = _NUMBERS[entry.key]
            view = blank(n)
            (error,) = store.read([Item(entry.key, view)])
            kinds[-1]["ok" if error is None else error.kind.value] += 1
            if error is None and not right(n, view):
                raise SystemExit(f"WRONG BYTES at the end: {entry.key.hex()}")
    bad = sum(n for kind, n in kinds[0].items() if kind != "ok")
    said = work.counts["removed corrupt"] + work.counts["removed vanished"]
    if said != bad or set(kinds[1]) - {"ok"}:
        raise SystemExit(f"{role}: {kinds[0]}, {said} reported, then {kinds[1]}")
    store.check()
    manifests = sum(p.stat().st_size for p in root.rglob("manifest.json"))
    counted = store.used_bytes + (manifests if role == "log" else 0)
    if counted != disk_bytes(root):
        raise SystemExit(f"{role}: it counts {counted} bytes, {disk_bytes(root)} are there")
    if counted > capacity:
        raise SystemExit(f"{role}: {counted} bytes are above the capacity of {capacity}")
    store.close()
    verify = [sys.executable, "-m", "kvtiers.cli", "verify", f"fs://{root}"]
    if subprocess.run(verify, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{role}: kvtiers verify is not clean")
    print(f"{role}: at the end {dict(kinds[0])}, {counted >> 20} of {capacity >> 20} MiB, verified")


def settle(role: str, root: Path, store: Any, capacity: int) -> None:
    """Wait until what was promised to the last readers may leave, and has left.

    Raises SystemExit if the capacity, which may be smaller than theirs, is not kept by then.
    """
    until = time.monotonic() + SETTLES_S
    while disk_bytes(root) > capacity:
        if time.monotonic() > until:
            raise SystemExit(f"{role}: {disk_bytes(root)} bytes are above {capacity} and stay")
        time.sleep(WATCH_EVERY_S)
        for _ in store.scan():  # begins by evicting what is too much
            pass


_NUMBERS = {key(n): n for n in range(KEYS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("seconds", nargs="?", type=float, default=600.0)
    parser.add_argument(
        "--dir",
        type=os.path.abspath,
        help="where it works; a new folder for temporary files if absent",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
        role, root, capacity, seed = given.role
        ROLES[role](root, int(capacity), int(seed))
        return
    place = Path(tempfile.mkdtemp(prefix="kvtiers-soak-", dir=given.dir))
    print(f"seed {given.seed}, {given.seconds:g} s", flush=True)
    try:
        soak(given.seconds, place, given.seed)
    except SystemExit as e:
        print(f"RESULT failed: {e}")
        raise SystemExit(1) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print("RESULT ok")


if __name__ == "__main__":
    main()
