"""``vllm-router`` 0.1.17 chooses the engine, and the tier, that holds a conversation.

Two servers and the router as it is on PyPI, policy ``kv_aware``. What it thinks is read from its
log: which worker, and how many tokens of the prompt it credits for what is there. Its credits are
those of its defaults: 1 for the accelerator, 0.8 for host memory, 0.6 for what a tier of a name of
its own holds, as our storage does.
"""

import itertools
import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection

import pytest

from kvtiers.demo.server import free_port
from tests.vllm.offloading import CHUNK_BYTES, PEER_LOOKUP_S, disk, offload, peering
from tests.vllm.serving import READY_S, Server, request, service

pytestmark = pytest.mark.timeout(900)

TOKENS, CACHED, BLOCK = 2000, 1920, 128
DEVICE_BLOCKS = 40
HOST, STORAGE = 0.8, 0.6
PATIENCE_S = 120
COMPLETIONS = "/v1/completions"
FROM_PEER = {"name": "vllm:prompt_tokens_cached_by_source_total", "source": "p2p"}


class Engine:
    """A server with host memory and a disk, and where its events and its chunks are."""

    def __init__(self, name, model, folder, cpu_bytes, capacity_bytes):
        self.name, self.model, self.folder = name, model, folder
        self.events, self.replay, self.peers = free_port(), free_port(), free_port()
        tiers = [disk(folder / name, capacity_bytes=capacity_bytes, enable_kv_events=True)]
        tiers.append(peering(self.peers))
        self.transfer = offload(
            cpu_bytes,
            secondary_tiers=tiers,
            self_describing_kv_events=True,
            lookup_deadline_s=PEER_LOOKUP_S,
        )
        self.server = None

    def start(self):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        options = ["--num-gpu-blocks-override", str(DEVICE_BLOCKS)]
        options += ["--kv-events-config", json.dumps(events)]
        port = None if self.server is None else self.server.port
        self.server = Server(
            self.model, self.transfer, self.folder / f"{self.name}.log", *options, port=port
        )

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}"

    def fill_device(self, prompt, first_seed):
        """Other prompts until nothing else is left on the device."""
        for seed in range(first_seed, first_seed + 3):
            self.server.ask(prompt(TOKENS, seed), 1)


