import os
import subprocess
import sys
import time

import pytest

from kvtiers.demo.server import Server, free_port
from kvtiers.errors import KVTiersError

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Leaves a grandchild behind and tells its pid.
WITH_CHILD = (
    """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
"""
    + HEALTHY
)
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY
SILENT = "import time; time.sleep(600)"
FAILING = """
print("INFO lots of talk")
print("ERROR cpu_bytes_to_use is too small")
print("INFO more talk")
raise SystemExit(3)
"""


@pytest.fixture
def make(tmp_path):
    made = []

    def build(script, **options):
        port = free_port()
        server = Server(
            [sys.executable, "-c", script, str(port)],
            port=port,
            log=tmp_path / "server.log",
            environment=os.environ,
            **options,
        )
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop(0.0)


def _is_alive(pid):
    status = f"/proc/{pid}/stat"
    if not os.path.exists(status):
        return False
    with open(status) as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def _gone(pid, within_s=10.0):
    """Whether ``pid``, killed by the caller, leaves the process table (its parent is init)."""
    deadline = time.monotonic() + within_s
    while _is_alive(pid):
        if time.monotonic() > deadline:
            return False
    return True


def test_ready_inside_and_gone_outside(make):
    server = make(HEALTHY)
    with server:
        assert "rc None" in repr(server)
    assert "rc -15" in repr(server)
    server.check()


def test_restart_on_the_same_port(make):
    server = make(HEALTHY)
    for _ in range(2):
        with server:
            pass
        server.check()


def test_children_of_the_server_are_gone_too(make):
    server = make(WITH_CHILD)
    with server:
        child = int(server.log.read_text().split()[1])
        assert _is_alive(child)
    assert _gone(child)


def test_an_error_inside_stops_the_server_at_once(make):
    server = make(STUBBORN)
    with pytest.raises(ZeroDivisionError), server:
        raise ZeroDivisionError
    assert "rc -9" in repr(server)


def test_a_server_that_ignores_the_request_to_end_is_killed(make):
    server = make(STUBBORN)
    server.start()
    assert server.stop(graceful_s=0.3) is False
    assert "rc -9" in repr(server)


def test_a_graceful_stop_is_told(make):
    server = make(HEALTHY)
    server.start()
    assert server.stop() is True
    assert server.stop() is True


def test_not_ready_in_time(make):
    server = make(SILENT, ready_s=0.5)
    with pytest.raises(KVTiersError, match="not ready after"):
        server.start()
    assert "rc -9" in repr(server)


def test_the_reason_of_a_failed_start_is_in_the_message(make):
    server = make(FAILING)
    with pytest.raises(KVTiersError) as raised:
        server.start()
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("the server ended with status 3 while starting")
    assert str(server.log) in first
    assert [line.strip() for line in rest] == ["ERROR cpu_bytes_to_use is too small"]


def test_a_command_that_does_not_exist_is_not_swallowed(tmp_path):
    server = Server(["/no/such/program"], port=1, log=tmp_path / "log", environment={})
    with pytest.raises(FileNotFoundError):
        server.start()
    assert server.stop() is True


def test_output_of_both_streams_goes_to_the_log(make):
    with make(WITH_CHILD) as server:
        assert server.log.read_text().startswith("child ")


def test_a_killed_owner_leaves_no_server_when_signalled(tmp_path):
    """SIGTERM to the owner unwinds its stack, which ends the server's group."""
    port = free_port()
    script = f"""
import os, signal, sys, threading
from pathlib import Path
from kvtiers.demo.main import end_on_signal
from kvtiers.demo.server import Server
end_on_signal()
command = [sys.executable, "-c", {HEALTHY!r}, "{port}"]
log = Path({str(tmp_path / "log")!r})
with Server(command, port={port}, log=log, environment=os.environ) as server:
    print(server, flush=True)
    signal.pause()
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    line = owner.stdout.readline()
    pid = int(line.split("pid ")[1].split()[0])
    assert _is_alive(pid)
    owner.terminate()
    assert owner.wait(30) == 128 + 15
    owner.stdout.close()
    assert _gone(pid)
