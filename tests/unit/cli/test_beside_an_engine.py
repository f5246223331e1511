"""Every command beside a store that goes on writing, reading and evicting: neither notices."""

import itertools
import threading

import pytest

from kvtiers.hashing import chunk_keys
from kvtiers.tiers.base import Item
from tests.unit.cli.cli_kit import CHUNK, NAMESPACE, OTHER, kvtiers, manifest
from tests.unit.tiers.tier_kit import filled, page_aligned

LIVE = manifest("live")
MANY = chunk_keys(list(range(16 * 200)), 0, 16, 16)
FILE = CHUNK + 4096


class Engine:
    """A store at work on a thread, until it is told to stop."""

    def __init__(self, tier):
        self.store = tier.open(LIVE, capacity_bytes=150 * FILE)
        self.went_round = threading.Semaphore(0)
        self.problems = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        assert self.went_round.acquire(timeout=60)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)
        self.store.check()
        self.store.close()

    def _run(self):
        for i in itertools.cycle(range(len(MANY))):
            written, read = MANY[i], MANY[i - 5]
            errors = self.store.write([Item(written, filled(i, CHUNK))])
            view = page_aligned(CHUNK)
            (missed,) = self.store.read([Item(read, view)])
            if any(errors):
                self.problems.append(errors)
            if missed is None and bytes(view) != bytes(filled((i - 5) % len(MANY), CHUNK)):
                self.problems.append("wrong bytes")
            if i == len(MANY) - 1:
                self.went_round.release()
            if self._stop.is_set():
                return


@pytest.fixture
def engine(tier):
    with Engine(tier) as running:
        yield running
    assert running.problems == []


def test_looking_beside_it(tier, engine, prompt):
    for words in (
        ["ls"],
        ["ls", "--chunks"],
        ["du"],
        ["verify"],
        ["verify", "--repair"],
        ["stat", "--tokens", prompt],
    ):
        ran = kvtiers(words[0], tier.url, *words[1:], "--json")
        assert (ran.status, ran.err) == (0, "")
        assert ran.json


def test_copying_beside_it(tier, engine, tmp_path):
    archive, target = tmp_path / "a.tar", f"fs://{tmp_path}/target"
    for words in (
        ["export", tier.url, archive],
        ["import", archive, target],
        ["migrate", tier.url, target],
        ["verify", target],
    ):
        ran = kvtiers(*words)
        assert (ran.status, ran.err) == (0, "")


def test_deleting_beside_it(tier, engine):
    ran = kvtiers("gc", tier.url, "--max-bytes", 20 * FILE, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert tier.keys(NAMESPACE) == tier.keys(OTHER) == set()  # not used for longest
    assert engine.went_round.acquire(timeout=60)
    assert engine.went_round.acquire(timeout=60)
    assert tier.keys(LIVE)
