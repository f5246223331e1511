"""A presence index behind the proxy: whom it names, and that nothing depends on it."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvtiers.errors import ConfigError
from kvtiers.proxy.asked import CHAT, COMPLETIONS, read
from kvtiers.proxy.holders import holders_in, question, to_tokenize, tokens_in, tokens_of
from kvtiers.proxy.options import Address, parse_address, parse_index
from kvtiers.proxy.workers import Holder, Pool
from tests.unit.proxy.proxy_kit import Worker, front, held, on_a_loop

TOKENS = [1, 2, 3]


def tier(medium, tokens):
    return {"medium": medium, "locality": "", "ownership": "", "tokens": tokens}


def pod(name, tokens=64, *tiers, connected=True):
    tiers = list(tiers) or [tier("CPU", tokens)]
    return {"pod": name, "tokens": tokens, "connected": connected, "tiers": tiers}


class Index:
    """An index that answers as told, and engines' ``/tokenize`` beside it."""

    def __init__(self):
        self.pods = []
        self.asked = []
        self.gate = None
        """Answers once it is set."""

    async def __aenter__(self):
        application = web.Application()
        application.router.add_post("/lookup", self._lookup)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error):
        await self._runner.cleanup()

    async def _lookup(self, request):
        self.asked.append(await request.json())
        if self.gate is not None:
            await self.gate.wait()
        return web.json_response({"pods": self.pods})


@asynccontextmanager
async def indexed(**options):
    """An index, two workers and a client of the proxy before them."""
    options = {"index_timeout_s": 5.0, **options}
    one, two = Worker(), Worker()
    async with (
        Index() as index,
        front(workers=(one, two), index=index.url, **options) as client,
    ):
        index.pods = [pod(two.url[7:])]
        yield index, one, two, client


async def complete(client):
    assert (await client.ask(COMPLETIONS, prompt=TOKENS))[0] == 200


@on_a_loop
async def test_who_holds_a_prompt_by_the_index_gets_it():
    async with indexed() as (index, one, two, client):
        for _ in range(3):
            await complete(client)
        assert (len(one.asked), len(two.asked)) == (0, 3)
        assert index.asked == [{"token_ids": TOKENS}] * 3
        assert (await client.counts())['index_lookups_total{outcome="found"}'] == 3


@on_a_loop
async def test_who_is_busy_is_named_as_a_source():
    async with indexed(slack=0) as (_, one, two, client):
        gate = asyncio.Event()
        two.behave = held(gate)
        first = asyncio.create_task(complete(client))
        await two.arrived.wait()
        await complete(client)
        gate.set()
        await first
        source = one.params[0]["remote_kv_source"]
        assert source["remote_port"] == two.address.p2p_port


@on_a_loop
async def test_text_is_tokenized_by_a_worker_as_it_would_itself():
    async with indexed() as (index, one, two, client):
        for worker in (one, two):
            worker.tokens = TOKENS
        assert (await client.chat("hello", model="m", cache_salt="s", temperature=0))[0] == 200
        assert index.asked == [{"token_ids": TOKENS, "cache_salt": "s"}]
        (body,) = one.tokenized + two.tokenized
        assert body == {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@on_a_loop
async def test_without_tokens_the_index_is_not_asked():
    async with indexed() as (index, _, _, client):
        assert (await client.chat("hello"))[0] == 200
        assert index.asked == []
        assert (await client.counts())['index_lookups_total{outcome="untokenized"}'] == 1


@on_a_loop
async def test_an_index_that_is_late_is_not_waited_for_and_soon_left_alone():
    async with indexed(index_timeout_s=0.05) as (index, _, _, client):
        index.gate = asyncio.Event()
        for _ in range(5):
            await complete(client)
        assert len(index.asked) == 3
        assert (await client.counts())['index_lookups_total{outcome="failed"}'] == 3
        index.gate.set()


@on_a_loop
async def test_nonsense_and_strangers_are_left_alone():
    async with indexed() as (index, _, _, client):
        for pods in ([pod("elsewhere")], [], {"x": 1}, [{"pod": 1}], [pod("x", connected=False)]):
            index.pods = pods
            await complete(client)


def asked_for(path=COMPLETIONS, **body):
    return read(path, json.dumps(body).encode(), 1, pass_params=False)


def test_what_is_asked_for_a_request():
    text = asked_for(prompt="x", model="m", max_tokens=3, add_special_tokens=False)
    assert tokens_in(text) is None
    assert json.loads(to_tokenize(text)) == {
        "model": "m",
        "prompt": "x",
        "add_special_tokens": False,
    }
    assert tokens_in(asked_for(prompt=TOKENS)) == TOKENS
    chat = asked_for(CHAT, messages=[], tools=[1], chat_template="t", stream=True)
    assert json.loads(to_tokenize(chat)) == {"messages": [], "tools": [1], "chat_template": "t"}
    assert json.loads(question(chat, TOKENS)) == {"token_ids": TOKENS}
    assert [tokens_of(raw) for raw in (b'{"tokens": [1]}', b"{}", b"[", b"[1]")] == [
        [1],
        None,
        None,
        None,
    ]


def test_answers_of_the_index():
    pods = [pod("a", 64, tier("GPU", 64), tier("CPU", 32)), pod("b", 16, tier("GPU", 16))]
    answer = json.dumps({"pods": [*pods, pod("c", connected=False)]}).encode()
    assert holders_in(answer) == (Holder("a", 64, 32), Holder("b", 16, 0))
    for wrong in (b"{", b"{}", b'{"pods": [1]}', b'{"pods": [{}]}'):
        with pytest.raises(ValueError, match=r"."):
            holders_in(wrong)


def test_the_index_goes_before_affinity():
    addresses = [Address(f"http://{name}:80", name, 1, pod=name) for name in "abc"]
    pool = Pool("w", addresses, 4)
    a, b, c = pool.workers
    pool.affinity.note((1,), a)
    holders = [Holder("x", 99, 99), Holder("b", 64, 0), Holder("c", 32, 32)]
    assert pool.choose((1,)) is pool.source_for((1,)) is a
    assert pool.choose((1,), (), holders) is b
    assert pool.source_for((1,), holders) is c, "a peer gets nothing from the accelerator"
    assert pool.source_for((1,), holders[:2]) is a
    assert pool.choose((1,), (b,), holders) is a


def test_how_a_worker_is_called_by_the_index():
    assert parse_address("http://a:80,pod=n,p2p=b:7") == Address("http://a:80", "b", 7, "n")
    assert Pool("w", [parse_address("http://a:80")], 4).workers[0].pod == "a:80"
    for wrong in ("http://a,pod=", "http://a,pod=n,pod=m"):
        with pytest.raises(ConfigError, match="is no worker"):
            parse_address(wrong)
    assert parse_index("http://h:1/") == "http://h:1"
    with pytest.raises(ConfigError, match="is no index"):
        parse_index("h:1")
