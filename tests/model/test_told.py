"""An index that a reader rebuilds from the events is what the tiers hold.

Over a real manager with memory and a folder: whatever is stored, promoted, evicted, reset, damaged
or removed by others, whichever batches the reader misses, and however often engine and reader begin
anew. What others remove from storage counts as there until somebody wants to load it.
"""

import itertools
import random
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
from kvtiers.kvevents.replay import ReplayRing, from_the_beginning
from kvtiers.kvevents.sidefile import SideFile
from kvtiers.kvevents.spans import Group, Place
from kvtiers.wiring import wire
from tests.unit.kvevents.readers import Llmd, Router, raw_events
from tests.unit.kvevents.tree import BLOCK, about_to_be_stored, keys, prompt

LAYOUT = ChunkLayout((GroupLayout(0, PAGE_BYTES, BLOCK),))
NAMESPACE = Namespace({"model_digest": "m"})
MEMORY, DISK = "1:memory", "2:fs"
PLACES = {
    PRIMARY: Place("CPU", "LOCAL", PRIMARY),
    MEMORY: Place("CPU", "LOCAL", MEMORY),
    DISK: Place("STORAGE", "REMOTE", DISK),
}
TRUNK = prompt(4)
PROMPTS = [TRUNK, prompt(8, 1), *(TRUNK + prompt(4, seed, after=TRUNK[-1]) for seed in range(2, 6))]


class Wire:
    """An outlet: batches go to the router, or are lost."""

    def __init__(self, router, ring_bytes):
        self.ring = ReplayRing(ring_bytes)
        self.router = router
        self.lost = 0
        self.narrator = None
        self.sent = []

    def room(self):
        return 1 << 20

    def say(self, events):
        if events:
            payload = encode(Batch(0.0, events))
            self.sent.append((self.ring.add(payload), payload))

    def serve(self, narrator):
        return None

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
    """One engine process over a folder."""

    def __init__(self, folder, number, router, ring_bytes):
        self.root = folder / "kv"
        self.region = Region.attach(f"life{number}", {}, 8, PAGE_BYTES, str(folder))
        self.wire = Wire(router, ring_bytes)
        self.narrator = Narrator(
            PLACES, {0: Group("full_attention")}, SideFile(str(folder / "told"), "", 1 << 20)
        )
        self.wire.narrator = self.narrator
        self.announcer = Announcer(self.narrator, self.wire, about_to_be_stored)
        tiers = [
            {"type": "memory", "capacity_bytes": 12 * PAGE_BYTES},
            {
                "type": "fs",
                "root_dir": str(self.root),
                "capacity_bytes": 24 * PAGE_BYTES,
                "enable_kv_events": True,
            },
        ]
        config = parse_config({"cpu_bytes_to_use": 8 * PAGE_BYTES, "secondary_tiers": tiers})
        self.manager = wire(config, self.region, LAYOUT, NAMESPACE, listen=[self.announcer]).manager
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
        assert self.announcer.flush(20)
        self.wire.deliver()

    def scanning(self):
        return any(not t.tier._scan.complete for t in self.manager.tiers if t.label == DISK)

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

    def files(self):
        return sorted(self.root.rglob("*.kvc"))

    def want_all(self):
        """Load whatever is said to be on disk, so that what others did is found."""
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


def act(life, draw):
    """One thing that happens."""
    chunks = draw.choice(PROMPTS)[: draw.randint(1, 8)]
    match draw.randrange(10):
        case 0 | 1 | 2 | 3:
            life.store(chunks)
        case 4 | 5:
            life.want(chunks)
        case 6:
            life.manager.reset()
        case 7:
            life.wire.lost = draw.randint(1, 5)
        case 8:
            for path in life.files()[:2]:
                path.unlink()
        case 9:
            for path in life.files()[-1:]:
                path.write_bytes(path.read_bytes()[:-100] + bytes(100))


@pytest.mark.parametrize("seed", range(6))
def test_the_index_is_what_the_tiers_hold(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    router = Router()
    for number in range(2):
        life = Life(tmp_path, number, router, draw.choice([300, 1 << 20]))
        life.rest()
        for _ in range(15):
            act(life, draw)
        if draw.random() < 0.5:
            router.forget()  # it was restarted
        life.wire.lost = 0
        life.want_all()
        life.store(PROMPTS[1][:3])
        life.rest()
        router.catch_up(life.wire.ask)
        told = {owner: router.held(owner) for owner in PLACES}
        assert told == life.truth()
        life.narrator.check()
        late = Llmd(orphans=True)
        for _, payload in life.wire.ask(0):
            late.read(payload)
            assert all(e["token_ids"] for e in _stored(payload)), "also what was found is described"
        life.end()


def _stored(payload):
    return [e for e in raw_events(payload) if e["type"] == "BlockStored"]
