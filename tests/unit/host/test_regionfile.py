import errno
import fcntl
import os
import resource
import signal
import uuid
from contextlib import suppress

import pytest

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.host.region import (
    DIRECTORY,
    HEADER_BYTES,
    Region,
    sweep,
)
from kvtiers.host.regionfile import region_path
from tests.unit.host.region_kit import RECORD, SLOT, files

# --- what cannot be joined


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_slots": 4}, "num_slots (3 there, 4 here)"),
        ({"slab_slots": 3}, "slab_slots (1 there, 3 here)"),
        ({"slot_bytes": 4096}, "slot_bytes (8192 there, 4096 here)"),
        ({"record": {**RECORD, "layers": 3}}, "layers (2 there, 3 here)"),
        ({"record": {"layers": 2, "groups": [[0, 128]]}}, "dtype (bfloat16 there, None here)"),
    ],
)
def test_ranks_that_disagree_are_told_on_what(attach, change, field):
    first = attach()
    with pytest.raises(ConfigError) as caught:
        attach(**change)
    assert f"disagree on {field}: start" in str(caught.value)
    first.check()
    assert attach().record == RECORD


def test_a_record_is_compared_as_json(attach):
    attach(record={"runs": ((1, 2), (3, 4))})
    assert attach(record={"runs": [[1, 2], [3, 4]]}).record == {"runs": [[1, 2], [3, 4]]}


def test_a_record_larger_than_the_header_is_refused(attach, tmp_path):
    with pytest.raises(ConfigError, match=r"description of the KV cache takes \d+ bytes"):
        attach(record={"x": "y" * HEADER_BYTES})
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "slab_slots"),
    [(0, SLOT, 1), (1, 0, 1), (1, 4097, 1), (5, SLOT, 2), (4, SLOT, 0)],
)
def test_sizes_that_make_no_region_are_refused(attach, num_slots, slot_bytes, slab_slots):
    with pytest.raises(KVTiersError) as caught:
        attach(num_slots=num_slots, slot_bytes=slot_bytes, slab_slots=slab_slots)
    assert caught.value.kind is Kind.BROKEN


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\n", "x" * 201])
def test_a_name_that_is_no_file_name_is_refused(attach, name, tmp_path):
    if name == "..":
        attach(name)
        assert files(tmp_path) == ["kvtiers-...region"]
        return
    with pytest.raises(ConfigError, match="region name"):
        attach(name)


