"""The index over HTTP, with a publisher behind it, as ``kvtiers index`` runs it."""

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, TCPConnector

from kvtiers.cli.commands import index as command
from kvtiers.cli.main import main
from kvtiers.errors import ConfigError
from kvtiers.hashing import block_hashes, event_hash, request_extra_keys
from kvtiers.index.options import Engine, IndexOptions, parse_engine
from kvtiers.index.questions import MAX_BLOCKS
from kvtiers.index.run import Index, answering
from kvtiers.kvevents.messages import BlockStored
from tests.unit.index.index_kit import SIZE, Publisher, on_a_loop, until
from tests.unit.test_checks import broken

TOKENS = list(range(100))


def event(tokens, medium="GPU", **extra):
    digests = block_hashes(tokens, SIZE, extra_keys=request_extra_keys(**extra))
    return BlockStored(digests, None, tokens, SIZE, medium=medium)


@asynccontextmanager
async def index_of(*engines, **options):
    """An index, and what sends requests to it: (path, body) -> (status, answer)."""
    index = Index(IndexOptions(tuple(engines), port=0, **options))
    async with (
        answering(index) as port,
        ClientSession(connector=TCPConnector(force_close=True)) as session,
    ):
        url = f"http://127.0.0.1:{port}"

        async def send(path, body=None, **more):
            method = "GET" if body is None else "POST"
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            headers = {"Content-Type": "application/json", **more}
            async with session.request(method, url + path, data=data, headers=headers) as there:
                text = await there.text()
                return there.status, text if path == "/metrics" else json.loads(text)

        yield index, send
        index.check()


@on_a_loop
async def test_a_prompt_is_found_by_tokens_and_by_hashes(tmp_path):
    async with (
        Publisher(tmp_path, "a") as a,
        Publisher(tmp_path, "b") as b,
        index_of(a.engine, b.engine) as (index, send),
    ):
        await a.say(event(TOKENS), event(TOKENS[:40], "CPU"))
        await b.say(event(TOKENS[:50]), event(TOKENS, cache_salt="s"))
        await until(lambda: all(pod.places for pod in index.presence.pods.values()))
        device = {"medium": "GPU", "locality": "", "ownership": ""}
        first = {
            "pod": "a",
            "tokens": 96,
            "complete": True,
            "connected": True,
            "tiers": [device | {"tokens": 96}, device | {"medium": "CPU", "tokens": 32}],
        }
        second = first | {"pod": "b", "tokens": 48, "tiers": [device | {"tokens": 48}]}
        expected = {"tokens": 100, "block_size": SIZE, "pods": [first, second]}
        assert await send("/lookup", {"token_ids": TOKENS}) == (200, expected)
        digests = block_hashes(TOKENS, SIZE)
        for hashes in ([d.hex() for d in digests], [event_hash(d) for d in digests]):
            answer = expected | {"tokens": 96}
            assert await send("/lookup", {"hashes": hashes, "block_size": 16}) == (200, answer)
        _, salted = await send("/lookup", {"token_ids": TOKENS, "cache_salt": "s"})
        assert [(pod["pod"], pod["tokens"]) for pod in salted["pods"]] == [("b", 96)]
        assert (await send("/lookup", {"token_ids": TOKENS, "block_size": 32}))[1]["pods"] == []
        assert (await send("/lookup", {"token_ids": TOKENS, "lora": ["n", "p"]}))[1]["pods"] == []


@on_a_loop
async def test_a_question_may_be_about_one_model(tmp_path):
    async with Publisher(tmp_path, "a") as a:
        engines = [Engine(m, a.endpoint, a.replay_endpoint, model=m) for m in ("m1", "m2")]
        async with index_of(*engines) as (index, send):
            await a.say(event(TOKENS))
            await until(lambda: all(pod.places for pod in index.presence.pods.values()))
            status, found = await send("/lookup", {"token_ids": TOKENS, "model": "m2"})
            assert (status, [pod["pod"] for pod in found["pods"]]) == (200, ["m2"])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "no JSON object"),
        ({"prompt": "hi"}, "send token_ids, as the engine's /tokenize says them"),
        ({"messages": [], "model": "m"}, "send token_ids, as the engine's /tokenize"),
        ({}, "either"),
        ({"token_ids": [1], "hashes": [1]}, "either"),
        ({"token_ids": [1, "x"]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": {}}, "token_ids"),
        ({"hashes": ["zz"]}, "hashes"),
        ({"hashes": [1 << 64]}, "hashes"),
        ({"hashes": [1], "block_size": 0}, "block_size"),
        ({"hashes": [1] * 10, "block_size": 10**4299}, "block_size"),
        ({"hashes": [1] * (MAX_BLOCKS + 1), "block_size": 1}, "ask for the first"),
        ({"token_ids": [1] * (MAX_BLOCKS + 1), "block_size": 1}, "ask for the first"),
        ({"hashes": [1]}, "send block_size"),
        ({"token_ids": [1], "model": 3}, "model"),
        ({"token_ids": [1], "lora": "x"}, "lora"),
        ({"token_ids": [1], "blocksize": 16}, "blocksize"),
    ],
)
@on_a_loop
async def test_what_is_no_question_is_refused_in_one_sentence(tmp_path, body, why):
    async with Publisher(tmp_path) as engine, index_of(engine.engine) as (_, send):
        status, answer = await send("/lookup", body)
        assert (status, why in answer["error"]["message"]) == (400, True), answer


