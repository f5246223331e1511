"""``kvtiers proxy`` before two real servers: prefill on the one, decode on the other, at once."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path

import pytest

from kvtiers.demo.server import free_port
from tests.vllm.offloading import offload
from tests.vllm.serving import Server, service

MODEL = Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct"
CHAT = "/v1/chat/completions"
BLOCK = 128
LONG_ARTICLES, LONG = 120, 14
"""Articles of a long question, and blocks that it has at least."""
DEADLINE_S = 60
"""``park_deadline_s`` of the tier."""
OPTIONS = ("--no-skip-tokenizer-init", "--max-num-batched-tokens", "512")
"""A long prompt takes several steps, so that an engine can be killed between them."""
RUNNING = "vllm:num_requests_running"
PROMPTS = {"name": "vllm:prompt_tokens_total"}
FROM_PEER = {"name": "vllm:prompt_tokens_cached_by_source_total", "source": "p2p"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers of one model, and the ports at which they answer peers.

    A thread each: with more threads than cores OpenMP teams spin against each other.
    """
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("OMP_NUM_THREADS", "1")
        made = []
        for name in ("prefill", "decode"):
            port = free_port()
            transfer = offload(256e6, secondary_tiers=[{"type": "p2p", "port": port}])
            server = Server(MODEL, transfer, logs / name, *OPTIONS)
            stack.callback(server.stop)
            made.append((server, port))
        for server, _ in made:
            server.wait_ready()
        yield made


def proxied(*options):
    """The port of a proxy, as an operator starts it."""
    return service("proxy", *options)


def worker(server, peers):
    return f"http://127.0.0.1:{server.port},p2p=127.0.0.1:{peers}"


@pytest.fixture(scope="module")
def proxy(servers):
    """Prefill and decode apart."""
    prefill, decode = (worker(*server) for server in servers)
    with proxied("--prefill", prefill, "--decode", decode) as port:
        yield port


@pytest.fixture
def symmetric(servers):
    """A worker with a request more than the idlest one is too busy for another."""
    first, second = (worker(*server) for server in servers)
    with proxied("--worker", first, "--worker", second, "--slack", "0") as port:
        yield port


def streamed(port, body):
    """What a stream says: text, tokens with probabilities and why it ended; and the usage.

    How many tokens come in one event depends on who is faster, the engine or its server.
    """
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", CHAT, json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
        assert response.headers["Content-Type"].startswith("text/event-stream")
    *events, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    tokens = [t for c in choices if c.get("logprobs") for t in c["logprobs"]["content"]]
    endings = [c["finish_reason"] for c in choices if c["finish_reason"]]
    return (text, tokens, endings), events[-1]["usage"]


