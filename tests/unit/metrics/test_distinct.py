import hashlib

import pytest

from kvtiers.chunks import Key, make_key
from kvtiers.metrics.distinct import REGISTERS, Distinct


def digests(seed: int, count: int, group: int = 0) -> list[Key]:
    return [make_key(hashlib.sha256(f"{seed}-{n}".encode()).digest(), group) for n in range(count)]


def counted(keys: list[Key]) -> float:
    distinct = Distinct()
    for key in keys:
        distinct.add(key)
    distinct.check()
    return distinct.count


@pytest.mark.parametrize("count", [10_000, 100_000])
def test_the_error_is_what_the_number_of_registers_promises(count: int) -> None:
    errors = [counted(digests(seed, count)) / count - 1.0 for seed in range(6)]
    promised = 0.84 / REGISTERS**0.5
    assert max(map(abs, errors)) < 3.5 * promised
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < 2 * promised


def test_few_are_counted_as_good_as_exactly() -> None:
    assert counted(digests(1, 1)) == 1.0
    assert counted(digests(1, 100)) == pytest.approx(100, abs=3)


def test_what_went_by_before_is_not_counted_again() -> None:
    distinct = Distinct()
    keys = digests(1, 2000)
    for key in keys:
        distinct.add(key)
    before = distinct.count
    assert [key for key in keys if distinct.add(key)] == []
    assert distinct.count == before


def test_growth_adds_up_to_the_count() -> None:
    distinct = Distinct()
    grown = [distinct.add(key) for key in digests(2, 5000)]
    assert sum(grown) == pytest.approx(distinct.count)


def test_chunks_of_two_groups_are_two() -> None:
    assert counted(digests(1, 500, 0) + digests(1, 500, 1)) == pytest.approx(1000, rel=0.05)


def test_the_chance_is_that_of_the_registers() -> None:
    distinct = Distinct()
    distinct.add(digests(1, 1)[0])
    distinct._chance = 1.0
    if __debug__:
        with pytest.raises(AssertionError, match="chance"):
            distinct.check()
    assert repr(distinct) == "<Distinct about 1 keys>"
