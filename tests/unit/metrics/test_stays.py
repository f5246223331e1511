import pytest

from kvtiers.metrics.stays import MAX_KEYS, Stays
from tests.unit.metrics.test_distinct import digests


def test_a_stay_is_from_the_coming_to_the_leaving() -> None:
    stays = Stays()
    keys = digests(1, 64)
    stays.came(keys, 10.0)
    assert stays.left(keys[:32], 25.0) == [15.0]
    assert stays.left(keys[:32], 30.0) == []
    assert repr(stays) == "<Stays 1 followed, one in 32>"


def test_one_in_thirty_two_is_followed_however_they_come() -> None:
    stays = Stays()
    keys = digests(1, 3200)
    at = 0
    for count in [1, 2, 3, 5, 8, 13, 21, 34, 55] * 22:
        stays.came(keys[at : at + count], 0.0)
        at += count
    assert len(stays.left(keys, 1.0)) == pytest.approx(at / 32, abs=1)


def test_who_comes_twice_came_the_first_time() -> None:
    stays = Stays()
    keys = digests(1, 32)
    stays.came(keys, 1.0)
    stays.came(keys, 2.0)
    assert stays.left(keys, 3.0) == [2.0]


def test_a_tier_that_holds_much_is_followed_by_a_fair_sample_within_the_bound() -> None:
    stays = Stays()
    keys = digests(1, 80 * MAX_KEYS)
    for start in range(0, len(keys), 1000):
        stays.came(keys[start : start + 1000], float(start))
        stays.check()
    followed = stays.left(keys, float(len(keys)))
    assert MAX_KEYS / 4 < len(followed) <= MAX_KEYS
    mean = sum(followed) / len(followed)
    assert mean == pytest.approx(len(keys) / 2, rel=0.1), "old ones count as much as new ones"


def test_the_bound_is_checked() -> None:
    stays = Stays()
    stays.came(digests(1, 32), 0.0)
    stays._since.update((key, 0.0) for key in digests(2, MAX_KEYS))
    if __debug__:
        with pytest.raises(AssertionError, match="too many chunks are followed"):
            stays.check()
