import ctypes
import errno
import mmap
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.errors import Kind, KVTiersError
from kvtiers.host import pretouch
from kvtiers.host.pretouch import PORTION_BYTES, PageToucher, populate, portions
from kvtiers.host.region import Region

PAGES = 64
CONTENT = bytes(range(256)) * (PAGES * mmap.PAGESIZE // 256)


@pytest.fixture
def mapped(tmp_path):
    """A file of ``PAGES`` pages, written by another mapping than this shared one."""
    path = tmp_path / "pages"
    path.write_bytes(CONTENT)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def present(memory) -> list[bool]:
    """Which pages of this mapping this process can use without a fault (proc_pid_pagemap(5))."""
    with memoryview(memory) as view:
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * 8)
        entries = pagemap.read(PAGES * 8)
    return [bool(entries[i + 7] & 0x80) for i in range(0, len(entries), 8)]


@pytest.mark.parametrize("kernel_knows", [True, False])
def test_pages_are_mapped_and_their_bytes_stay(mapped, monkeypatch, kernel_knows):
    if not kernel_knows:
        monkeypatch.setattr(pretouch, "_MADV_POPULATE_WRITE", 9999)
    assert not any(present(mapped))
    with memoryview(mapped)[: PAGES // 2 * mmap.PAGESIZE] as half:
        populate(half)
    assert all(present(mapped)[: PAGES // 2])
    with memoryview(mapped) as whole:
        populate(whole)
    assert all(present(mapped))
    assert mapped[:] == CONTENT


def test_what_cannot_be_touched_raises_and_keeps_no_view(mapped, monkeypatch):
    def refuse(*_):
        ctypes.set_errno(errno.EFAULT)
        return -1

    monkeypatch.setattr(pretouch, "_libc", SimpleNamespace(madvise=refuse))
    with memoryview(mapped) as view, pytest.raises(OSError, match="Bad address"):
        populate(view)


@given(st.integers(0, 9 * PORTION_BYTES), st.integers(1, 5))
def test_each_turn_covers_everything_and_begins_elsewhere(total, turns):
    orders = [portions(total, turn, turns) for turn in range(turns)]
    for order in orders:
        ends = sorted((p.start, p.stop) for p in order)
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends)][: len(ends)]
        assert max((stop for _, stop in ends), default=0) == total
    if total >= turns * PORTION_BYTES:
        assert len({order[0].start for order in orders}) == turns


@pytest.fixture
def region(tmp_path):
    with Region.attach("touched", {}, 3, PORTION_BYTES, str(tmp_path)) as made:
        yield made


def test_a_region_is_touched_once_and_says_so(region, caplog):
    caplog.set_level("INFO", "kvtiers")
    toucher = region.touch_ahead(1, 2)
    assert region.touch_ahead() is toucher
    toucher.wait()
    toucher.check()
    assert repr(toucher) == f"<PageToucher ended: {3 * PORTION_BYTES} of {3 * PORTION_BYTES} bytes>"
    begin, end = (record.getMessage() for record in caplog.records)
    assert begin == "touching 0.0 GiB of host memory in the background"
    assert end.startswith("touched 0.0 GiB of host memory in ")
    region.close()
    with pytest.raises(KVTiersError) as caught:
        region.touch_ahead()
    assert caught.value.kind is Kind.CLOSED


def test_it_gets_away_from_where_it_was_started_and_says_how_far_it_is(region, caplog):
    caplog.set_level("INFO", "kvtiers")
    times = iter(range(0, 1000, 6))
    threads = []

    def note(*_):
        threads.append(threading.current_thread().name)

    toucher = PageToucher(region.buffer, prepare=note, touch=note, clock=lambda: float(next(times)))
    toucher.wait()
    assert threads == ["kvtiers-toucher"] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert lines[1:-1] == ["touched 0.0 of 0.0 GiB so far"]


def test_stopping_waits_for_the_portion_under_way_only(region):
    reached, go_on, touched = threading.Event(), threading.Event(), []

    def touch(pages):
        reached.set()
        assert go_on.wait(60)
        touched.append(len(pages))

    toucher = PageToucher(region.buffer, touch=touch)
    assert reached.wait(60)
    assert "at work" in repr(toucher)
    stopper = threading.Thread(target=toucher.stop)
    stopper.start()
    assert toucher._stopping.wait(60)
    go_on.set()
    stopper.join(60)
    assert touched == [PORTION_BYTES]
    assert toucher.touched == PORTION_BYTES
    toucher.stop()


def test_a_region_that_is_closed_meanwhile_is_unmapped(tmp_path):
    region = Region.attach("closed", {}, 3, PORTION_BYTES, str(tmp_path))
    toucher = region.touch_ahead()
    region.close()
    assert "ended" in repr(toucher)
    with pytest.raises(ValueError, match="closed"):
        region._map.size()


def test_an_error_ends_it_with_a_line_and_nothing_else(region, caplog):
    def touch(pages):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    toucher = PageToucher(region.buffer, touch=touch)
    toucher.wait()
    assert "touched up to 0.0 GiB only ([Errno 12] Cannot allocate memory)" in caplog.text
    toucher.check()