def damaged(start):
    length = int.from_bytes(start[12:16], "little")
    return start[:16] + b"}" * length + start[16 + length :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda start: b"\0" * len(start), "not a kvtiers region"),
        (lambda start: start[:8] + b"\x01" + start[9:], "has format 1, this kvtiers knows 2"),
        (damaged, "damaged header"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(attach, tmp_path, change, words):
    region = attach()
    with open(region.path, "r+b") as file:
        start = file.read(HEADER_BYTES)
        file.seek(0)
        file.write(change(start))
    for join in (attach, lambda: Region.open("a", str(tmp_path))):
        with pytest.raises(ConfigError, match=words):
            join()
    with pytest.raises(AssertionError, match=words):
        region.check()


def test_a_file_cut_short_is_refused_before_it_is_touched(attach, tmp_path):
    region = attach()
    os.truncate(region.path, HEADER_BYTES + SLOT)
    with pytest.raises(ConfigError, match=f"has {HEADER_BYTES + SLOT} bytes instead of"):
        Region.open("a", str(tmp_path))


def test_a_foreign_file_of_that_name_is_refused_and_kept(attach, tmp_path):
    path = region_path("a", str(tmp_path))
    with open(path, "w") as file:
        file.write("somebody's notes")
    with pytest.raises(ConfigError, match="not a kvtiers region"):
        attach()
    assert sweep(str(tmp_path)) == []
    assert files(tmp_path) == ["kvtiers-a.region"]


def test_a_symlink_of_that_name_is_not_followed(attach, tmp_path):
    os.symlink(tmp_path / "elsewhere", region_path("a", str(tmp_path)))
    with pytest.raises(KVTiersError) as caught:
        attach()
    assert caught.value.kind is Kind.IO
    assert sweep(str(tmp_path)) == []


# --- several processes


def test_processes_that_start_together_share_one_region(start, tmp_path):
    script = """
        wait()
        region = Region.attach("a", RECORD, 8, SLOT, directory)
        say(os.fstat(region._fd).st_ino)
        me = int(wait())
        region.view(me, 1, True)[0] = me + 1
        say("written")
        wait()
        say(*(region.view(slot, 1, False)[0] for slot in range(8)))
    """
    ranks = [start(script) for _ in range(8)]
    for rank in ranks:
        rank.tell()
    assert len({rank.hear() for rank in ranks}) == 1
    assert files(tmp_path) == ["kvtiers-a.region"]
    for me, rank in enumerate(ranks):
        rank.tell(str(me))
        assert rank.hear() == "written"
    for rank in ranks:
        rank.tell()
        assert rank.hear() == "1 2 3 4 5 6 7 8"


def test_of_processes_that_disagree_one_side_is_refused(start):
    script = """
        record = {**RECORD, "rank": wait()}
        try:
            region = Region.attach("a", record, 2, SLOT, directory)
            say("attached")
        except KVTiersError as e:
            say(e)
        wait()
    """
    ranks = [start(script) for _ in range(4)]
    for me, rank in enumerate(ranks):
        rank.tell(str(me))
    answers = sorted(rank.hear() for rank in ranks)
    assert answers[0] == "attached"
    assert all("disagree on rank (" in answer for answer in answers[1:])


def test_sweep_takes_what_the_dead_left_and_nothing_else(start, tmp_path):
    live, killed = holder(start, "live"), holder(start, "killed")
    (tmp_path / "kvtiers-notes.txt").write_text("x")
    (tmp_path / "kvtiers-b.region.bak").write_text("x")
    (tmp_path / "kvtiers-empty.region").touch()
    (tmp_path / "kvtiers-folder.region").mkdir()
    os.mkfifo(tmp_path / "kvtiers-fifo.region")
    before = files(tmp_path)
    assert sweep(str(tmp_path)) == []
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    assert sweep(str(tmp_path)) == [region_path("killed", str(tmp_path))]
    assert files(tmp_path) == sorted(set(before) - {"kvtiers-killed.region"})
    live.kill()
    assert sweep(str(tmp_path)) == [region_path("live", str(tmp_path))]


def test_a_region_lives_as_long_as_one_of_its_processes(start, tmp_path):
    one, two = holder(start, "a"), holder(start, "a")
    one.kill()
    assert sweep(str(tmp_path)) == []
    two.kill()
    assert len(sweep(str(tmp_path))) == 1


def test_unlinked_memory_survives_the_death_of_its_maker(start, tmp_path):
    worker = start(
        """
        region = Region.attach("a", RECORD, 1, SLOT, directory)
        region.view(0, 5, True)[:] = b"bytes"
        say("attached")
        wait()
        """
    )
    assert worker.hear() == "attached"
    with Region.open("a", str(tmp_path)) as scheduler:
        scheduler.unlink()
        worker.kill()
        assert bytes(scheduler.view(0, 5, False)) == b"bytes"
    assert files(tmp_path) == []


def test_a_dead_engines_file_is_replaced_not_joined(start, attach, tmp_path):
    old = start(
        """
        region = Region.attach("a", {"another": "model"}, 1, SLOT, directory)
        region.view(0, 1, True)[0] = 66
        say("attached")
        wait()
        """
    )
    assert old.hear() == "attached"
    old.kill()
    with pytest.raises(ConfigError, match="no live worker"):
        Region.open("a", str(tmp_path))
    assert attach().view(0, 1, False)[0] == 0


def test_a_process_killed_at_any_point_of_attach_leaves_nothing_after_a_sweep(start, tmp_path):
    """Each system call that attach makes is the last one once."""
    script = """
        calls = ["flock", "pwrite", "ftruncate", "link", "unlink", "posix_fallocate"]
        import fcntl
        def last(module, name, before):
            real = getattr(module, name)
            def call(*args):
                if not before:
                    real(*args)
                say("dying")
                os.kill(os.getpid(), signal.SIGKILL)
            setattr(module, name, call)
        name, before = wait().split()
        last(fcntl if name == "flock" else os, name, before == "before")
        Region.attach("a", RECORD, 1, SLOT, directory)
    """
    points = ["flock", "pwrite", "ftruncate", "link", "unlink", "posix_fallocate"]
    for point in (f"{call} {when}" for call in points for when in ("before", "after")):
        process = start(script)
        process.tell(point)
        assert process.hear() == "dying"
        process.process.wait()
        assert files(tmp_path) != [], point
        sweep(str(tmp_path))
        assert files(tmp_path) == [], point


def test_attach_and_sweep_at_once_never_lose_a_live_region(start, tmp_path):
    """Ranks come and go while others sweep; whoever is attached shares with whoever is attached."""
    attacher = """
        for round in range(40):
            with Region.attach("a", RECORD, 1, SLOT, directory) as region:
                with Region.attach("a", RECORD, 1, SLOT, directory) as again:
                    region.view(0, 1, True)[0] = round
                    same = os.path.samestat(os.fstat(region._fd), os.fstat(again._fd))
                    links = os.fstat(region._fd).st_nlink  # 2: its maker is about to drop the draft
                    if not same or links not in (1, 2):
                        say("lost in round", round, same, links)
        say("done")
    """
    sweeper = """
        say("sweeping")
        import threading
        stop = threading.Event()
        threading.Thread(target=lambda: (wait(), stop.set())).start()
        while not stop.is_set():
            sweep(directory)
        say("done")
    """
    sweepers = [start(sweeper) for _ in range(2)]
    assert [s.hear() for s in sweepers] == ["sweeping"] * 2
    attachers = [start(attacher) for _ in range(3)]
    assert [a.hear() for a in attachers] == ["done"] * 3
    for process in sweepers:
        process.tell()
        assert process.hear() == "done"
    sweep(str(tmp_path))
    assert files(tmp_path) == []


def before_the_first_shared_lock(monkeypatch, action):
    """Have ``action`` done by somebody else just before this process locks what it opened."""
    real, waiting = fcntl.flock, [action]

    def flock(fd, operation):
        if operation == fcntl.LOCK_SH and waiting:
            waiting.pop()()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_name_taken_away_between_open_and_lock_is_not_joined(attach, tmp_path, monkeypatch):
    old = attach()
    before_the_first_shared_lock(monkeypatch, old.unlink)
    new = attach()
    new.view(0, 1, True)[0] = 1
    assert old.view(0, 1, False)[0] == 0
    assert files(tmp_path) == ["kvtiers-a.region"]
    with Region.open("a", str(tmp_path)) as third:
        assert third.view(0, 1, False)[0] == 1


def test_a_draft_swept_before_it_is_locked_is_made_again(attach, tmp_path, monkeypatch):
    swept = []
    before_the_first_shared_lock(monkeypatch, lambda: swept.extend(sweep(str(tmp_path))))
    attach().check()
    assert len(swept) == 1
    assert files(tmp_path) == ["kvtiers-a.region"]


def test_a_rank_that_is_overtaken_joins(attach, tmp_path, monkeypatch):
    overtaker = []
    before_the_first_shared_lock(monkeypatch, lambda: overtaker.append(attach()))
    attach().view(1, 1, True)[0] = 4
    assert overtaker[0].view(1, 1, False)[0] == 4
    assert files(tmp_path) == ["kvtiers-a.region"]


HOLD = """
    region = Region.attach(wait(), RECORD, 3, SLOT, directory)
    say("attached")
    wait()
"""


def holder(start, name):
    process = start(HOLD)
    process.tell(name)
    assert process.hear() == "attached"
    return process


# --- allocation


def test_more_than_the_directory_can_give_is_refused_and_nothing_is_left():
    """/dev/shm itself: a request of twice its size fails at once, before a page is taken."""
    info = os.statvfs(DIRECTORY)
    name = f"test-{uuid.uuid4().hex}"
    slots = 2 * info.f_blocks * info.f_frsize // 4096 + 1
    try:
        with pytest.raises(ConfigError, match=r"cpu_bytes_to_use needs \d+ bytes, but /dev/shm"):
            Region.attach(name, RECORD, slots, 4096)
        assert not os.path.exists(region_path(name))
    finally:
        with suppress(FileNotFoundError):
            os.unlink(region_path(name))


def test_an_allocation_that_fails_otherwise_leaves_nothing(tmp_path, monkeypatch):
    def fail(fd, offset, length):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(KVTiersError, match=r"allocate .* failed") as caught:
        Region.attach("a", RECORD, 1, SLOT, str(tmp_path))
    assert caught.value.kind is Kind.IO
    assert files(tmp_path) == []


def test_a_file_size_limit_is_reported_and_nothing_is_left(start, tmp_path):
    process = start(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, ({HEADER_BYTES}, {resource.RLIM_INFINITY}))
        try:
            Region.attach("a", RECORD, 1, SLOT, directory)
        except KVTiersError as e:
            say(e.kind.value, e)
        """
    )
    answer = process.hear()
    assert answer.startswith("full create ")
    assert answer.endswith("File too large")
    assert files(tmp_path) == []


def test_attach_in_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(KVTiersError, match=r"create .*absent.* failed: No such file"):
        Region.attach("a", RECORD, 1, SLOT, str(tmp_path / "absent"))
