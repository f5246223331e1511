"""vLLM's OpenAI-compatible server as users start it: API server, engine core and worker apart."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kvtiers.demo.server import free_port
from tests.vllm.conftest import ENVIRONMENT
from tests.vllm.offloading import shared_memory

READY_S = 200
STOP_S = 60


class Server:
    """A server process that leads a session of its own; its output goes to ``log``."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any],
        log: Path,
        *options: str,
        port: int | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """``within``: the beginning of a command that runs the rest of it somewhere else."""
        self.model = str(model)
        self.port = port or free_port()
        self.log = log
        self.regions: set[str] = set()
        defaults = "--dtype bfloat16 --enforce-eager --num-gpu-blocks-override 128"
        defaults += " --max-model-len 4096 --skip-tokenizer-init --enable-prompt-tokens-details"
        command = [*within, sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.model, "--host", "127.0.0.1", "--port", str(self.port)]
        command += [*defaults.split(), *options, "--kv-transfer-config", json.dumps(transfer)]
        environment = {k: v for k, v in ENVIRONMENT.items() if "MULTIPROCESSING" not in k}
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        inherited = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=inherited | environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Until ``/health`` answers; fails with the log if the server ends before."""
        end = time.monotonic() + READY_S
        while not self._healthy():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)
        self.regions = regions_of(self.process.pid)

    def post(self, path: str, **body: Any) -> Any:
        """The JSON that a POST is answered with."""
        return self._post(path, body, {})

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        status, text = self._request("POST", path, json.dumps(body), headers)
        assert status == 200, text
        return json.loads(text)

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        replica: int | None = None,
        **more: Any,
    ) -> tuple[tuple[int, ...], int]:
        """The tokens that follow ``prompt``, and how many of its tokens were cached.

        ``replica``: the data-parallel rank that answers, else vLLM chooses; ``more`` of the body.
        """
        body = self.completion(prompt, max_tokens, **more)
        answer = self._post("/v1/completions", body, _to(replica))
        details = answer["usage"]["prompt_tokens_details"]
        cached = details["cached_tokens"] if details else 0
        return tuple(answer["choices"][0]["token_ids"]), cached

    def completion(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """The body of a request for the tokens that follow ``prompt``."""
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    def send(self, path: str, replica: int | None = None, **body: Any) -> HTTPConnection:
        """A POST whose answer nobody reads; closing the connection ends it."""
        connection = self._connection()
        headers = {"Content-Type": "application/json", **_to(replica)}
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    def scrape(self) -> str:
        """What Prometheus would read."""
        status, text = self._request("GET", "/metrics", None)
        assert status == 200
        return text

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 while there is none."""
        for line in self.scrape().splitlines():
            match = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
            if match and match[1] == name:
                has = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                if all(has.get(k) == v for k, v in labels.items()):
                    return float(match[3])
        return 0.0

    def wait_for(self, value: float, name: str, **labels: str) -> None:
        """Until a sample has this value; statistics reach the API server with a step's output."""
        end = time.monotonic() + STOP_S
        while (found := self.value(name, **labels)) != value:
            assert time.monotonic() < end, f"{name} is {found}, not {value}"
            time.sleep(0.1)

    def end_by(self, number: signal.Signals) -> None:
        """Send a signal to the server and wait; SIGKILL goes to all of its processes."""
        assert self.regions, "no process of the server maps host memory"
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        self.process.wait(STOP_S)

    def assert_nothing_is_left(self) -> None:
        """No name in shared memory, and no process that still holds the memory."""
        end = time.monotonic() + STOP_S
        while _mapped(_processes()) & self.regions:
            assert time.monotonic() < end, f"{self.regions} are still mapped"
            time.sleep(0.1)
        assert not {Path(r).name for r in self.regions} & set(shared_memory())

    def stop(self) -> None:
        """Kill whatever is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=120)

    def _healthy(self) -> bool:
        try:
            return self._request("GET", "/health", None)[0] == 200
        except (OSError, HTTPException):
            return False

    def _request(
        self, method: str, path: str, body: str | None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        connection = self._connection()
        try:
            headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


@contextmanager
def serving(model: Path, transfer: dict[str, Any], log: Path, *options: str) -> Iterator[Server]:
    """A server that answers, gone with all its processes afterwards; ``options`` of its command."""
    server = Server(model, transfer, log, *options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def _to(replica: int | None) -> dict[str, str]:
    return {} if replica is None else {"X-data-parallel-rank": str(replica)}


def cpu_seconds(session: int, name: str) -> float:
    """What those processes of a session that are called ``name`` have spent so far."""
    ticks = 0
    for process in _processes():
        with suppress(OSError):
            called = (process / "cmdline").read_bytes().rstrip(b"\0").decode()
            if called == name and _session(process) == session:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def regions_of(session: int) -> set[str]:
    """Our regions mapped by the processes of a session."""
    return _mapped(p for p in _processes() if _session(p) == session)


def _processes() -> list[Path]:
    return [p for p in Path("/proc").iterdir() if p.name.isdigit()]


def _session(process: Path) -> int:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[3])


def _mapped(processes: Any) -> set[str]:
    found: set[str] = set()
    for process in processes:
        try:
            maps = (process / "maps").read_text()
        except OSError:
            continue
        found.update(re.findall(r"\S*/kvtiers-\S+\.region", maps))
    return found


def request(port: int, method: str, path: str, body: Any = None) -> tuple[int, str]:
    """Status and body of what a service here answers; ``body`` goes as JSON."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, body and json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


@contextmanager
def service(name: str, *options: str) -> Iterator[int]:
    """A service of the command line, as an operator starts it; its port."""
    command = [sys.executable, "-m", "kvtiers.cli", name, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline().rsplit(":", 1)[1])
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
