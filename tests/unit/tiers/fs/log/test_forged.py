"""Segments whose checksums are right and whose claims are absurd: they hold nothing, quickly."""

import os
import struct

import pytest
from xxhash import xxh3_64_intdigest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.log import format as fmt
from kvtiers.tiers.fs.log import survivors
from kvtiers.tiers.fs.log.format import Header
from kvtiers.tiers.fs.log.index import MAX_CHUNK_PAGES
from kvtiers.tiers.fs.log.pool import Pool
from tests.unit.tiers.fs.log.log_kit import CAPACITY, SEGMENT, held, read, write
from tests.unit.tiers.tier_kit import NAMESPACE, filled, key, payload

MANY = range(200)


def lay(log, header: Header) -> None:
    """The only segment is one with this header."""
    log.open().close()
    for path in log.segments():
        path.unlink()
    with open(log.root / "log" / "00000000.kvs", "wb") as f:
        f.write(fmt.pack_header(header))
        f.truncate(SEGMENT)


@pytest.mark.parametrize(
    "length", [0, PAGE_BYTES - 1, SEGMENT + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
)
def test_a_file_is_not_made_as_long_as_it_claims(log, length):
    lay(log, Header(1, length, 1.0, NAMESPACE.id))
    store = log.open()
    assert log.disk_bytes() <= CAPACITY
    write(store, *MANY)
    assert log.disk_bytes() <= CAPACITY


def test_a_file_is_not_lengthened_beyond_the_capacity(log):
    lay(log, Header(1, 8 * SEGMENT, 1.0, NAMESPACE.id))
    lengths = []
    real = os.posix_fallocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *a: (lengths.append(a[2]), real(*a)))
        log.open()
    assert max(lengths, default=0) <= CAPACITY


@pytest.mark.parametrize("sequence", [1 << 44, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_a_number_after_which_there_is_none_does_not_end_all_writes(log, sequence):
    lay(log, Header(sequence, SEGMENT, 1.0, NAMESPACE.id))
    store = log.open()
    write(store, *MANY)
    store.close()
    assert held(log.open(), MANY)


@pytest.mark.parametrize("rows", [b"\1\2\3", struct.pack("<HI", 36, 2) + bytes(70)])
def test_rows_that_are_cut_off_are_none(rows):
    assert fmt.parse_table(rows, xxh3_64_intdigest(rows)) is None


def test_no_chunk_is_longer_than_the_index_can_say():
    assert Pool(1 << 40, fmt.MAX_SEGMENT_PAGES * PAGE_BYTES).largest <= MAX_CHUNK_PAGES * PAGE_BYTES


def test_a_moment_without_memory_costs_survivors_and_no_segment(log, monkeypatch):
    store = log.open()
    write(store, *range(8))
    read(store, *range(8))

    def nothing(count: int) -> memoryview:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(survivors, "pages", nothing)
        write(store, *MANY[8:])
    for n in MANY:
        write(store, 1000 + n)
    store.check()
    states = [s.state.value for s in store._core.pool.segments.values()]
    assert "draining" not in states
    assert read(store, 1000 + MANY[-1]) == [payload(1000 + MANY[-1])]


def test_a_segment_of_another_length_that_cannot_be_removed_is_no_fault(log, monkeypatch):
    store = log.open()
    write(store, *range(40))
    store.close()
    larger = log.open(capacity_bytes=400 * SEGMENT)
    larger.check()

    def refused(number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(larger._core.files, "remove", refused)
    victim = larger._core.pool.victim()
    assert victim is not None
    left = {k for k in victim.keys if k in larger._core.index}
    victim.nbytes -= PAGE_BYTES  # of a length that suits no more
    larger._roller.empty(victim)
    larger._roller.report()
    assert left <= {k for k, reason in log.removed if reason is Reason.EVICTED}


def test_writing_many_is_not_quadratic(log, monkeypatch):
    store = log.open()
    looked = []
    real = store._roller.make_room
    monkeypatch.setattr(store._roller, "make_room", lambda w: (looked.append(len(w)), real(w))[1])
    view = filled(1)
    assert store.write([Item(key(n), view) for n in range(2000)]) == [None] * 2000
    assert max(looked) <= fmt.MAX_ROWS
