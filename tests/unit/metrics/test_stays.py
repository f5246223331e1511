import pytest

from kvtiers.metrics.stays import MAX_KEYS, Stays
from tests.unit.metrics.test_distinct import digests


def test_a_stay_is_from_the_coming_to_the_leaving_by_tier() -> None:
    stays = Stays()
    one, two = digests(1, 2)
    stays.came("0:primary", [one, two], 10.0)
    stays.came("1:fs", [one], 20.0)
    assert stays.left("0:primary", [one], 25.0) == [15.0]
    assert stays.left("1:fs", [one, two], 26.0) == [6.0]
    assert stays.left("0:primary", [one], 30.0) == []
    assert stays.left("2:unknown", [one], 30.0) == []
    assert repr(stays) == "<Stays followed: 0:primary 1, 1:fs 0>"


def test_a_tier_that_holds_much_is_followed_by_a_fair_sample_within_the_bound() -> None:
    stays = Stays()
    keys = digests(1, 20 * MAX_KEYS)
    for start in range(0, len(keys), 1000):
        stays.came("1:fs", keys[start : start + 1000], float(start))
        stays.check()
    followed = stays.left("1:fs", keys, float(len(keys)))
    assert MAX_KEYS / 4 < len(followed) <= MAX_KEYS
    mean = sum(followed) / len(followed)
    assert mean == pytest.approx(len(keys) / 2, rel=0.1), "old ones count as much as new ones"


def test_the_bound_is_checked() -> None:
    stays = Stays()
    stays.came("1:fs", digests(1, 4), 0.0)
    stays.check()
    stays._tiers["1:fs"].below = b"\0\0"
    if __debug__:
        with pytest.raises(AssertionError, match="beside the sample"):
            stays.check()
