"""Peers beyond loopback: two engines, each in a network namespace of its own, that know keys.

Namespaces and the link between them end with the processes in them. To make them takes root, or
CAP_SYS_ADMIN and CAP_NET_ADMIN.
"""

import socket
import subprocess
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection

import pytest

from kvtiers.tiers.p2p.security import new_keys
from tests.vllm.offloading import offload
from tests.vllm.serving import Server
from tests.vllm.test_p2p import CACHED, TOKENS

PRODUCER, CONSUMER, PORT = "10.0.0.1", "10.0.0.2", 5710


@contextmanager
def namespace():
    """The number of a process that has a network of its own, with nothing in it."""
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        print("there?", file=holder.stdin, flush=True)
        there = holder.stdout.readline()
        assert there, f"no network namespace can be made here: {holder.stderr.read()}"
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def within(holder):
    """The beginning of a command that runs in a namespace."""
    return ("nsenter", f"--net=/proc/{holder}/ns/net")


def ip(holder, words):
    subprocess.run([*within(holder), "ip", *words.split()], check=True)


class Apart(Server):
    """A server in a namespace; it listens on a socket in the file system."""

    def __init__(self, model, transfer, log, holder):
        self.path = log.with_suffix(".socket")
        super().__init__(model, transfer, log, "--uds", str(self.path), within=within(holder))

    def _connection(self):
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(120)
        connection.sock.connect(str(self.path))
        return connection


def tier(host, keys, allowed):
    patient = {"handshake_deadline_s": 30, "lookup_deadline_s": 30, "silence_deadline_s": 60}
    beyond = {"keys": str(keys), "plaintext_data": True, "allowed_peers": [allowed]}
    return offload(
        lookup_deadline_s=40,
        secondary_tiers=[{"type": "p2p", "host": host, "port": PORT, **patient, **beyond}],
    )


@pytest.fixture
def engines(checkpoint, tmp_path):
    """The one that knows the other's key, and the one that knows its address too."""
    theirs, ours = tmp_path / "theirs.key", tmp_path / "ours.key"
    public = {file: new_keys(str(file)).decode() for file in (theirs, ours)}
    producer = tier(PRODUCER, theirs, public[ours])
    consumer = tier(CONSUMER, ours, f"{public[theirs]} {PRODUCER}:{PORT}")
    with ExitStack() as stack:
        first, second = (stack.enter_context(namespace()) for _ in range(2))
        ip(first, f"link add peers type veth peer name peers netns {second}")
        for holder, host in ((first, PRODUCER), (second, CONSUMER)):
            ip(holder, f"address add {host}/30 dev peers")
            ip(holder, "link set lo up")
            ip(holder, "link set peers up")
        made = []
        for holder, transfer in ((first, producer), (second, consumer)):
            log = tmp_path / f"log{len(made)}"
            made.append(Apart(checkpoint("llama"), transfer, log, holder))
            stack.callback(made[-1].stop)
        for server in made:
            server.wait_ready()
        yield made


def named(role, request, host=PRODUCER):
    where = {"kv_request_id": request, "remote_host": host, "remote_port": PORT}
    return {"kv_transfer_params": {role: where}}


@pytest.mark.timeout(400)
def test_engines_in_networks_of_their_own_bring_each_other_chunks(engines, prompt):
    producer, consumer = engines
    asked = prompt(TOKENS, 1)
    answer, _ = producer.ask(asked)
    assert consumer.ask(asked, **named("remote_kv_source", "x")) == (answer, CACHED)
    asked = prompt(TOKENS, 2)
    answer, _ = producer.ask(asked, kv_transfer_params={"remote_decoder": {"kv_request_id": "pd"}})
    assert consumer.ask(asked, **named("remote_prefiller", "pd")) == (answer, CACHED)
    asked = prompt(TOKENS, 3)
    answer, _ = producer.ask(asked)
    stranger = named("remote_kv_source", "x", "127.0.0.1")
    assert consumer.ask(asked, **stranger) == (answer, 0), "nobody whose key is unknown is dialled"
