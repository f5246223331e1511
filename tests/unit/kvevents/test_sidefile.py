import os
import signal
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import make_key
from kvtiers.kvevents import sidefile
from kvtiers.kvevents.descriptions import (
    MAX_RECORD_BYTES,
    Damaged,
    Description,
    decode,
    encode,
    tail_of,
)
from kvtiers.kvevents.narrator import Narrator
from kvtiers.kvevents.sidefile import SUFFIX, SideFile

from .tree import prompt

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
EXTRA = st.one_of(
    st.none(), st.lists(st.one_of(st.text(), st.binary(), st.tuples(st.text(), st.integers(-9, 9))))
)


@st.composite
def descriptions(draw):
    size, count = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return Description(
        draw(st.one_of(st.none(), U64)),
        draw(st.lists(U64, min_size=count, max_size=count)),
        draw(st.lists(U32, min_size=size * count, max_size=size * count)),
        size,
        draw(U32),
        draw(st.one_of(st.none(), st.integers(0, 99))),
        draw(st.one_of(st.none(), st.text())),
        draw(st.one_of(st.none(), st.lists(EXTRA, min_size=count, max_size=count))),
    )


def as_lists(value):
    return [as_lists(v) for v in value] if isinstance(value, list | tuple) else value


@given(descriptions(), st.binary(min_size=8, max_size=32), st.integers(0, 65_535))
def test_a_record_says_what_was_said(description, digest, group):
    key = make_key(digest, group)
    record = decode(encode(key, description))
    assert (record.tail, record.group) == (tail_of(key), group)
    assert as_lists(record.description) == as_lists(description)


@given(descriptions(), st.data())
def test_a_damaged_record_is_refused(description, data):
    record = bytearray(encode(make_key(bytes(32), 0), description))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        decode(bytes(record))
    with pytest.raises(Damaged):
        decode(bytes(record[:at]))


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_block_takes_at_most_64_bytes_and_4_a_token(blocks):
    for chunk in prompt(3, blocks=blocks):
        size = len(encode(chunk.key, chunk.description))
        assert size <= 64 * blocks + 4 * len(chunk.tokens)


@pytest.mark.parametrize(
    "wrong", [{"tokens": [1, 2, 3]}, {"tokens": [1, 2, 3, -1]}, {"hashes": []}]
)
def test_nonsense_is_not_written(wrong):
    (chunk,) = prompt(1)
    with pytest.raises(ValueError, match=r"blocks of|does not fit"):
        encode(chunk.key, chunk.description._replace(**wrong))


def opened(folder, dialect="d", max_bytes=1 << 20):
    return SideFile(None if folder is None else str(folder), dialect, max_bytes)


def filled(side, chunks):
    return [side.append(encode(c.key, c.description)) for c in chunks]


def found(side):
    return [record.tail for _, record in side.load()]


def tails(chunks):
    return [tail_of(c.key) for c in chunks]


@pytest.mark.parametrize("named", [True, False])
def test_what_is_appended_is_read_flushed_or_not(tmp_path, named):
    chunks = prompt(5, blocks=2)
    side = opened(tmp_path if named else None)
    places = filled(side, chunks[:3])
    side.flush()
    places += filled(side, chunks[3:])
    assert [side.read(p).tail for p in places] == tails(chunks)
    side.check()
    assert "SideFile" in repr(side)
    side.close()
    side.close()


def test_it_outlives_the_process(tmp_path):
    chunks = prompt(4)
    for part in (chunks[:2], chunks[2:]):
        side = opened(tmp_path)
        filled(side, part)
        side.close()
    side = opened(tmp_path)
    assert found(side) == tails(chunks)
    assert len([*tmp_path.glob(f"*{SUFFIX}")]) == 1
    side.close()


def test_a_torn_tail_is_cut_off_and_written_over(tmp_path):
    chunks = prompt(3)
    side = opened(tmp_path)
    filled(side, chunks)
    side.close()
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    size = path.stat().st_size
    for lost in (1, 20, 60):
        with path.open("r+b") as f:
            f.truncate(size - lost)
        side = opened(tmp_path)
        assert found(side) == tails(chunks[:2])
        filled(side, chunks[2:])
        side.close()
    side = opened(tmp_path)
    assert found(side) == tails(chunks)
    side.close()


def test_engines_beside_each_other_read_each_other(tmp_path):
    mine, others = prompt(3), prompt(3, seed=9)
    a = opened(tmp_path)
    filled(a, mine)
    a.flush()
    b = opened(tmp_path)
    assert sorted(found(b)) == sorted(tails(mine))
    places = filled(b, others)
    assert not b.is_own(next(p for p, r in b.load() if r.tail == tails(mine)[0]))
    assert [b.read(p).tail for p in places] == tails(others)
    a.close()
    b.close()
    c = opened(tmp_path)
    assert sorted(found(c)) == sorted(tails(mine + others))
    c.close()


