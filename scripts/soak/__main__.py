"""The whole: starts those that work, has things go wrong, watches, and gives the verdict."""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts import soak as package
from scripts.soak.ending import read_all
from scripts.soak.faults import Faults
from scripts.soak.roles import play
from scripts.soak.tools import Calls
from scripts.soak.watch import Watch
from scripts.soak.workers import Worker

FAULT_EVERY_S, REPORT_EVERY_S, WATCH_EVERY_S = 2.0, 10.0, 0.2
UNDAMAGED = 0.25
"""The part of the time at first in which nothing is spoilt: ``verify`` may find nothing."""


def soak(seconds: float, place: Path, seed: int) -> None:
    """Raises SystemExit that says what went wrong."""
    dice = random.Random(seed)
    files, log = place / "files", place / "log"
    workers = [Worker(role, root, dice) for role, root in (("files", files), ("log", log))]
    workers.append(Worker("files", files, dice))
    of_files, of_log = [workers[0], workers[2]], [workers[1]]
    watches = [Watch(files, of_files), Watch(log, of_log)]
    faults, calls = Faults(workers, watches, dice), Calls([of_files, of_log])
    struck: Counter[str] = Counter()
    reports, began = 0, time.monotonic()
    try:
        for now in _every(WATCH_EVERY_S, began, seconds):
            for watch in watches:
                watch.look()
            for worker in workers:
                worker.go_on_if_it_is_time()
                worker.must_be_well()
            calls.go_on(faults.damaged)
            if now > FAULT_EVERY_S * (1 + struck.total()):
                struck[faults.strike(calls, may_damage=now > UNDAMAGED * seconds)] += 1
            if now > REPORT_EVERY_S * (1 + reports):
                reports += 1
                _report(now, workers, watches, struck + calls.ended)
        for worker in workers:
            worker.stop(workers)
    finally:
        for worker in workers:
            worker.kill()
        calls.kill()
    _report(time.monotonic() - began, workers, watches, struck + calls.ended)
    read_all("files", files, min(w.capacity for w in of_files))
    read_all("log", log, workers[1].capacity)


def _every(period_s: float, began: float, seconds: float) -> Iterator[float]:
    while (now := time.monotonic() - began) < seconds:
        yield now
        time.sleep(period_s)


def _report(
    now: float, workers: Sequence[Worker], watches: Sequence[Watch], beside: Counter[str]
) -> None:
    total: Counter[str] = Counter()
    for worker in workers:
        total += worker.counts
    did = ", ".join(f"{n} {what}" for what, n in sorted(total.items()))
    struck = ", ".join(f"{n} {what}" for what, n in sorted(beside.items()))
    most = ", ".join(f"{watch.most >> 20}" for watch in watches)
    lives = sum(worker.lives for worker in workers)
    print(f"{now:5.0f} s: {did}; beside: {struck}; {lives} lives; at most {most} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=package.__doc__, allow_abbrev=False)
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
        role, root, capacity, seed = given.role
        play(role, root, int(capacity), int(seed))
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
