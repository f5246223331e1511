"""An index that a reader rebuilds from the events is what the tiers hold.

Over a real manager with memory and storage: whatever is stored, promoted, evicted, reset, damaged
or removed by others, whichever batches the reader misses, however far the announcer falls behind,
and however often engine and reader begin anew. What others remove from storage counts as there
until somebody wants to load it, or until it is asked for again.
"""

import itertools
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvtiers.chunks import (
    PAGE_BYTES,
    ChunkLayout,
    GroupLayout,
    Lookup,
    Namespace,
    RequestContext,
    TierFilter,
    TierMatch,
)
from kvtiers.config import parse_config
from kvtiers.events import PRIMARY
from kvtiers.hashing import event_hash
from kvtiers.host.region import Region
from kvtiers.kvevents.announcer import Announcer
from kvtiers.kvevents.messages import Batch, encode
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.notes import MAX_QUEUED
from kvtiers.kvevents.replay import ReplayRing, from_the_beginning
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place
from kvtiers.wiring import wire
from tests.servers import valkey
from tests.servers.fake_s3 import FakeS3
from tests.unit.kvevents.readers import Llmd, Router, raw_events
from tests.unit.kvevents.tree import BLOCK, about_to_be_stored, keys, prompt

LAYOUT = ChunkLayout((GroupLayout(0, PAGE_BYTES, BLOCK),))
NAMESPACE = Namespace({"model_digest": "m"})
MEMORY = "1:memory"
FEW = 8
"""Chunks that may wait for the announcer."""
TRUNK = prompt(4)
PROMPTS = [TRUNK, prompt(8, 1), *(TRUNK + prompt(4, seed, after=TRUNK[-1]) for seed in range(2, 6))]


class Storage:
    """What outlives engines: where it is, and what others do to it."""

    options: dict[str, object]

    def __init__(self, folder):
        self.folder = folder
        self.label = f"2:{self.options['type']}"

    def tier(self):
        return {"enable_kv_events": True, **self.options}

    def remove(self, draw):
        """Somebody else removes something."""

    def damage(self, draw):
        """Something is damaged."""


class Files(Storage):
    options = {"type": "fs", "capacity_bytes": 40 * PAGE_BYTES}

    def tier(self):
        return {**super().tier(), "root_dir": str(self.folder / "kv")}

    def files(self):
        return sorted((self.folder / "kv").rglob("*.kvc"))

    def remove(self, draw):
        for path in self.files()[:2]:
            path.unlink()

    def damage(self, draw):
        for path in self.files()[-1:]:
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))


class Log(Files):
    """Of which only its owner takes anything away."""

    options = {"type": "fs", "layout": "log", "capacity_bytes": 64 << 20}


class Server(Storage):
    options = {"type": "kv"}

    def __init__(self, folder, server=None):
        super().__init__(folder)
        self.server = server or valkey.shared()
        self.prefix = self.server.new_prefix()

    def tier(self):
        return {**super().tier(), "url": self.server.url, "prefix": self.prefix}

    def chunks(self, client):
        return sorted(
            n for n in client.scan_iter(f"{self.prefix}*") if client.strlen(n) > PAGE_BYTES
        )

    def remove(self, draw):
        with self.server.admin() as client:
            for name in self.chunks(client)[:2]:
                client.delete(name)

    def damage(self, draw):
        with self.server.admin() as client:
            for name in self.chunks(client)[-1:]:
                client.setrange(name, PAGE_BYTES, bytes(100))


class Bucket(Storage):
    options = {
        "type": "obj",
        "url": "s3://bucket/kv",
        "allow_http": True,
        "region": FakeS3.region,
        "access_key_id": "a",
        "secret_access_key": "b",
    }

    def __init__(self, folder, server):
        super().__init__(folder)
        self.server = server

    def tier(self):
        return {**super().tier(), "endpoint": self.server.endpoint}

    def chunks(self):
        there = self.server.objects.now
        return sorted(n for n, (body, _) in there.items() if len(body) > PAGE_BYTES)

    def remove(self, draw):
        for name in self.chunks()[:2]:
            self.server.objects.change(name, None)

    def damage(self, draw):
        for name in self.chunks()[-1:]:
            body, _ = self.server.objects.now[name]
            self.server.objects.change(name, body[:-100] + bytes(100))


