"""Routers hear where the blocks of a real engine are, also after a restart."""

import time

import pytest
import zmq

from kvtiers.kvevents.messages import END_OF_REPLAY, BlockRemoved, BlockStored, decode
from tests.unit.kvevents.readers import Dynamo, Llmd
from tests.vllm.offloading import connector_of, disk, offload, settle

TOKENS = 2000
CHUNKS = 15
BLOCK = 128
HOST, DISK = "CPU", "STORAGE"
OWNERS = {HOST: None, DISK: "1:fs"}


class Ear:
    """A subscriber. What it hears is read by strict readers at once."""

    def __init__(self, folder):
        self.endpoint = f"ipc://{folder}/pub"
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(self.endpoint)
        self.heard = []
        self.seq = -1
        self.described = True
        self.llmd, self.dynamo = Llmd(), Dynamo(BLOCK)

    def options(self):
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "topic": "kv@pod@m",
        }

    def listen(self, until, timeout_s=60.0):
        """Read messages until what was heard is enough."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert self.socket.poll(1000 * (deadline - time.monotonic())), self.heard
            self.hear()

    def hear(self):
        topic, seq, payload = self.socket.recv_multipart()
        assert topic == b"kv@pod@m"
        assert int.from_bytes(seq, "big") == self.seq + 1
        self.seq += 1
        self.llmd.read(payload)
        if self.described:
            self.dynamo.read(payload)
        self.heard += decode(payload).events

    def heard_all(self):
        """Read what is there; True."""
        while self.socket.poll(0):
            self.hear()
        return True

    def of(self, kind, medium):
        return [e for e in self.heard if isinstance(e, kind) and e.medium == medium]

    def count(self, kind, medium):
        return sum(len(e.block_hashes) for e in self.of(kind, medium))

    def close(self):
        self.socket.close(linger=0)


@pytest.fixture
def ear(tmp_path):
    ear = Ear(tmp_path)
    yield ear
    ear.close()


def config(root, cpu_bytes=64e6, **extra):
    tiers = [disk(root / "disk", enable_kv_events=True)]
    extra = {"self_describing_kv_events": True} | extra
    return offload(cpu_bytes, secondary_tiers=tiers, **extra)


def at_rest(engine):
    """Nothing in flight, and what is to be said was handed over."""
    settle(engine)
    connector_of(engine).connector_scheduler._tracker.announcer.check()


def test_tiers_are_told_of_with_tokens(engine, prompt, tmp_path, ear):
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=config(tmp_path), kv_events_config=ear.options()) as e:
        e.ask(asked)
        at_rest(e)
        ear.listen(lambda: ear.count(BlockStored, DISK) == CHUNKS)
        assert ear.count(BlockStored, HOST) == CHUNKS
        for medium, owner in OWNERS.items():
            for event in ear.of(BlockStored, medium):
                assert (event.ownership, event.locality) == (owner, "LOCAL")
                assert event.block_size == BLOCK
                assert event.kv_cache_spec_kind == "full_attention"
        device = [e for e in ear.heard if e.medium == "GPU" and isinstance(e, BlockStored)]
        told = {h for e in device for h in e.block_hashes}
        assert {*ear.llmd.held("storage")} <= told, "blocks have the names of device events"
        for tier in ("cpu", "storage"):
            assert ear.llmd.longest(asked, BLOCK, tier) == CHUNKS * BLOCK


def test_evictions_and_a_restart(engine, prompt, tmp_path, ear):
    asked = prompt(TOKENS)
    settings = config(tmp_path, 10e6)  # of 19 chunks
    with engine(kv_transfer_config=settings, kv_events_config=ear.options()) as e:
        e.ask(asked)
        at_rest(e)
        ear.listen(lambda: ear.count(BlockStored, DISK) == CHUNKS)
        e.ask(prompt(TOKENS, seed=1))
        at_rest(e)
        ear.listen(lambda: ear.count(BlockStored, DISK) == 2 * CHUNKS)
        removed = ear.count(BlockRemoved, HOST)
        assert removed == 2 * CHUNKS - 19
        assert ear.count(BlockRemoved, DISK) == 0
        assert ear.llmd.longest(asked, BLOCK, "storage") == CHUNKS * BLOCK
    ear.close()
    again = Ear(tmp_path)
    with engine(kv_transfer_config=settings, kv_events_config=again.options()) as e:
        e.ask(prompt(200, seed=2))
        at_rest(e)
        again.listen(lambda: again.count(BlockStored, DISK) == 2 * CHUNKS + 1)
        assert again.llmd.longest(asked, BLOCK, "storage") == CHUNKS * BLOCK
        before = again.count(BlockStored, HOST)
        e.ask(asked)
        assert e.cached == [CHUNKS * BLOCK]
        at_rest(e)
        again.listen(lambda: again.count(BlockStored, HOST) == before + CHUNKS)
        assert again.llmd.longest(asked, BLOCK, "cpu") == CHUNKS * BLOCK
    again.close()


def test_blocks_within_chunks(engine, prompt, tmp_path, ear):
    """Events are about blocks, whatever is stored as one; Dynamo takes no others."""
    asked = prompt(TOKENS)
    settings = config(tmp_path, blocks_per_chunk=3)
    with engine(kv_transfer_config=settings, kv_events_config=ear.options()) as e:
        e.ask(asked)
        at_rest(e)
        ear.listen(lambda: ear.count(BlockStored, DISK) == CHUNKS)
        assert ear.llmd.longest(asked, BLOCK, "storage") == CHUNKS * BLOCK
        assert len(ear.dynamo.held["disk"]) == len(ear.dynamo.held["host"]) == CHUNKS


def test_hashes_only(engine, prompt, tmp_path, ear):
    settings = config(tmp_path, self_describing_kv_events=False)
    ear.described = False
    with engine(kv_transfer_config=settings, kv_events_config=ear.options()) as e:
        e.ask(prompt(TOKENS))
        at_rest(e)
        ear.listen(lambda: ear.count(BlockStored, DISK) == CHUNKS)
        assert all(not e.token_ids for e in ear.of(BlockStored, DISK))
        assert ear.llmd.longest(prompt(TOKENS), BLOCK, "storage") == CHUNKS * BLOCK


def test_a_late_reader_hears_what_holds_now(engine, prompt, tmp_path, ear):
    """Also of the device; and after a reset of the device the tiers are told of again."""
    asked = prompt(TOKENS)
    settings = config(tmp_path, 10e6, kv_event_inventory=True)
    options = ear.options() | {"replay_endpoint": f"ipc://{tmp_path}/replay", "buffer_steps": 2}
    with engine(kv_transfer_config=settings, kv_events_config=options) as e:
        for seed in (1, 0):
            e.ask(prompt(TOKENS, seed=seed))
            at_rest(e)
        ear.listen(lambda: ear.count(BlockStored, DISK) == 2 * CHUNKS)
        late = Llmd(orphans=True)
        assert [seq for seq, _ in replayed(tmp_path, late)] == [*range(ear.seq + 1)]
        assert late.held("gpu") == ear.llmd.held("gpu")
        assert late.held("storage") == ear.llmd.held("storage")
        assert late.longest(asked, BLOCK, "cpu") == CHUNKS * BLOCK
        assert late.longest(asked, BLOCK, "gpu") == CHUNKS * BLOCK
        assert late.longest(prompt(TOKENS, seed=1), BLOCK, "storage") == CHUNKS * BLOCK
        e.forget_device()
        at_rest(e)
        e.ask(prompt(200, seed=2))
        e.steps(lambda: ear.heard_all() and len(ear.llmd.held("storage")) == 2 * CHUNKS + 1)
        at_rest(e)
        again = Llmd(orphans=True)
        replayed(tmp_path, again)
        assert again.longest(asked, BLOCK, "storage") == CHUNKS * BLOCK
        assert set(again.held("storage").values()) == {1}


def replayed(folder, reader):
    """All batches from the beginning, with their numbers."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{folder}/replay")
    socket.send_multipart([b"", bytes(8)])
    got = []
    while True:
        assert socket.poll(20_000), "no reply"
        _, _, seq, payload = socket.recv_multipart()
        if seq == END_OF_REPLAY:
            socket.close(linger=0)
            return got
        got.append((int.from_bytes(seq, "big"), payload))
        reader.read(payload)
