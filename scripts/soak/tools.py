"""``kvtiers verify`` and ``kvtiers gc``, run beside those that write."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.soak.chunks import CAPACITIES
from scripts.soak.workers import STUCK_S, Worker

DONE, WRONG, REFUSED = 0, 1, 2
"""Exit statuses of ``kvtiers``."""


def verify(root: Path) -> "subprocess.Popen[str]":
    return _kvtiers("verify", f"fs://{root}")


def _kvtiers(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kvtiers.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


class Call:
    """One run of a tool on the root of some workers."""

    def __init__(self, what: str, workers: Sequence[Worker]) -> None:
        self.what, self.role, self._workers = what, workers[0].role, workers
        self.root = workers[0].root
        if what == "verify":
            self._process = verify(self.root)
        else:
            keep = str(CAPACITIES[0] // 2)
            self._process = _kvtiers("gc", f"fs://{self.root}", "--max-bytes", keep)
        self._began = time.monotonic()
        self._excused = False
        """Whether one of those that write was stopped meanwhile, maybe with the account locked."""

    def has_ended(self, was_damaged: bool) -> bool:
        """Raises SystemExit if it did what it may not; ``was_damaged``: by us, before it ended."""
        self._excused = self._excused or any(worker.is_held for worker in self._workers)
        if self._process.poll() is None:
            if time.monotonic() - self._began > STUCK_S:
                raise SystemExit(f"{self} is stuck")
            return False
        _, said = self._process.communicate()
        if self._process.returncode not in self._allowed(was_damaged, said) or "Traceback" in said:
            raise SystemExit(f"{self} ended with {self._process.returncode}: {said}")
        return True

    def _allowed(self, was_damaged: bool, said: str) -> Sequence[int]:
        if self.what == "gc" and self.role == "log":
            return (REFUSED,)  # a log that is open is its owner's
        in_use = "are in use by engines" in said
        wrong = was_damaged if self.what == "verify" else self._excused or in_use
        return (DONE, WRONG) if wrong else (DONE,)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def __repr__(self) -> str:
        return f"kvtiers {self.what} on {self.role}"


class Calls:
    """One tool after the other, on one root after the other."""

    def __init__(self, roots: Sequence[Sequence[Worker]]) -> None:
        turns = [(what, workers) for what in ("verify", "gc") for workers in roots]
        self._turns = turns
        self._made = 0
        self._now: Call | None = None
        self.ended: Counter[str] = Counter()

    def go_on(self, damaged: set[Path]) -> None:
        """Look at what runs; begin the next one. Raises SystemExit for what may not be."""
        if self._now is not None:
            if self._now.has_ended(self._now.root in damaged):
                self.ended[repr(self._now)] += 1
                self._now = None
            return
        what, workers = self._turns[self._made % len(self._turns)]
        if all(worker.is_open for worker in workers):
            self._made += 1
            self._now = Call(what, workers)

    @property
    def needs_its_owner(self) -> bool:
        """Whether the log has to stay open: a tool is about to be refused because it is."""
        now = self._now
        return now is not None and (now.what, now.role) == ("gc", "log")

    def kill(self) -> None:
        if self._now is not None:
            self._now.kill()