def test_who_dies_while_making_room_leaves_nothing_for_good(tmp_path):
    chunks = prompt(9)
    for _ in range(3):
        dying = os.fork()
        if not dying:
            side = opened(tmp_path)
            places = [place for place, _ in side.load()] or filled(side, chunks)
            compacting = side.compact(places)
            next(compacting)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(dying, 0)[1] == signal.SIGKILL
        assert len([*tmp_path.iterdir()]) == 2
    side = opened(tmp_path)
    assert found(side) == tails(chunks)
    assert len([*tmp_path.iterdir()]) == 1
    side.close()


def test_it_is_torn_at_any_byte_and_opens(tmp_path):
    side = opened(tmp_path)
    filled(side, prompt(2))
    side.close()
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    whole = path.read_bytes()
    for at in range(len(whole)):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / f"a{SUFFIX}").write_bytes(whole[:at])
        torn = bytearray(whole)
        torn[at] ^= 0xFF
        (folder / f"b{SUFFIX}").write_bytes(torn)
        side = opened(folder)
        assert set(found(side)) <= set(tails(prompt(2)))
        assert filled(side, prompt(1)) != [None]
        side.check()
        side.close()


def test_what_is_no_file_of_ours_is_passed_over(tmp_path, monkeypatch):
    side = opened(tmp_path)
    filled(side, prompt(1))
    (tmp_path / f"0{SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f"1{SUFFIX}")
    (tmp_path / f"2{SUFFIX}").symlink_to("gone by now")
    beside = opened(tmp_path)
    assert repr(beside).endswith("1 others>")
    beside.close()
    side.close()
    monkeypatch.setattr(sidefile, "MAX_OTHERS", 2)
    several = [opened(tmp_path) for _ in range(4)]
    assert repr(several[-1]).endswith("2 others>")
    for side in several:
        side.close()


def test_a_file_that_cannot_be_written_is_let_go_of(tmp_path, monkeypatch):
    side = opened(tmp_path)
    filled(side, prompt(1))
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="of the test"):
            side.close()
    side.close()
    assert len([*tmp_path.iterdir()]) == 1
    again = opened(tmp_path)
    assert len([*tmp_path.iterdir()]) == 1, "nobody holds a lock on it"
    again.close()


def test_what_was_refused_is_not_there_and_what_was_not_is(monkeypatch):
    chunks = prompt(3)
    monkeypatch.setattr(sidefile, "_FLUSH_BYTES", 100)
    side = opened(None)
    (first,) = filled(side, chunks[:1])
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="of the test"):
                filled(side, chunks[1:2])
    (last,) = filled(side, chunks[2:])
    assert [side.read(p).tail for p in (first, last)] == tails(chunks[::2])
    assert found(side) == tails(chunks[::2])
    side.check()
    side.close()


def test_room_that_cannot_be_made_is_not_looked_for_each_time(tmp_path, monkeypatch):
    tried = []

    def made(self):
        tried.append(self)
        raise OSError("of the test")

    narrator = Narrator({}, {}, opened(tmp_path, max_bytes=1000))
    monkeypatch.setattr(SideFile, "_fresh", made)
    for chunk in prompt(200):
        with suppress(OSError):
            narrator.describe(chunk.key, chunk.description, expected=True)
    assert len(tried) == 1
    narrator.check()
    narrator.close()


def refuse(*args):
    raise OSError("of the test")


@pytest.mark.parametrize(
    ("blocks", "rest"),
    [
        (0, b""),  # no hash at all, and the last one is the key's
        (60_000, b""),
        (1, b"\x01"),
        (1, b"\xc1"),
    ],
)
def test_a_record_whose_parts_do_not_fit_is_damaged_whatever_its_checksum_says(blocks, rest):
    (chunk,) = prompt(1)
    record = bytearray(encode(chunk.key, chunk.description)) + rest
    record[4:8] = len(record).to_bytes(4, "little")
    record[11:13] = blocks.to_bytes(2, "little")
    record[:4] = zlib.crc32(record[4:]).to_bytes(4, "little")
    with pytest.raises(Damaged, match="fit together"):
        decode(bytes(record))


def test_what_could_not_be_read_again_is_not_written():
    (chunk,) = prompt(1)
    large = chunk.description._replace(extra_keys=[["x" * MAX_RECORD_BYTES]])
    with pytest.raises(ValueError, match="could not be read again"):
        encode(chunk.key, large)


def test_another_dialect_is_not_understood(tmp_path):
    side = opened(tmp_path)
    filled(side, prompt(3))
    side.close()
    other = opened(tmp_path, dialect="e")
    assert found(other) == []
    other.close()


@pytest.mark.parametrize("named", [True, False])
def test_it_is_bounded_and_makes_room(tmp_path, named):
    chunks = prompt(50)
    size = len(encode(chunks[0].key, chunks[0].description))
    side = opened(tmp_path if named else None, max_bytes=20 * size)
    places = [p for p in filled(side, chunks) if p is not None]
    assert 15 < len(places) < 20
    side.check()
    moved = dict(side.compact(places[::2]))
    assert [side.read(moved[p]).tail for p in places[::2]] == tails(chunks[: len(places) : 2])
    assert filled(side, chunks[:1]) != [None]
    side.check()
    side.close()
    assert len([*tmp_path.iterdir()]) == named
