import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import make_key
from kvtiers.kvevents.descriptions import Damaged, Description, decode, encode, tail_of
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


def test_a_record_whose_parts_do_not_fit_is_damaged_whatever_its_checksum_says():
    (chunk,) = prompt(1)
    record = bytearray(encode(chunk.key, chunk.description))
    record[11:13] = (0).to_bytes(2, "little")  # no hash at all, and the last one is the key's
    record[:4] = zlib.crc32(record[4:]).to_bytes(4, "little")
    with pytest.raises(Damaged, match="fit together"):
        decode(bytes(record))


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
