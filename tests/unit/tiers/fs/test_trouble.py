"""A disk that is full, read-only or broken: misses, one line, a metric, and recovery by itself.

What holds for both layouts is asked of both; how a log grows, and does not, of a log.
"""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import ConfigError, Kind
from kvtiers.events import ChunksRemoved, Reason
from kvtiers.tiers.fs.names import QUOTA
from kvtiers.tiers.fs.shared import read_quota
from tests.unit.tiers.fs.fs_kit import Folder, capacity, read, write
from tests.unit.tiers.fs.log.log_kit import Log
from tests.unit.tiers.fs.test_tier import bench
from tests.unit.tiers.tier_kit import NAMESPACE, key, payload

ROOT = Path(__file__).parents[4]

INSIDE = """
import logging, subprocess, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from kvtiers.errors import Kind
from kvtiers.events import Reason
from tests.unit.tiers.fs.fs_kit import Folder, capacity, read, write
from tests.unit.tiers.tier_kit import key, payload
place = Path(sys.argv[1])
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("kvtiers").addHandler(Keep())
logging.getLogger("kvtiers").setLevel(logging.INFO)
def mount(*options):
    subprocess.run(["mount", *options, str(place)], check=True)
mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
folder = Folder(place / "kv")
"""


def on_a_small_disk(tmp_path: Path, body: str) -> None:
    """Run ``body`` with a file system of 1 MiB at ``place``, which nobody else sees."""
    place = tmp_path / "disk"
    place.mkdir()
    ours = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    command = [*ours, sys.executable, "-c", INSIDE + body, str(place), *sys.path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert list(place.iterdir()) == []


def test_a_full_disk_below_the_capacity_makes_ours_leave(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
store = folder.open(capacity_fraction=0.9)
hog = place / "hog"
hog.write_bytes(bytes(600_000))
for n in range(60):
    assert write(store, n) == [None], n
assert len(folder.removed) > 20
assert {reason for _, reason in folder.removed} == {Reason.EVICTED}
assert read(store, 59) == [payload(59)]
gone = len(folder.removed)
hog.unlink()
folder.let_promises_end()
for n in range(60, 90):
    assert write(store, n) == [None]
assert len(folder.removed) == gone, "there is room again"
(line,) = lines
assert "the disk is full below the capacity" in line, "nothing failed"
store.scan()
assert store.used_bytes == folder.disk_bytes()
store.check()
store.close()
""",
    )


def test_a_disk_that_others_filled_costs_misses_and_recovers(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
store = folder.open(capacity_fraction=0.9)
write(store, 1, 2)
store.contains([key(1), key(2)])
hog = open(place / "hog", "wb", buffering=0)
try:
    while hog.write(bytes(4096)) == 4096:
        pass
except OSError:
    pass
assert write(store, 3, 4, 5) == [Kind.FULL] * 3
assert read(store, 1, 2) == [payload(1), payload(2)], "promised: they stayed"
assert store.contains([key(1), key(3)]) == [True, False]
(line,) = lines
assert "write fails" in line and "No space left on device" in line
hog.truncate(0)
assert write(store, 3, 4, 5) == [None] * 3
assert lines[1:] == [f"{folder.root}: write works again"]
store.close()
""",
    )


def test_an_engine_starts_on_a_disk_that_its_own_chunks_filled(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
store = folder.open(capacity_fraction=0.9)
write(store, *range(40))
store.close()
hog = open(place / "hog", "wb", buffering=0)
try:
    while hog.write(bytes(4096)) == 4096:
        pass
except OSError:
    pass
store = folder.open(capacity_fraction=0.9)
assert write(store, 50, 51, 52) == [None] * 3
assert read(store, 52) == [payload(52)]
store.close()
""",
    )


def test_a_disk_that_turns_read_only_goes_on_being_read(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        """
for options in ({"capacity_fraction": 0.9}, {"eviction": "external"}):
    lines.clear()
    folder = Folder(place / next(iter(options)))
    store = folder.open(**options)
    write(store, 1, 2)
    mount("--bind", str(place))  # upon itself: of what is open stays open
    mount("-o", "remount,bind,ro")
    assert store.contains([key(1), key(2), key(3)]) == [True, True, False]
    assert read(store, 1, 2) == [payload(1), payload(2)]
    assert write(store, 1, 3, 4) == [None, Kind.IO, Kind.IO]
    (line,) = lines
    assert "write fails" in line and "Read-only file system" in line
    subprocess.run(["umount", str(place)], check=True)
    assert write(store, 3, 4) == [None] * 2
    assert lines[1:] == [f"{folder.root}: write works again"]
    assert read(store, 3) == [payload(3)]
    store.check()
    store.close()
""",
    )


@pytest.fixture(params=["files", "log"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Folder | Log:
    """A root of either layout; ``capacity(20)`` is enough for both."""
    root = tmp_path / "kv"
    return Folder(root) if request.param == "files" else Log(root)


def failing(code: int, *calls: str) -> Callable[[pytest.MonkeyPatch], None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    def apply(patch: pytest.MonkeyPatch) -> None:
        for call in calls:
            patch.setattr(os, call, refuse)

    return apply


KINDS = {
    errno.EDQUOT: Kind.FULL,
    errno.ENOSPC: Kind.FULL,
    errno.EIO: Kind.IO,
    errno.EROFS: Kind.IO,
    errno.EACCES: Kind.IO,
}


@pytest.mark.parametrize("code", KINDS)
def test_writes_that_fail_are_said_once_and_pass(
    either: Folder | Log, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level("INFO", logger="kvtiers")
    kind = KINDS[code]
    store = either.open(capacity_bytes=capacity(20))
    write(store, 1)
    store.contains([key(1)])
    with pytest.MonkeyPatch.context() as patch:
        failing(code, "pwritev")(patch)
        assert write(store, *range(2, 10)) == [kind] * 8
        assert read(store, 1) == [payload(1)]
    assert caplog.text.count("write fails") == 1
    assert caplog.text.count(os.strerror(code)) == 1
    assert write(store, *range(2, 10)) == [None] * 8
    assert caplog.text.count("write works again") == 1
    if isinstance(either, Folder):
        assert store.used_bytes == either.disk_bytes()
    store.check()
    store.close()


def test_chunks_do_not_leave_for_a_disk_that_stays_full_all_the_same(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(40))
    write(store, *range(30))
    with pytest.MonkeyPatch.context() as patch:
        failing(errno.EDQUOT, "pwritev")(patch)
        assert write(store, *range(100, 110)) == [Kind.FULL] * 10
        assert len(folder.removed) == 2
        folder.clock.advance(61)
        assert write(store, 100) == [Kind.FULL]
        assert len(folder.removed) == 4, "once a minute it may have changed"
    assert write(store, 100) == [None]
    assert store.used_bytes == folder.disk_bytes()
    store.close()


def test_a_file_system_without_locks_keeps_no_bound(folder: Folder) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(ConfigError) as caught:
            folder.open()
        assert str(caught.value).startswith('eviction is "own", but the file system that holds')
        assert "has no locks" in str(caught.value)
        store = folder.open(eviction="external")
        assert write(store, 1) == [None]
        assert read(store, 1) == [payload(1)]
        store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_reads_that_fail_are_misses_said_once_and_pass(
    either: Folder | Log, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level("INFO", logger="kvtiers")
    store = either.open()
    write(store, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        failing(code, "preadv")(patch)
        assert read(store, 1, 2, 1) == [Kind.IO] * 3
    assert either.removed == [], "nobody knows whether they are gone"
    assert caplog.text.count("read fails") == 1
    assert read(store, 1, 2) == [payload(1), payload(2)]
    assert caplog.text.count("read works again") == 1
    store.close()


def test_a_trouble_that_comes_and_goes_is_said_once_a_minute(
    either: Folder | Log, caplog: pytest.LogCaptureFixture
) -> None:
    store = either.open()
    for n in range(30):
        with pytest.MonkeyPatch.context() as patch:
            failing(errno.EIO, "pwritev")(patch)
            assert write(store, n) == [Kind.IO]
        assert write(store, n) == [None]
        either.clock.advance(3)
    assert caplog.text.count("write fails") == 2
    store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_quota_file_that_cannot_be_written_fails_writes_and_recovers(
    folder: Folder, code: int
) -> None:
    store = folder.open(capacity_bytes=capacity(3))
    write(store, 1, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        failing(code, "pwrite")(patch)
        assert write(store, 4, 5) == [Kind.FULL if code == errno.ENOSPC else Kind.IO] * 2
        assert folder.disk_bytes() <= capacity(3)
    assert write(store, 4, 5, 6, 7) == [None] * 4
    assert folder.disk_bytes() <= capacity(3)
    assert store.used_bytes == folder.disk_bytes()
    store.check()
    store.close()


@pytest.mark.parametrize("code", KINDS)
def test_a_log_that_can_make_no_segment_at_first(
    log: Log, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level("INFO", logger="kvtiers")
    with pytest.MonkeyPatch.context() as patch:
        failing(code, "posix_fallocate")(patch)
        store = log.open()
        for n in range(3):
            assert write(store, n) == [KINDS[code]]
    assert log.segments() == []
    assert caplog.text.count("write fails") == 1
    assert caplog.text.count(os.strerror(code)) == 1
    assert write(store, 1) == [None]
    assert caplog.text.count("write works again") == 1
    store.check()
    store.close()


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
@pytest.mark.parametrize("code", KINDS)
def test_a_log_that_cannot_grow_says_why_once_and_grows_later(
    log: Log, caplog: pytest.LogCaptureFixture, code: int, call: str
) -> None:
    """A quota, a folder that nobody may write to any more, a disk that is broken."""
    caplog.set_level("INFO", logger="kvtiers")
    store = log.open()
    write(store, 0)
    before, real = len(log.segments()), os.open

    def open_but_make_none(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        if call == "open":
            patch.setattr(os, "open", open_but_make_none)
        else:
            failing(code, call)(patch)
        for n in range(60):
            assert write(store, n) == [None], "it goes round in what it has"
    assert len(log.segments()) == before
    (line,) = caplog.messages
    assert "cannot grow, so what it has is used again" in line
    assert os.strerror(code) in line
    log.clock.advance(31)
    for n in range(100, 160):
        assert write(store, n) == [None]
    assert len(log.segments()) > before
    assert caplog.messages[1:] == [f"{log.root}/log grows again"]
    store.check()
    store.close()


@pytest.mark.parametrize("layout", ["files", "log"])
def test_a_broken_disk_through_the_tier(layout: str, tmp_path: Path) -> None:
    """The runner leaves the tier alone, says misses, and comes back by itself."""
    with bench(tmp_path / "kv", capacity_bytes=capacity(20), layout=layout) as tier:
        tier.run(tier.store_job(1, 2))
        tier.tier.take_events()
        with pytest.MonkeyPatch.context() as patch:
            failing(errno.EIO, "pwritev", "preadv")(patch)
            for n in range(10, 16):
                outcome = tier.run(tier.store_job(n))
                assert outcome.failed[key(n)].kind is Kind.IO
                if tier.lookup(1) == [Lookup.MISS]:
                    break
            assert tier.lookup(1, 2) == [Lookup.MISS] * 2, "left alone"
        tier.clock.advance(60)
        assert tier.run(tier.store_job(20)).done == (key(20),)
        assert tier.resolve(1, 20) == [Lookup.HIT] * 2
        assert not any(
            isinstance(e, ChunksRemoved) and e.reason is not Reason.EVICTED
            for e in tier.tier.take_events()
        )


@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO])
def test_what_a_failed_write_leaves_on_the_disk_counts(folder: Folder, code: int) -> None:
    """As in a folder in which nothing may be renamed or deleted: everything stays."""
    bound = capacity(20)
    store = folder.open(capacity_bytes=bound)
    write(store, 0)
    with pytest.MonkeyPatch.context() as patch:
        failing(code, "replace", "unlink")(patch)
        for n in range(1, 60):
            assert write(store, n) != [None]
            assert folder.disk_bytes() <= bound
    folder.let_promises_end()
    store.close()
    store = folder.open(capacity_bytes=bound)
    assert write(store, *range(1, 60)) == [None] * 59
    store.check()


def test_a_rename_that_was_done_and_said_to_have_failed_counts(folder: Folder) -> None:
    """NFS sends a call again whose answer was lost, and then the old name is gone."""
    bound = capacity(20)
    store = folder.open(capacity_bytes=bound)
    write(store, 0)
    real = os.replace

    def done_and_failed(old: Any, new: Any) -> None:
        real(old, new)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", done_and_failed)
        for n in range(1, 60):
            write(store, n)
            assert folder.disk_bytes() <= bound


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ENOMEM])
def test_what_cannot_be_listed_is_not_counted_as_nothing(folder: Folder, code: int) -> None:
    bound = capacity(20)
    store = folder.open(capacity_bytes=bound)
    write(store, *range(20))
    real = os.scandir

    def refused(path: Any) -> Any:
        if os.path.basename(path) == "00":
            raise OSError(code, os.strerror(code))
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        with pytest.raises(OSError, match=os.strerror(code)):
            store._account.count()
        write(store, *range(20, 60))
    assert folder.disk_bytes() <= bound
    store.check()


def unlisted(code: int, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    real = os.scandir

    def refused(path: Any) -> Any:
        if os.path.basename(path) == name:
            raise OSError(code, os.strerror(code), path)
        return real(path)

    return lambda patch: patch.setattr(os, "scandir", refused)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.ENOENT])
@pytest.mark.parametrize("name", ["00", NAMESPACE.id])
def test_what_may_not_be_listed_goes_on_counting(
    folder: Folder, caplog: pytest.LogCaptureFixture, code: int, name: str
) -> None:
    bound = capacity(20)
    store = folder.open(capacity_bytes=bound)
    write(store, *range(20))
    folder.let_promises_end()
    with pytest.MonkeyPatch.context() as patch:
        unlisted(code, name)(patch)
        store._account.count()
        store._account.count()
        counted = store.used_bytes
    assert counted >= folder.disk_bytes()
    with pytest.MonkeyPatch.context() as patch:
        unlisted(code, name)(patch)
        write(store, *range(20, 60))
    assert folder.disk_bytes() <= bound
    assert caplog.text.count("cannot be listed") == 1
    store._account.count()
    assert store.used_bytes == folder.disk_bytes()
    folder.let_promises_end()
    assert write(store, *range(20, 60)) == [None] * 40
    assert folder.disk_bytes() <= bound
    store.check()
    store.close()


def test_a_folder_that_may_be_listed_and_not_entered_goes_on_counting(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    store = folder.open(capacity_bytes=capacity(20))
    write(store, *range(10))
    shut = os.path.dirname(folder.file(3))
    real = os.lstat

    def refused(path: Any, **where: Any) -> os.stat_result:
        if os.path.dirname(path) == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "lstat", refused)
        store._account.count()
        assert store.used_bytes >= folder.disk_bytes()
        assert f"{shut} cannot be listed" in caplog.text
    store._account.count()
    assert store.used_bytes == folder.disk_bytes()
    store.close()


def test_a_write_that_outlives_its_store_asks_for_no_room(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota would know it as nobody, and hold its grant for ever."""
    store = folder.open(capacity_bytes=capacity(20))
    reserve = store._room.reserve

    def after_the_end(size: int) -> None:
        store.close()
        reserve(size)

    monkeypatch.setattr(store._room, "reserve", after_the_end)
    (kind,) = write(store, 1)
    assert kind is Kind.IO
    assert read_quota(str(folder.root)).members == {}
    assert not os.path.exists(folder.file(1))


def test_nothing_is_granted_where_nobody_ever_counted_what_may_not_be_listed(
    folder: Folder,
) -> None:
    bound = capacity(20)
    store = folder.open(capacity_bytes=bound)
    write(store, *range(20))
    store.close()
    (folder.root / QUOTA).unlink()
    with pytest.MonkeyPatch.context() as patch:
        unlisted(errno.EACCES, "00")(patch)
        store = folder.open(capacity_bytes=bound)
        assert write(store, 20) == [Kind.IO]
        assert read(store, 1) == [payload(1)]
    folder.let_promises_end()
    assert write(store, 20) == [None]
    assert folder.disk_bytes() <= bound
    store.close()


def test_what_another_user_keeps_from_us_is_not_ours(folder: Folder) -> None:
    store = folder.open(capacity_bytes=capacity(20))
    write(store, 1)
    theirs = folder.root / ("f" * 32)
    theirs.mkdir()
    other_user = os.geteuid() + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: other_user)
        unlisted(errno.EACCES, theirs.name)(patch)
        folder.file(1).unlink()
        store._account.count()
    assert store.used_bytes == folder.disk_bytes()
    store.close()
