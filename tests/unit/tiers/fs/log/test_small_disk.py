"""A log on a disk that is smaller than its capacity, broken, or read-only.

The mounts are made in a child with a mount namespace of its own, and end with it.
"""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs import vectored
from tests.unit.tiers.fs.log.log_kit import CAPACITY, SEGMENT, SEGMENTS, Log, held, read
from tests.unit.tiers.fs.log.test_hung import load, open_tier, store
from tests.unit.tiers.tier_kit import Bench, filled, key, payload

MIB = 1 << 20


def in_a_mount_namespace(what: str, place: Path) -> None:
    """Run the function ``what`` of this module there, as root of that namespace."""
    command = [sys.executable, "-c", f"from {__name__} import *; {what}(Path({str(place)!r}))"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", *command],
        env=environment,
        cwd=Path(__file__).parents[5],
        timeout=100,
    )
    assert done.returncode == 0, "what went wrong stands above"


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


class Lines(logging.Handler):
    """What the log says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("kvtiers").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def fill(bench: Bench, first: int, count: int) -> list[int]:
    """Store so many chunks; those that were taken."""
    taken = []
    for n in range(first, first + count):
        if bench.run(bench.store_job(n)).done:
            taken.append(n)
    return taken


def there(bench: Bench, ns: list[int]) -> list[int]:
    """Those that are found; they are read back right."""
    found = [n for n, v in zip(ns, bench.lookup(*ns), strict=True) if v is Lookup.HIT]
    for n in found:
        load(bench, n)
    return found


# -- full -----------------------------------------------------------------------------------------


def disk_of_others(place: Path, room: int) -> Path:
    """A disk that others fill but for ``room`` bytes; their file."""
    mount("-t", "tmpfs", "-o", f"size={CAPACITY + MIB}", "none", place)
    theirs = place / "theirs"
    theirs.write_bytes(bytes(CAPACITY + MIB - room))
    return theirs


def full(place: Path) -> None:
    """Half of the capacity is there; later there is room for all of it."""
    theirs = disk_of_others(place, 4 * SEGMENT)
    lines = Lines()
    bench = open_tier(place)
    ns = fill(bench, 0, 60)
    assert ns == list(range(60)), "it evicts where it cannot grow"
    assert len(Log(place / "kv").segments()) == 3, Log(place / "kv").segments()
    kept = there(bench, ns)
    assert len(kept) >= 5
    assert kept == ns[-len(kept) :], kept
    bench.store._context.clock.advance(31)  # then it asks the disk again
    fill(bench, 100, 30)
    assert len([line for line in lines.said if "cannot grow" in line]) == 1
    assert len(lines.said) == 1, lines.said
    bench.store.check()

    theirs.unlink()
    bench.store._context.clock.advance(31)  # then it asks the disk again
    fill(bench, 200, 30)
    assert len(Log(place / "kv").segments()) == SEGMENTS
    bench.store.check()
    bench.tier.shutdown(10)
    again = open_tier(place)
    assert len(there(again, list(range(200, 230)))) >= 16
    again.tier.shutdown(10)


def full_from_the_start(place: Path) -> None:
    """Not one segment fits: each write is refused, and taken when there is room."""
    theirs = disk_of_others(place, SEGMENT)
    bench = open_tier(place)
    outcome = bench.run(bench.store_job(1))
    assert outcome.failed[key(1)].kind is Kind.FULL
    assert bench.lookup(1) == [Lookup.MISS]
    theirs.unlink()
    store(bench, 1)
    load(bench, 1)
    bench.store.check()
    bench.tier.shutdown(10)


@pytest.mark.parametrize("what", ["full", "full_from_the_start"])
def test_a_disk_that_is_full(what: str, tmp_path: Path) -> None:
    in_a_mount_namespace(what, tmp_path)


# -- read-only ------------------------------------------------------------------------------------


def read_only(place: Path) -> None:
    """What is there is served, nothing is stored, the log and its tier say so once; it passes."""
    lines = Lines()
    bench = open_tier(place)
    store(bench, 1, 2, 3)
    root = place / "kv"
    mount("--bind", root, root)
    mount("-o", "remount,bind,ro", root)
    for n in range(10, 10 + 2 * bench.tier._options.breaker_failures):
        job = bench.store_job(n)
        if bench.tier.submit_store(job):
            assert bench.tier.drain_jobs(20)
            (outcome,) = bench.tier.get_finished_jobs()
            assert outcome.failed[key(n)].kind is Kind.IO  # type: ignore[union-attr]
    first, line = lines.said
    assert "write fails, which costs hits and nothing else" in first
    assert "keeps failing and is left alone" in line
    assert "Read-only file system" in line
    subprocess.run(["umount", root], check=True)
    bench.clock.advance(61)
    store(bench, 20)
    load(bench, 1, 2, 3, 20)
    bench.store.check()
    bench.tier.shutdown(10)


def test_a_disk_that_is_mounted_read_only(tmp_path: Path) -> None:
    in_a_mount_namespace("read_only", tmp_path)


# -- broken ---------------------------------------------------------------------------------------


def fails(call: str, code: int, times: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The next ``times`` calls fail; how many did."""
    failed = 0

    class Os:
        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            return self._failing(real) if name == call else real

        def _failing(self, real: Any) -> Any:
            def fail(*args: Any) -> Any:
                nonlocal failed
                if failed == times:
                    return real(*args)
                failed += 1
                raise OSError(code, os.strerror(code))

            return fail

    monkeypatch.setattr(vectored, "os", Os())
    return lambda: failed


