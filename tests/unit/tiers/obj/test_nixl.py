"""``transport: nixl`` over an agent that does what a test says.

``scripts/check_nixl.py`` puts the real one to the laws.
"""

import ctypes
import threading
from types import SimpleNamespace

import pytest

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.testing.values import ManualClock
from kvtiers.tiers.obj import ObjOptions, client_of, nixl
from kvtiers.tiers.obj.client import open_client
from tests.unit.tiers.obj.obj_kit import SECRETS


class Agent:
    """As that of NIXL: an object is what its number was registered for."""

    script = ()
    """States of the transfers to come, each a list that is looked at in turn."""

    def __init__(self, name, config):
        self.name, self.parameters, self.client = name, None, None
        self.registered, self.released, self.alone = [], [], threading.Lock()
        Agent.last = self

    def create_backend(self, name, parameters):
        assert name == "OBJ"
        self.parameters = parameters

    def register_memory(self, rows, kind, backends):
        assert self.alone.acquire(blocking=False), "called by two threads at once"
        self.alone.release()
        row = SimpleNamespace(row=rows[0], kind=kind)
        row.trim = lambda: row
        self.registered.append(row)
        return row

    def deregister_memory(self, row, backends):
        self.registered.remove(row)

    def initialize_xfer(self, operation, memory, objects, name):
        assert name == self.name
        transfer = SimpleNamespace(memory=memory.row, there=objects.row, operation=operation)
        transfer.states = list(Agent.script[0]) if Agent.script else ["DONE"]
        Agent.script = Agent.script[1:]
        transfer.release = lambda: self.released.append(transfer)
        return transfer

    def transfer(self, transfer):
        if transfer.states[-1] != "DONE":
            return
        address, length, *_ = transfer.memory
        start, _, _, name = transfer.there
        if transfer.operation == "WRITE":
            self.bucket[name] = ctypes.string_at(address, length)
            Agent.client.put(name.removeprefix("kv/"), [self.bucket[name]])
        else:
            data = self.bucket[name][start : start + length]
            ctypes.memmove(address, data, len(data))

    def check_xfer_state(self, transfer):
        return transfer.states.pop(0) if len(transfer.states) > 1 else transfer.states[0]


@pytest.fixture
def agent(monkeypatch):
    api = SimpleNamespace(
        nixl_agent=Agent, nixl_agent_config=lambda backends: backends or "no other plug-in"
    )
    monkeypatch.setattr(nixl, "_api", lambda: api)
    monkeypatch.setattr(Agent, "bucket", {}, raising=False)
    Agent.script = ()
    return Agent


@pytest.fixture
def options(fake):
    options = ObjOptions(
        url="s3://bucket/kv",
        endpoint=fake.endpoint,
        allow_http=True,
        region="eu-west-1",
        access_key_id=SECRETS[0],
        secret_access_key=SECRETS[1],
        transport="nixl",
    )
    Agent.client = open_client(options)
    return options


def test_bytes_go_and_come_by_the_plug_in(agent, options):
    client = client_of(options)
    client.put("a", [b"one ", memoryview(b"object")])
    assert agent.bucket["kv/a"] == b"one object"
    assert bytes(client.get("a", 100)) == b"one object"
    assert bytes(client.get("a", 3, start=4)) == b"obj"
    assert client.size("a") == 10
    assert [stored.name for page in client.objects() for stored in page] == ["a"]
    assert agent.last.registered == [], "nothing stays registered"


def test_what_is_not_there_is_said_as_ever(agent, options):
    client = client_of(options)
    with pytest.raises(KVTiersError) as caught:
        client.get("absent", 10)
    assert caught.value.kind is Kind.VANISHED
    client.put("empty", [])
    assert client.size("empty") == 0
    with pytest.raises(KVTiersError) as caught:
        client.get("empty", 10)
    assert caught.value.kind is Kind.CORRUPT


def test_the_plug_in_is_told_what_the_options_say(agent, options):
    client_of(options)
    assert agent.last.parameters == {
        "bucket": "bucket",
        "endpoint_override": options.endpoint,
        "scheme": "http",
        "region": "eu-west-1",
        "access_key": SECRETS[0],
        "secret_key": SECRETS[1],
        "num_threads": "8",
    }
    secure = ObjOptions(url="s3://bucket", ca_bundle="/ca.pem", virtual_hosted=True)
    assert nixl.parameters(secure) == {
        "bucket": "bucket",
        "scheme": "https",
        "ca_bundle": "/ca.pem",
        "use_virtual_addressing": "true",
        "num_threads": "8",
    }


