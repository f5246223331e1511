"""A server as a child process: started, waited for, stopped with all its descendants."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType

from kvtiers.errors import Kind, KVTiersError

READY_S = 240.0
"""Seconds a server may take to start; a slow machine needs 60."""
STOP_S = 60.0
_POLL_S = 0.2
_LOG_LINES = 15


def free_port(in_a_row: int = 1) -> int:
    """The first of so many loopback TCP ports that nobody listens on now.

    They lie below those that Linux gives to whoever asks for any, or connects: such a one may be
    taken before the server that it is for has started.
    """
    while True:
        first = random.randrange(16384, 32768 - in_a_row)
        if all(map(_is_free, range(first, first + in_a_row))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Server:
    """One server process and the process group it leads; its output goes to ``log``.

    As a context manager: started and healthy inside, gone with all its children outside.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        environment: Mapping[str, str],
        ready_s: float = READY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = port
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._ready_s = ready_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        process = self._process
        state = "not started" if process is None else f"pid {process.pid} rc {process.poll()}"
        return f"<Server port={self.port} {state}>"

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error nobody needs what a graceful stop would still write.
        self.stop(STOP_S if kind is None else 0.0)

    def start(self) -> None:
        """Start and wait until ``/health`` answers 200.

        Raises KVTiersError with the end of the log if the process ends or the deadline passes.
        """
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_healthy(self._process)
        except BaseException:
            self.stop(0.0)
            raise

    def stop(self, graceful_s: float = STOP_S) -> bool:
        """Ask the process to end, then kill what is left of its group.

        Returns whether the process ended by itself within ``graceful_s`` seconds.
        """
        process = self._process
        if process is None:
            return True
        graceful = True
        if process.poll() is None:
            graceful = graceful_s > 0 and _terminate(process, graceful_s)
        _kill_group(process.pid)
        process.wait()
        return graceful

    def check(self) -> None:
        """Raise AssertionError if a stopped server left the port taken."""
        stopped = self._process is None or self._process.poll() is not None
        assert not (stopped and _is_healthy(self.port)), f"{self!r} still answers"

    def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = self._clock() + self._ready_s
        while not _is_healthy(self.port):
            if self._clock() >= deadline:
                raise self._failure(f"the server is not ready after {self._ready_s:.0f} s")
            try:
                code = process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            raise self._failure(f"the server ended with status {code} while starting")

    def _failure(self, what: str) -> KVTiersError:
        lines = self.log.read_text(errors="replace").splitlines()
        # vLLM logs one ERROR line that says why, far above its last lines.
        errors = [line for line in lines if "ERROR" in line][-_LOG_LINES:]
        tail = "\n".join(f"    {line}" for line in (errors or lines[-_LOG_LINES:]))
        return KVTiersError(
            f"{what}; all of its output is in {self.log}:\n{tail}",
            kind=Kind.IO,
            operation="demo",
            context={"log": str(self.log)},
        )


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _terminate(process: subprocess.Popen[bytes], graceful_s: float) -> bool:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(graceful_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_group(leader: int) -> None:
    """Kill the group that ``leader`` leads; its number stays taken while a member lives."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