class Router:
    """The router, as an operator starts it."""

    def __init__(self, engines, log):
        self.port, self.log = free_port(), log
        self.names = {engine.url: engine.name for engine in engines}
        self.model = str(engines[0].model)
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "kv_aware"]
        command += ["--worker-urls", *self.names, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-port", str(free_port()), "--log-level", "debug"]
        command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", self.model]
        for e in engines:
            command += ["--kv-event-source", f"{e.url}=tcp://127.0.0.1:{e.events}"]
            command += ["--kv-event-replay-source", f"{e.url}=tcp://127.0.0.1:{e.replay}"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def wait_ready(self):
        end = time.monotonic() + READY_S
        while not self._ready():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def _ready(self):
        try:
            return self.request("GET", "/readiness")[0] == 200
        except OSError:
            return False

    def request(self, method, path, body=None):
        return request(self.port, method, path, body)

    def decisions(self):
        """Worker and credited tokens of each request so far."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())
        found = re.findall(r'KV prefix decision .*worker="([^"]*)".*credited_\w+=(\d+)', text)
        return [(self.names[url], int(credited)) for url, credited in found]

    def thinks_of(self, tokens):
        """Which engine a prompt would go to, and with how many tokens credited.

        The engine refuses what is asked, so that nothing changes.
        """
        before = len(self.decisions())
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": -1}
        status, text = self.request("POST", "/v1/completions", body)
        assert status == 400, text
        return self.wait_for(lambda: self.decisions()[before:], bool)[-1]

    def wait_for(self, look, right):
        """What ``look`` gives once that is right: events are on their way."""
        end = time.monotonic() + PATIENCE_S
        while not right(found := look()):
            assert time.monotonic() < end, found
            time.sleep(0.1)
        return found

    def comes_to_think(self, tokens, *expected):
        self.wait_for(lambda: self.thinks_of(tokens), lambda thought: thought == expected)

    def ask(self, tokens):
        """Which engine answered, and how many tokens were cached there.

        The body is plain: the router scores nothing where it does not know a field.
        """
        before = len(self.decisions())
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        status, text = self.request("POST", "/v1/completions", body)
        assert status == 200, text
        (name, _), *_ = self.wait_for(lambda: self.decisions()[before:], bool)
        return name, json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stop(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def routing(engines, log):
    router = Router(engines, log)
    try:
        router.wait_ready()
        yield router
    finally:
        router.stop()


def indexing(engines):
    """``kvtiers index`` of these engines; its port."""
    options = []
    for e in engines:
        address = f"{e.name}=tcp://127.0.0.1:{e.events},replay=tcp://127.0.0.1:{e.replay}"
        options += ["--engine", address]
    return service("index", *options)


def fronting(engines, index):
    """``kvtiers proxy`` before these engines, which asks the index; its port."""
    options = ["--slack", "0", "--index", f"http://127.0.0.1:{index}", "--index-timeout-s", "30"]
    for e in engines:
        options += ["--worker", f"{e.url},p2p=127.0.0.1:{e.peers},pod={e.name}"]
    return service("proxy", *options)


def holders_of(port, tokens):
    """By engine: whether all it said is known, and tokens by medium and owner."""
    status, text = request(port, "POST", "/lookup", {"token_ids": tokens, "block_size": BLOCK})
    assert status == 200, text
    return {
        pod["pod"]: (
            pod["complete"],
            {(t["medium"], t["ownership"]): t["tokens"] for t in pod["tiers"]},
        )
        for pod in json.loads(text)["pods"]
    }


def comes_to_know(port, tokens, expected):
    end = time.monotonic() + PATIENCE_S
    while (found := holders_of(port, tokens)) != expected:
        assert time.monotonic() < end, found
        time.sleep(0.1)


def fetches_from_the_holder_while_that_is_busy(index, holder, idle, held, asked):
    """Both prompts are held by one engine. It gets the first; the other one fetches the second."""
    before = idle.server.value(**FROM_PEER)
    with fronting((idle, holder), index) as proxy:
        with closing(HTTPConnection("127.0.0.1", proxy, timeout=120)) as busy:
            long = json.dumps(holder.server.completion(held, 3500, stream=True))
            busy.request("POST", COMPLETIONS, long, {"Content-Type": "application/json"})
            assert busy.getresponse().read(1), "it is being answered"
            body = holder.server.completion(asked, 8)
            status, text = request(proxy, "POST", COMPLETIONS, body)
        assert status == 200, text
        _, counts = request(proxy, "GET", "/metrics")
    assert 'kvtiers_proxy_index_lookups_total{outcome="found"} 2.0' in counts
    assert "kvtiers_proxy_sources_named_total 1.0" in counts
    answer = json.loads(text)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED
    idle.server.wait_for(before + CACHED, **FROM_PEER)
    tokens = tuple(answer["choices"][0]["token_ids"])
    assert (tokens, CACHED) == idle.server.ask(asked), "a device hit of that length"


def credit(part):
    return int(part * CACHED)


def test_a_conversation_returns_to_the_engine_and_tier_that_hold_it(checkpoint, prompt, tmp_path):
    chunk, model = CHUNK_BYTES["llama"], checkpoint("llama")
    roomy = Engine("roomy", model, tmp_path, 64e6, 10 << 30)
    small = Engine("small", model, tmp_path, 20 * chunk, 75 * chunk)
    ours, theirs, both = (prompt(TOKENS, seed) for seed in (1, 2, 3))
    with ExitStack() as stack:
        for engine in (roomy, small):
            engine.start()
            stack.callback(lambda engine=engine: engine.server.stop())
        for engine in (roomy, small):
            engine.server.wait_ready()
        with routing((roomy, small), tmp_path / "router.log") as router:
            # On the device: where it was computed.
            roomy.server.ask(ours, 1)
            small.server.ask(theirs, 1)
            router.comes_to_think(ours, "roomy", CACHED)
            router.comes_to_think(theirs, "small", CACHED)
            assert router.ask(ours) == ("roomy", CACHED)

            # Evicted from the device: for the sake of host memory, and of the disk.
            roomy.fill_device(prompt, 10)
            small.fill_device(prompt, 20)
            router.comes_to_think(ours, "roomy", credit(HOST))
            router.comes_to_think(theirs, "small", credit(STORAGE))
            assert router.ask(theirs) == ("small", CACHED), "from its disk"
            router.comes_to_think(theirs, "small", CACHED)

            # Held by both: the better tier decides.
            small.server.ask(both, 1)
            small.fill_device(prompt, 30)
            roomy.server.ask(both, 1)
            roomy.fill_device(prompt, 40)
            router.comes_to_think(both, "roomy", credit(HOST))

            # Evicted everywhere: no longer. How many others that takes depends on the disk: what
            # leaves host memory before the disk took it never gets there.
            others = (prompt(TOKENS, seed) for seed in itertools.count(50))
            while router.thinks_of(theirs)[1]:
                small.server.ask(next(others), 1)

        # After a restart of the router: it has everything replayed when it hears of the next event.
        with routing((roomy, small), tmp_path / "again.log") as router:
            assert router.thinks_of(ours)[1] == 0
            roomy.server.ask(prompt(300, 4), 1)
            router.comes_to_think(ours, "roomy", credit(HOST))

            # After a restart of an engine: what its disk holds is told of again.
            roomy.server.stop()
            roomy.start()
            roomy.server.wait_ready()
            roomy.server.ask(prompt(300, 5), 1)
            router.comes_to_think(ours, "roomy", credit(STORAGE))
            assert router.ask(ours) == ("roomy", CACHED)

        # Our own index, which comes last, knows the same.
        with indexing((roomy, small)) as port:
            everywhere = {("GPU", ""), ("CPU", ""), ("STORAGE", "1:fs")}
            expected = {"roomy": (True, dict.fromkeys(everywhere, CACHED))}
            comes_to_know(port, ours, expected)

            # And so does our proxy, which saw none of it.
            held = prompt(300, 5)
            router.wait_for(lambda: holders_of(port, held), lambda found: found.keys() == {"roomy"})
            fetches_from_the_holder_while_that_is_busy(port, roomy, small, held, ours)
