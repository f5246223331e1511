"""Every command beside a store that goes on writing, reading and evicting: neither notices."""

import itertools
import os
import threading

import pytest

from kvtiers.hashing import chunk_keys
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs import stamps
from tests.unit.cli.cli_kit import (
    CHUNK,
    NAMESPACE,
    OTHER,
    WALL,
    Tier,
    good,
    kvtiers,
    manifest,
    only_files,
    only_log,
)
from tests.unit.tiers.tier_kit import ManualClock, filled, page_aligned

LIVE = manifest("live")
MANY = chunk_keys(list(range(16 * 200)), 0, 16, 16)
FILE = CHUNK + 4096


class Engine:
    """A store at work on a thread, until it is told to stop."""

    def __init__(self, tier):
        self.wall = ManualClock(WALL)
        self.store = tier.open(LIVE, self.wall, capacity_bytes=150 * FILE)
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
            self.wall.advance(1)  # what was read long ago is promised no more
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
        ["stat", "--tokens", prompt],
        ["doctor"],
    ):
        ran = kvtiers(words[0], tier.url, *words[1:], "--json")
        assert (ran.status, ran.err) == (0, "")
        assert ran.json


@pytest.mark.parametrize("target_layout", ["files", "log"])
def test_copying_beside_it(tier, engine, tmp_path, target_layout):
    archive, target = tmp_path / "a.tar", Tier(tmp_path / "target", target_layout)
    roomy = f"{target.url}?layout={target_layout}&capacity=16MiB"
    for words in (
        ["export", tier.url, archive],
        ["import", archive, roomy],
        ["migrate", tier.url, roomy],
        ["warm", tier.url, "--from-recent", "5", "-o", tmp_path / "hot.json"],
        ["verify", target.url],
    ):
        ran = kvtiers(*words)
        assert (ran.status, ran.err) == (0, "")
    arrived = target.chunks(LIVE)
    assert all(got == filled(MANY.index(k), CHUNK) for k, got in arrived.items())
    if tier.layout == "files":  # a log so small is written over before a thread beside it reads it
        assert arrived


@only_files
def test_changing_beside_it(tier, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(stamps, "GRACE_S", 0.01)  # for which it waits
    ran = kvtiers("verify", tier.url, "--repair")
    assert (ran.status, ran.err) == (0, "")
    ran = kvtiers("gc", tier.url, "--max-bytes", 20 * FILE, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert tier.numbers(NAMESPACE) == tier.numbers(OTHER) == []  # not used for longest
    assert engine.went_round.acquire(timeout=60)
    assert engine.went_round.acquire(timeout=60)
    assert tier.chunks(LIVE)


@only_log
def test_a_log_is_changed_by_its_owner_alone(tier, engine, tmp_path):
    other = Tier(tmp_path / "other").fill()
    good(kvtiers("export", other.url, tmp_path / "a.tar"))
    for words in (
        ["verify", tier.url, "--repair"],
        ["verify", tier.url, "--repair", "--dry-run"],
        ["gc", tier.url, "--max-bytes", "0"],
        ["import", tmp_path / "a.tar", tier.url],
        ["migrate", other.url, tier.url],
        ["migrate", other.url, tier.url, "--dry-run"],
    ):
        ran = kvtiers(*words)
        assert (ran.status, ran.out) == (2, "")
        assert f"belongs to the living process {os.getpid()}" in ran.err
        assert ran.err.count("\n") == 1
    assert engine.went_round.acquire(timeout=60)