@pytest.fixture(params=["files", "log", "kv", "obj"])
def storage(request, tmp_path):
    match request.param:
        case "files":
            yield Files(tmp_path)
        case "log":
            yield Log(tmp_path)
        case "kv":
            yield Server(tmp_path)
        case "obj":
            with FakeS3() as server:
                yield Bucket(tmp_path, server)


class Wire:
    """An outlet: batches go to the router, or are lost."""

    def __init__(self, router, ring_bytes):
        self.ring = ReplayRing(ring_bytes)
        self.router = router
        self.lost = 0
        self.narrator = None
        self.sent = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def room(self):
        return 1 << 20

    def say(self, events):
        if events:
            payload = encode(Batch(0.0, events))
            self.sent.append((self.ring.add(payload), payload))

    def serve(self, narrator):
        assert self.goes_on.wait(60)

    def close(self):
        pass

    def ask(self, start):
        if start:
            return self.ring.since(start)
        return [*from_the_beginning(self.narrator.told, self.ring.next_seq, 0.0, None)]

    def deliver(self):
        """Only at rest: what was said arrives, as far as it is not lost."""
        sent, self.sent = self.sent, []
        for seq, payload in sent:
            if self.lost:
                self.lost -= 1
            else:
                self.router.hear(seq, payload, lambda start: self.ask(start))


class Life:
    """One engine process over a storage."""

    def __init__(self, storage, number, router, ring_bytes, max_queued=MAX_QUEUED, **options):
        folder, self.storage = storage.folder, storage
        self.places = {
            PRIMARY: Place("CPU", "LOCAL", PRIMARY),
            MEMORY: Place("CPU", "LOCAL", MEMORY),
            storage.label: Place("STORAGE", "REMOTE", storage.label),
        }
        self.region = Region.attach(f"life{number}", {}, 8, PAGE_BYTES, str(folder))
        self.wire = Wire(router, ring_bytes)
        self.narrator = Narrator(
            self.places, {0: Group("full_attention")}, SideFile(str(folder / "told"), "", 1 << 20)
        )
        self.wire.narrator = self.narrator
        self.announcer = Announcer(
            self.narrator, self.wire, about_to_be_stored, max_queued=max_queued
        )
        tiers = [
            {"type": "memory", "capacity_bytes": 12 * PAGE_BYTES},
            {**storage.tier(), **options},
        ]
        config = parse_config({"cpu_bytes_to_use": 8 * PAGE_BYTES, "secondary_tiers": tiers})
        self.manager = wire(config, self.region, LAYOUT, NAMESPACE, listen=[self.announcer]).manager
        self.announcer.residents = self.manager.residents
        self.names = itertools.count()

    def step(self):
        self.manager.end_step(time.monotonic())
        for tier in self.manager.tiers:
            tier.drain_jobs(10.0)

    def rest(self):
        """Until nothing is in flight and all was said."""
        self.step()
        while self.manager.has_pending_work(time.monotonic()) or self.scanning():
            self.step()
        self.step()
        self.manager.check()
        if self.wire.goes_on.is_set():
            assert self.announcer.flush(20)
            self.wire.deliver()

    def scanning(self):
        return any(
            not t.tier._scan.complete for t in self.manager.tiers if t.label == self.storage.label
        )

    def store(self, chunks):
        request = self.manager.on_new_request(self.context())
        plan = self.manager.store(keys(chunks), request)
        for chunk in chunks:
            if chunk.key in plan.keys:
                self.announcer.capture((chunk,))
        self.manager.complete_store(plan.keys)
        self.manager.on_request_finished(request)
        self.rest()

    def want(self, chunks, medium=None):
        """Look for a prompt until all is known; what is found comes up."""
        context = self.context()
        if medium is not None:
            context = replace(context, tier_filter=TierFilter((TierMatch(medium),)))
        request = self.manager.on_new_request(context)
        settled = (Lookup.HIT, Lookup.MISS)
        for _ in range(50):
            self.manager.poll(time.monotonic())
            verdicts = self.manager.lookup_many(keys(chunks), request)
            self.step()
            if all(v in settled for v in verdicts):
                break
        self.manager.on_request_finished(request)
        self.rest()

    def context(self):
        return RequestContext(f"r{next(self.names)}")

    def want_all(self):
        """Load whatever is said to be in storage, so that what others did is found."""
        for chunk in {c.key: c for p in PROMPTS for c in p}.values():
            self.manager.reset()
            self.want([chunk], "STORAGE")

    def truth(self):
        tiers = {t.label: t.tier.store for t in self.manager.tiers}
        held = {label: [e.key for e in store.scan()] for label, store in tiers.items()}
        held[PRIMARY] = [*self.manager._ready]
        return {label: {event_hash(k[:-4]) for k in there} for label, there in held.items()}

    def end(self):
        self.manager.shutdown(5.0, time.monotonic)
        assert self.announcer.flush(20)
        self.announcer.close(20)
        self.region.close()