def test_a_read_that_fails_is_a_miss_and_the_chunk_is_kept(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been a moment: nothing is dropped for it."""
    bench = open_tier(tmp_path)
    store(bench, 1, 2)
    bench.tier.take_events()
    retries = bench.tier._options.transfer_retries
    failed = fails("preadv", errno.EIO, 1 + retries, monkeypatch)
    outcome = bench.run(bench.load_job(1, 2))
    assert {e.kind for e in outcome.failed.values()} == {Kind.IO}
    assert failed() == 1 + retries
    assert bench.tier.take_events() == []
    bench.clock.advance(6)
    assert bench.lookup(1, 2) == [Lookup.HIT] * 2
    load(bench, 1, 2)
    bench.tier.shutdown(10)


def test_a_write_that_fails_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_tier(tmp_path)
    failed = fails("pwritev", errno.EIO, 1, monkeypatch)
    store(bench, 1, 2)
    assert failed() == 1
    load(bench, 1, 2)
    bench.store.check()
    bench.tier.shutdown(10)


@pytest.mark.parametrize(("call", "what"), [("pwritev", "write"), ("preadv", "read")])
def test_a_disk_that_fails_every_call_is_said_once_and_so_is_its_end(
    log: Log,
    call: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kvtiers")
    opened = log.open()
    opened.write([Item(key(1), filled(1))])
    failed = fails(call, errno.EIO, 8, monkeypatch)
    while failed() < 8:
        if what == "write":
            (error,) = opened.write([Item(key(2), filled(2))])
            assert error is not None
        else:
            assert read(opened, 1) == [Kind.IO]
    assert caplog.text.count(f"{what} fails") == 1
    assert f"{what} works again" not in caplog.text
    opened.write([Item(key(3), filled(3))])
    assert read(opened, 1, 3) == [payload(1), payload(3)]
    assert caplog.text.count(f"{what} works again") == 1
    opened.check()


@pytest.mark.parametrize("nth", range(1, 40))
def test_no_write_that_fails_costs_more_than_its_chunks(
    log: Log, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Header, run, table, what is moved, what is erased: the n-th of all writes fails for good."""
    opened = log.open()
    calls = 0
    real = os.pwritev

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pwritev(self, *args: Any) -> int:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

    monkeypatch.setattr(vectored, "os", Os())
    stored = []
    for n in range(50):
        (error,) = opened.write([Item(key(n), filled(n))])
        if error is None:
            stored.append(n)
        opened.touch([key(n - n % 3)])
        opened.check()
    assert len(stored) >= 49
    kept = [n for n in stored if n not in log.gone()]
    assert held(opened, range(50)) == kept
    assert read(opened, *kept) == [payload(n) for n in kept]
    opened.close()
    opened = log.open()
    assert held(opened, kept) == kept
    assert read(opened, *kept) == [payload(n) for n in kept]
    opened.check()
