"""The processes that work, as the one that started them sees them."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from scripts.soak.chunks import CAPACITIES
from scripts.soak.trouble import STOPPED

STUCK_S = 60.0
"""A process that says nothing for so long is stuck."""


class Worker:
    """One process, which may be stopped, killed and started again."""

    def __init__(self, role: str, root: Path, dice: random.Random) -> None:
        self.role, self.root, self._dice = role, root, dice
        self.counts: Counter[str] = Counter()
        """Of all its lives."""
        self.capacity = CAPACITIES[-1]
        self.lives = 0
        self._goes_on_at: float | None = None
        self.start()

    def start(self) -> None:
        self.lives += 1
        arguments = ["--role", self.role, self.root, self.capacity, self._dice.randrange(1 << 30)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.soak", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.heard_at = time.monotonic()
        self.is_open = False
        """Whether it has said anything, which it does once it works."""
        self._listener = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self._listener.start()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        before: Counter[str] = Counter()
        for line in process.stdout:
            self.heard_at, self.is_open = time.monotonic(), True
            now = Counter(json.loads(line))
            self.counts += now - before
            before = now

    def tell(self, what: str, seconds: float) -> None:
        """Have a trouble of ``trouble.ILLS`` for so long."""
        assert self.process.stdin is not None
        print(json.dumps([what, seconds]), file=self.process.stdin, flush=True)

    def hold(self, seconds: float) -> None:
        """Have it stop where it is, with whatever it has locked."""
        self.tell(STOPPED, seconds)
        self._goes_on_at = time.monotonic() + seconds

    @property
    def is_held(self) -> bool:
        return self._goes_on_at is not None

    def go_on_if_it_is_time(self) -> None:
        if self._goes_on_at is not None and time.monotonic() >= self._goes_on_at:
            self.process.send_signal(signal.SIGCONT)
            if self.heard_at > self._goes_on_at:
                self._goes_on_at = None

    def kill(self) -> None:
        self._goes_on_at = None
        self.process.kill()
        self._end()

    def stop(self, others: Iterable["Worker"]) -> None:
        """As an engine ends, once it works. Raises SystemExit if it does not.

        ``others`` go on meanwhile when it is time: they may have locked what it waits for.
        """
        self._goes_on_at = None
        until, told = time.monotonic() + STUCK_S, False
        while (code := self.process.poll()) is None:
            self.process.send_signal(signal.SIGCONT)
            if self.is_open and not told:
                self.process.send_signal(signal.SIGTERM)
                told = True
            for other in others:
                other.go_on_if_it_is_time()
            if time.monotonic() > until:
                self.kill()
                raise SystemExit(f"a process on {self.role} did not end")
            time.sleep(0.05)
        self._end()
        if code:
            raise SystemExit(f"a process on {self.role} ended with {code}")

    def _end(self) -> None:
        self.process.wait()
        self._listener.join()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def must_be_well(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"a process on {self.role} ended with {self.process.returncode}")
        if time.monotonic() - self.heard_at > STUCK_S:
            raise SystemExit(f"a process on {self.role} is stuck: {self.counts}")