def asked(what, articles=25):
    """A long question whose answer is streamed."""
    rights = (f"Article {n}: everyone has the right to {n} {what}." for n in range(articles))
    article = " ".join(rights)
    return {
        "model": str(MODEL),
        "messages": [{"role": "user", "content": f"{article} How many {what} are that?"}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.timeout(300)
def test_a_streamed_chat_is_that_of_a_single_engine_and_its_prompt_came_from_prefill(
    servers, proxy
):
    (prefill, _), (decode, _) = servers
    body = asked("apples")
    before = decode.value(**FROM_PEER)
    answer, usage = streamed(proxy, body)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK > 2 * BLOCK
    decode.wait_for(before + cached, **FROM_PEER)
    single, usage = streamed(prefill.port, body)
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached, "a device hit of that length"
    assert single == answer
    assert answer[0]


def idlest(servers, asked_before):
    """The one of both that was asked nothing since."""
    while True:
        asked_since = [
            server.value(**PROMPTS) > before
            for (server, _), before in zip(servers, asked_before, strict=True)
        ]
        if any(asked_since):
            return servers[asked_since.index(False)][0]
        time.sleep(0.05)


def forget(server):
    """Take all it has from an engine, once nothing is in use there."""
    while not server.post("/reset_prefix_cache?reset_external=true")["success"]:
        time.sleep(0.05)


def move(port, idle, first, second, salt):
    """Seconds of the second turn on the idle engine: moved there, and computed there.

    The other one is busy with the conversation meanwhile.
    """
    forget(idle)
    brought = idle.value(**FROM_PEER)
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as busy:
        long = json.dumps(first | {"max_tokens": 1500, "ignore_eos": True})
        busy.request("POST", CHAT, long, {"Content-Type": "application/json"})
        assert busy.getresponse().read(1), "it is being answered"
        began = time.perf_counter()
        moved, told = streamed(port, second)
        moved_s = time.perf_counter() - began
        streamed(idle.port, second | {"cache_salt": salt})
        computed_s = time.perf_counter() - began - moved_s
    cached = told["prompt_tokens_details"]["cached_tokens"]
    assert cached >= LONG * BLOCK
    idle.wait_for(brought + cached, **FROM_PEER)
    hit, told = streamed(idle.port, second)
    assert told["prompt_tokens_details"]["cached_tokens"] == cached, "a device hit of that length"
    assert hit == moved
    return moved_s, computed_s


@pytest.mark.timeout(400)
def test_a_conversation_moves_to_the_idle_engine_faster_than_it_is_computed(servers, symmetric):
    """There and back again. What else the machine does only adds, so the shortest times count."""
    first = asked("plums", LONG_ARTICLES)
    asked_before = [server.value(**PROMPTS) for server, _ in servers]
    (text, *_), _ = streamed(symmetric, first)
    idle = idlest(servers, asked_before)
    busy = next(server for server, _ in servers if server is not idle)
    turns = [{"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    second = first | {"messages": first["messages"] + turns, "max_tokens": 1}
    rounds = []
    for n in range(3):
        rounds.append(move(symmetric, idle, first, second, f"anew {n}"))
        idle, busy = busy, idle  # it was moved
    moved_s, computed_s = map(min, zip(*rounds, strict=True))
    assert moved_s < 0.6 * computed_s, f"seconds moved and computed: {rounds}"


def counted(port, name):
    """A number of the proxy's own."""
    status, text = said(port, "GET", "/metrics")
    assert status == 200
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def said(port, method, path, body=None):
    with closing(HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, body and json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def words(answer):
    text, tokens, endings = answer
    return text, [token["token"] for token in tokens], endings


@pytest.mark.timeout(300)
def test_prefill_is_killed_in_mid_prompt_and_decode_answers_all_by_itself(servers, proxy):
    """That request, and the next one. Only the last test comes after it."""
    (prefill, _), (decode, _) = servers
    long, failed = asked("pears", LONG_ARTICLES), 'kvtiers_proxy_prefills_total{ending="failed"}'
    assert counted(proxy, failed) == 0
    with ThreadPoolExecutor(1) as thread:
        answering = thread.submit(streamed, proxy, long)
        prefill.wait_for(1, RUNNING)
        prefill.end_by(signal.SIGKILL)
        began = time.monotonic()
        answer, usage = answering.result()
    assert time.monotonic() - began < DEADLINE_S, "decode would have waited no longer by itself"
    assert counted(proxy, failed) == 1, "it was killed before it was done"
    assert usage["completion_tokens"] == 8
    single, _ = streamed(decode.port, long | {"cache_salt": "computed anew"})
    assert words(single) == words(answer)
    before, short = decode.value(**FROM_PEER), asked("quinces")
    answer, _ = streamed(proxy, short)
    assert decode.value(**FROM_PEER) == before
    single, usage = streamed(decode.port, short | {"cache_salt": "computed anew"})
    assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens")
    assert single == answer


@pytest.mark.timeout(300)
def test_decode_is_killed_in_mid_stream_and_the_client_is_told_by_a_cut(servers, proxy):
    """Nobody is left, and whoever comes later is told so. The last one here."""
    _, (decode, _) = servers
    body = asked("figs") | {"max_tokens": 1500, "ignore_eos": True}
    with closing(HTTPConnection("127.0.0.1", proxy, timeout=DEADLINE_S)) as connection:
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.read(1), "it is being answered"
        decode.end_by(signal.SIGKILL)
        with pytest.raises((IncompleteRead, ConnectionError)) as cut:
            response.read()
    assert b"[DONE]" not in getattr(cut.value, "partial", b"")
    assert counted(proxy, 'kvtiers_proxy_requests_total{ending="broken"}') == 1
    for _ in range(4):  # three failures in a row, then it is known
        status, text = said(proxy, "POST", CHAT, body)
        assert status in (502, 503), text
        assert json.loads(text)["error"]["message"].endswith(".")
    assert status == 503
    assert said(proxy, "GET", "/health")[0] == 503
