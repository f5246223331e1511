"""``kvtiers proxy`` before two real servers: prefill on the one, decode on the other, at once."""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from kvtiers.demo.server import free_port
from tests.vllm.offloading import offload
from tests.vllm.serving import Server

MODEL = Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct"
CHAT = "/v1/chat/completions"
BLOCK = 128
FROM_PEER = {"name": "vllm:prompt_tokens_cached_by_source_total", "source": "p2p"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers of one model, and the ports at which they answer peers."""
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        made = []
        for name in ("prefill", "decode"):
            port = free_port()
            transfer = offload(128e6, secondary_tiers=[{"type": "p2p", "port": port}])
            server = Server(MODEL, transfer, logs / name, "--no-skip-tokenizer-init")
            stack.callback(server.stop)
            made.append((server, port))
        for server, _ in made:
            server.wait_ready()
        yield made


@pytest.fixture(scope="module")
def proxy(servers):
    """The port of a proxy before them, as an operator starts it."""
    (prefill, peers), (decode, _) = servers
    command = [sys.executable, "-m", "kvtiers.cli", "proxy", "--port", "0"]
    command += ["--prefill", f"http://127.0.0.1:{prefill.port},p2p=127.0.0.1:{peers}"]
    command += ["--decode", f"http://127.0.0.1:{decode.port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline().rsplit(":", 1)[1])
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def streamed(port, body):
    """What a stream says: choices of its events, and the usage at its end."""
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
    return [event["choices"] for event in events], events[-1]["usage"]


def asked(what):
    """A long question whose answer is streamed."""
    article = " ".join(f"Article {n}: everyone has the right to {n} {what}." for n in range(25))
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
    assert "".join(c["delta"].get("content") or "" for cs in answer for c in cs)


@pytest.mark.timeout(300)
def test_prefill_is_killed_and_decode_answers_all_by_itself(servers, proxy):
    """The last one here."""
    (prefill, _), (decode, _) = servers
    before = decode.value(**FROM_PEER)
    prefill.end_by(signal.SIGKILL)
    answer, usage = streamed(proxy, asked("pears"))
    assert usage["completion_tokens"] == 8
    assert decode.value(**FROM_PEER) == before
    single, usage = streamed(decode.port, asked("pears") | {"cache_salt": "computed anew"})
    assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens")
    assert single == answer
