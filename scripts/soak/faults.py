"""What goes wrong while others work."""

import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

from kvtiers.chunks import PAGE_BYTES
from scripts.soak.chunks import CAPACITIES
from scripts.soak.tools import Calls
from scripts.soak.trouble import BESIDE, ILLS
from scripts.soak.watch import Watch, files_below
from scripts.soak.workers import Worker

SPOILT = 20
"""Places that one fault damages."""
LONGEST_ILL_S, LONGEST_HOLD_S = 4.0, 12.0
"""The latter is longer than others wait for the account of a root."""


class Faults:
    """One thing that goes wrong after the other."""

    def __init__(
        self, workers: Sequence[Worker], watches: Sequence[Watch], dice: random.Random
    ) -> None:
        self._workers, self._watches, self._dice = workers, watches, dice
        self.damaged: set[Path] = set()
        """Roots in which something was spoilt."""

    def strike(self, calls: Calls, *, may_damage: bool) -> str:
        """Have one; what. While a process is stopped none comes or goes: it may have to wait."""
        worker, luck = self._dice.choice(self._workers), self._dice.random()
        if luck < 0.4:
            return self._damage(worker.root) if may_damage else self._trouble(worker)
        held = any(w.is_held for w in self._workers)
        if luck < 0.7 or held or (worker.role == "log" and calls.needs_its_owner):
            return self._trouble(worker)
        return self._hold(worker) if luck < 0.8 else self._again(worker)

    def _damage(self, root: Path) -> str:
        self.damaged.add(root)
        return f"x{SPOILT} damage {[damage(root, self._dice) for _ in range(SPOILT)][-1]}"

    def _trouble(self, worker: Worker) -> str:
        what = self._dice.choice(list(ILLS))
        worker.tell(what, self._dice.uniform(1.0, LONGEST_ILL_S))
        return what

    def _hold(self, worker: Worker) -> str:
        seconds = self._dice.uniform(1.0, LONGEST_HOLD_S)
        for other in self._workers:
            if other is not worker and other.root == worker.root:
                other.tell(BESIDE, seconds)
        worker.hold(seconds)
        return "stop"

    def _again(self, worker: Worker) -> str:
        how = self._dice.choice(["kill", "restart"])
        worker.kill() if how == "kill" else worker.stop(self._workers)
        worker.capacity = self._dice.choice(CAPACITIES)
        for watch in self._watches:
            watch.changed()
        worker.start()
        return how


def damage(root: Path, dice: random.Random) -> str:
    """Spoil a page, or the end, of some file; what was done."""
    files = [p for p in files_below(root) if p.suffix in (".kvc", ".kvs")]
    paths = [p for p in files if p.parent.name not in ("quarantine", "tmp")]
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
