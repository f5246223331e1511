import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import make_key
from kvtiers.kvevents.table import Known, ResidencyTable, chunk_name, final_hash, named

from .tree import prompt

NAMES = st.integers(1, 40).map(lambda n: n * 256 + 5)  # one shard, neighbouring slots


@given(st.lists(st.tuples(NAMES, st.one_of(st.none(), st.integers(0, 9)))))
def test_it_is_a_dictionary(steps):
    table, model = ResidencyTable(), {}
    for name, value in steps:
        if value is None:
            table.drop(name)
            model.pop(name, None)
        else:
            table.put(name, Known(1, 2, 3, 4, value))
            model[name] = value
    table.check()
    assert {n: k.group for n, k in table.entries()} == model
    assert len(table) == len(model)
    assert all(table.get(n * 256 + 5) is not None or n * 256 + 5 not in model for n in range(41))


@pytest.mark.parametrize("count", [20_000, 50_000])
def test_a_chunk_takes_at_most_a_hundred_bytes(count):
    table = ResidencyTable()
    for _ in range(count):
        table.put(int.from_bytes(os.urandom(8)), Known(1 << 39, 1 << 31, 1, 1, 3))
    assert table.nbytes / len(table) <= 100


def test_groups_of_one_digest_are_apart_and_the_hash_comes_back():
    (chunk,) = prompt(1)
    digest = chunk.digests[-1]
    names = [chunk_name(make_key(digest, g)) for g in range(4)]
    assert len({*names}) == 4
    assert [final_hash(n, g) for g, n in enumerate(names)] == chunk.hashes * 4
    assert named(chunk.hashes[0], 3) == names[3]


def test_a_lost_chunk_is_noticed():
    table = ResidencyTable()
    table.put(7, Known())
    table.check()
    assert repr(table).startswith("<ResidencyTable 1 chunks")
    table._shards[7].used = 2
    with pytest.raises(AssertionError, match="is counted that is not there"):
        table.check()
