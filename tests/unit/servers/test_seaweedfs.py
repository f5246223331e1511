"""The server that tests of object storage talk to."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import S3Store

from tests.servers.process import ServerProcess, binary
from tests.servers.seaweedfs import seaweedfs


def store(server, bucket, **config):
    return S3Store(
        bucket,
        config={"endpoint": server.endpoint, "region": server.region, **config},
        client_options={"allow_http": True},
    )


def test_what_was_stored_is_there_after_a_crash(s3, bucket):
    obstore.put(store(s3, bucket), "a/b", b"x" * 300_000)
    s3.kill()
    assert not s3.process.alive
    s3.start()
    assert bytes(obstore.get(store(s3, bucket), "a/b").bytes()) == b"x" * 300_000


def test_buckets_are_empty_and_apart(s3, bucket):
    other = s3.new_bucket()
    obstore.put(store(s3, bucket), "a", b"x")
    assert list(obstore.list(store(s3, other))) == []


def test_a_test_may_leave_it_dead(s3):
    s3.kill()


def test_the_next_one_has_it_back(s3, bucket):
    obstore.put(store(s3, bucket), "a", b"x")


def test_credentials_matter(s3, bucket):
    with pytest.raises(PermissionDeniedError):
        obstore.put(store(s3, bucket, secret_access_key="another"), "a", b"x")


def test_nothing_of_it_is_left():
    with seaweedfs() as server:
        process, folder = server.process, server.process.log.parent
        assert process.alive
        assert all(path.exists() for path in server._sockets)
    assert not process.alive
    assert not folder.exists()
    assert not any(path.exists() for path in server._sockets)


def test_a_binary_that_is_missing_is_named_in_one_sentence():
    with pytest.raises(AssertionError, match=r"no-such-server is missing: pip install some-wheel"):
        binary("no-such-server", "some-wheel")


def test_a_server_that_ends_is_told_with_its_log(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no room for it')"]
    server = ServerProcess(
        command, ready=lambda: False, folder=tmp_path, log=tmp_path / "log", ready_s=60
    )
    with pytest.raises(AssertionError, match=r"(?s)ended with 1:.*no room for it"):
        server.start()
    assert not server.alive


def test_a_server_goes_with_a_parent_that_is_killed(tmp_path):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.servers.process import ServerProcess\n"
        "folder = Path(sys.argv[1])\n"
        "server = ServerProcess([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "    ready=lambda: True, folder=folder, log=folder / 'log')\n"
        "server.start()\n"
        "print(server._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        start_new_session=True,
    )
    server = int(parent.stdout.readline())
    end = os.pidfd_open(server)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert select.select([end], [], [], 30)[0], "the server outlives its parent"
    os.close(end)