@on_a_loop
async def test_a_port_that_is_taken_names_who_may_have_it_and_the_option():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = Engine("e", "ipc:///nowhere")
        with pytest.raises(ConfigError, match=f"--port {port} cannot be listened on") as refused:
            async with answering(Index(IndexOptions((engine,), port=port))):
                pytest.fail("it listens where another does")
    assert "observers of engines and other indexes" in str(refused.value)
    assert str(refused.value).endswith("give another --port")


@on_a_loop
async def test_bounds_and_strangers(tmp_path):
    async with (
        Publisher(tmp_path) as engine,
        index_of(engine.engine, max_body_bytes=1000) as (index, send),
    ):
        assert (await send("/lookup", {"token_ids": [1] * 1000}))[0] == 413
        plain = {"Content-Type": "text/plain"}
        assert (await send("/lookup", {"token_ids": [1]}, **plain))[0] == 400
        assert (await send("/nothing"))[0] == 404
        for host, status in (("evil.example", 403), ("localhost:1", 200), ("[::1]:1", 200)):
            assert (await send("/healthz", Host=host))[0] == status
        index.service._inside = 64
        assert (await send("/lookup", {"token_ids": [1]}))[0] == 429
        index.service._inside = 65
        with broken("than may be"):
            index.service.check()
        index.service._inside = 0


@on_a_loop
async def test_pods_health_and_metrics(tmp_path):
    async with Publisher(tmp_path) as engine, index_of(engine.engine) as (index, send):
        await engine.say(event(TOKENS, "CPU"))
        await until(lambda: index.followers[0].at is not None)
        assert await send("/healthz") == (200, {"pods": 1, "connected": 1})
        _, told = await send("/pods")
        (pod,) = told["pods"]
        place = {"medium": "CPU", "locality": "", "ownership": "", "group": 0, "blocks": 6}
        assert (pod["places"], pod["complete"], pod["next"]) == ([place], True, 1)
        assert pod["groups"] == [{"group": 0, "kind": "", "block_size": 16, "window": 0}]
        await send("/lookup", {"token_ids": TOKENS})
        await send("/lookup", {"token_ids": TOKENS[1:]})
        await send("/lookup", {})
        _, text = await send("/metrics")
        for line in (
            'kvtiers_index_questions_total{answer="found"} 1.0',
            'kvtiers_index_questions_total{answer="nobody"} 1.0',
            'kvtiers_index_questions_total{answer="refused"} 1.0',
            "kvtiers_index_blocks 6.0",
            'kvtiers_index_batches_total{pod="e"} 1.0',
            'kvtiers_index_pod_connected{pod="e"} 1.0',
        ):
            assert line in text.splitlines()
        assert 'medium="CPU"' in re.search(r"kvtiers_index_pod_blocks\{(.*)\} 6.0", text)[1]


def test_it_runs_as_a_command_and_ends_on_sigterm(tmp_path):
    words = ["index", "--port", "0", "--engine", f"e=ipc://{tmp_path}/nobody"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtiers.cli", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().startswith("kvtiers index listens on http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_engines_are_read_from_the_command_line():
    text = "a=tcp://[::1]:5557,replay=tcp://h:5558,topic=kv@a,model=m"
    assert parse_engine(text) == Engine("a", "tcp://[::1]:5557", "tcp://h:5558", "kv@a", "m")
    for wrong in (
        "a",
        "a=x",
        "=tcp://h:1",
        "a=tcp://*:1",
        "a=tcp://h:1,x=y",
        "a=tcp://h:1,replay=",
    ):
        with pytest.raises(ConfigError, match="is no engine"):
            parse_engine(wrong)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "no engine"),
        (["--engine", "a=tcp://h:1", "--engine", "a=tcp://h:2"], "named twice"),
        (["--engine", "a=tcp://h:1", "--max-blocks", "0"], "--max-blocks"),
        (["--engine", "a=tcp://h:1", "--retry-s", "nan"], "--retry-s"),
        (["--engine", "a=tcp://h:1", "--port", "65536"], "--port"),
        (["--engine", "a=tcp://h:1", "--hash", "xxhash"], "--seed"),
        (["--engine", "a=tcp://h:1", "--snapshot-to", "x"], "no URL"),
    ],
)
def test_wrong_calls_are_refused(capsys, words, why):
    assert main(["index", *words]) == 2
    assert why in capsys.readouterr().err


def test_every_option_is_on_the_command_line():
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_args(["--engine", "a=tcp://h:1", "--max-body-bytes", "1MiB"])
    options = command.options_of(given)
    assert options == IndexOptions((Engine("a", "tcp://h:1"),), max_body_bytes=1 << 20)
