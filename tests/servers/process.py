"""A server as a child process: started, waited for, killed, started again at the same ports.

It leads a session of its own, so that Ctrl-C reaches pytest alone, which then stops it; a pytest
that is killed outright takes it along. It is ended by its pid, and nothing else is.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvtiers.demo.server import free_port

_POLL_S = 0.05
_LOG_LINES = 15

# Run by the child: die with the parent, then become the server. ``preexec_fn`` could deadlock in
# a process with threads. A parent that is gone already is not the one that is waited for.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def binary(name: str, package: str) -> Path:
    """The server that ``package`` puts beside the interpreter. Fails where it is missing."""
    path = Path(sys.executable).parent / name
    assert os.access(path, os.X_OK), f"{path} is missing: pip install {package}, or run make setup"
    return path


def free_ports(count: int) -> range:
    """Loopback TCP ports that nobody listens on now."""
    first = free_port(count)
    return range(first, first + count)


class ServerProcess:
    """One server. ``ready`` is asked until it says yes; ``log`` gets all output."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        ready: Callable[[], bool],
        folder: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        ready_s: float = 60,
    ) -> None:
        self.log = log
        self._command = [str(part) for part in command]
        self._ready = ready
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process and self.alive else "not running"
        return f"<{type(self).__name__} {Path(self._command[0]).name} {state}>"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it is ready. Fails with the end of its log if it gets not."""
        assert not self.alive, f"{self!r} runs already"
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*launch, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_ready(self._process)
        except BaseException:  # also pytest's KeyboardInterrupt
            self.kill()
            raise

    def kill(self) -> None:
        """End it as a crash would. What was not started, or has ended, is left alone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: int) -> None:
        """Send it a signal. Fails if it does not run."""
        assert self._process is not None, f"{self!r} cannot be signalled"
        assert self.alive, f"{self!r} cannot be signalled"
        self._process.send_signal(number)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + self._ready_s
        while not self._ready():
            assert process.poll() is None, self._failure(f"ended with {process.poll()}")
            assert time.monotonic() < end, self._failure(f"is not ready after {self._ready_s} s")
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> str:
        last = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n    ".join((f"{self._command[0]} {what}:", *last))