def act(life, draw, kinds=11):
    """One thing that happens."""
    chunks = draw.choice(PROMPTS)[: draw.randint(1, 8)]
    match draw.randrange(kinds):
        case 0 | 1 | 2 | 3:
            life.store(chunks)
        case 4 | 5:
            life.want(chunks)
        case 6:
            life.manager.reset()
        case 7:
            life.wire.lost = draw.randint(1, 5)
        case 8:
            life.storage.remove(draw)
        case 9:
            life.storage.damage(draw)
        case 10:
            life.wire.goes_on.clear()
            for _ in range(4):
                act(life, draw, 10)
            life.wire.goes_on.set()
            life.rest()


@pytest.mark.parametrize(
    ("seed", "max_queued"), [(1, MAX_QUEUED), (2, MAX_QUEUED), (3, FEW), (4, FEW)]
)
def test_the_index_is_what_the_tiers_hold(storage: Storage, seed: int, max_queued: int) -> None:
    draw = random.Random(seed)
    router = Router()
    for number in range(2):
        life = Life(storage, number, router, draw.choice([300, 1 << 20]), max_queued)
        life.rest()
        for _ in range(12):
            act(life, draw)
        if draw.random() < 0.5:
            router.forget()  # it was restarted
        life.wire.lost = 0
        life.want_all()
        life.store(PROMPTS[1][:3])
        life.rest()
        router.catch_up(life.wire.ask)
        assert {owner: router.held(owner) for owner in life.places} == life.truth()
        life.narrator.check()
        if max_queued > FEW:  # else descriptions are dropped, too
            _is_described(life)
        life.end()


@pytest.mark.parametrize("kind", [Files, Server])
def test_what_others_removed_is_taken_back_though_nobody_asks(tmp_path: Path, kind: type) -> None:
    router, storage = Router(), kind(tmp_path)
    life = Life(storage, 0, router, 1 << 20, recheck_s=0.1)
    life.store(PROMPTS[1])
    storage.remove(random.Random(0))

    def noticed():
        life.rest()
        return len(router.held(storage.label)) == 6

    valkey.wait_until(noticed, "two chunks less are told of")
    assert router.held(storage.label) == life.truth()[storage.label]
    life.end()


def test_a_server_that_was_away_is_told_of_again(tmp_path: Path) -> None:
    router, chunks = Router(), PROMPTS[1]
    saving = {"appendonly": "yes", "appendfsync": "always"}
    with valkey.valkey(**saving) as server:
        storage = Server(tmp_path, server)
        life = Life(storage, 0, router, 1 << 20, breaker_failures=1, breaker_cooldown_s=0.1)

        def want_until(count):
            def held():
                life.manager.reset()
                life.want(chunks, "STORAGE")
                return len(router.held(storage.label)) == count

            valkey.wait_until(held, f"{count} chunks are told of")

        life.store(chunks)
        assert len(router.held(storage.label)) == 8
        server.kill()
        want_until(0)
        server.start()
        want_until(8)
        assert router.held(storage.label) == life.truth()[storage.label]
        life.end()


def _is_described(life):
    """Also what was found is."""
    late = Llmd(orphans=True)
    for _, payload in life.wire.ask(0):
        late.read(payload)
        assert all(e["token_ids"] for e in _stored(payload))


def _stored(payload):
    return [e for e in raw_events(payload) if e["type"] == "BlockStored"]