@pytest.mark.parametrize("other", [{"url": "gs://bucket"}, {"url": "s3://bucket", "profile": "p"}])
def test_what_the_plug_in_does_not_know_is_refused(other):
    with pytest.raises(ConfigError, match="it knows s3:// only, and no profile"):
        nixl.parameters(ObjOptions(**other))


def test_without_nixl_it_is_refused_in_one_sentence(options, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(nixl.importlib, "import_module", missing)
    with pytest.raises(ConfigError) as caught:
        nixl.open_nixl(options, Agent.client)
    assert str(caught.value) == (
        'transport is "nixl", which is not installed: pip install nixl, or leave it out'
    )


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ([["ERR"]], "write of .* by NIXL failed: the plug-in does not say why"),
        ([["DONE"], ["PROC", "PROC", "ERR"]], "read of .* by NIXL failed"),
    ],
)
def test_a_plug_in_that_fails_its_probe_is_refused(script, why, agent, options):
    agent.script = script
    with pytest.raises(ConfigError, match=f"plug-in does not work here: {why}.*; leave it out"):
        client_of(options)
    assert [page for page in Agent.client.objects() if page] == []


def test_a_plug_in_that_gives_other_bytes_is_refused(agent, options, monkeypatch):
    monkeypatch.setattr(
        agent,
        "transfer",
        lambda self, transfer: Agent.client.put(
            transfer.there[3].removeprefix("kv/"), [bytes(4096)]
        ),
    )
    with pytest.raises(ConfigError, match="it gives other bytes than were written"):
        client_of(options)


def test_a_plug_in_that_cannot_be_set_up_is_refused_without_its_words(agent, options, monkeypatch):
    def create_backend(self, name, parameters):
        raise RuntimeError(f"bad parameters: {parameters}")

    monkeypatch.setattr(agent, "create_backend", create_backend)
    with pytest.raises(ConfigError, match="RuntimeError while it was set up") as caught:
        client_of(options)
    assert not any(secret in f"{caught.value!r}" for secret in SECRETS)


@pytest.fixture
def plugin(agent, options):
    clock = ManualClock()
    api = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda backends: None)
    plugin = nixl.Plugin(api, options, clock, clock.advance)
    plugin.clock = clock
    return plugin


def test_a_transfer_that_does_not_end_is_given_up_and_keeps_its_memory(agent, plugin):
    agent.script = [["PROC"]]
    memory = bytearray(8)
    began = plugin.clock.now
    with pytest.raises(KVTiersError, match="no answer in time") as caught:
        plugin.read("a", 0, memoryview(memory))
    assert caught.value.kind is Kind.TIMEOUT
    assert 5.0 <= plugin.clock.now - began < 5.1
    assert repr(plugin) == "<Plugin 1 hung>"
    assert agent.last.released == []
    with pytest.raises(BufferError):
        memory.extend(b"more")
    (hung,) = [each for each, _ in plugin._hung]
    hung.states = ["DONE"]
    plugin.write("a", memoryview(bytearray(8)))
    assert repr(plugin) == "<Plugin 0 hung>"


def test_no_more_than_some_transfers_hang(agent, plugin):
    agent.script = [["PROC"]] * nixl._MAX_HUNG
    for _ in range(nixl._MAX_HUNG):
        with pytest.raises(KVTiersError, match="no answer in time"):
            plugin.read("a", 0, memoryview(bytearray(8)))
    with pytest.raises(KVTiersError, match="32 transfers do not end") as caught:
        plugin.read("a", 0, memoryview(bytearray(8)))
    assert caught.value.kind is Kind.IO


def test_after_close_it_refuses(agent, options):
    client = client_of(options)
    client.close()
    for act in (lambda: client.put("a", [b"x"]), lambda: client.get("a", 1)):
        with pytest.raises(KVTiersError) as caught:
            act()
        assert caught.value.kind is Kind.CLOSED
