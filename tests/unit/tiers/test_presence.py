import pytest

from kvtiers.tiers.presence import Presence
from tests.unit.test_checks import broken
from tests.unit.tiers.tier_kit import key

A, B, C = key(1), key(2), key(3)


def test_bytes_are_those_of_the_chunks_that_are_known_each_once() -> None:
    sizes = {A: 1, B: 10, C: 100}
    presence = Presence(10, 5, lambda keys: sum(sizes[k] for k in keys))
    assert presence.resident_bytes == 0
    presence.add([A, A])
    presence.announce([A, B, B])
    presence.scanned([A, C])
    assert presence.resident_bytes == 111
    presence.deny([C], 0.0)
    presence.discard([B, B])
    assert presence.resident_bytes == 101
    presence.check()
    presence._bytes += 1
    with broken("do not add up"):
        presence.check()


@pytest.mark.parametrize("add", [Presence.add, Presence.announce])
def test_once_chunks_were_forgotten_their_bytes_are_not_known(add) -> None:  # type: ignore[no-untyped-def]
    presence = Presence(2, 5, len)
    add(presence, [A, B])
    assert presence.resident_bytes == 2
    add(presence, [C])
    assert presence.resident_bytes is None
    presence.discard([A, B, C])
    presence.check()
    assert presence.resident_bytes is None


def test_absence_is_known_only_when_complete() -> None:
    presence = Presence(10, 5)
    assert presence.find(A, 0) is None
    presence.complete = True
    assert presence.find(A, 0) is False
    presence.add([A])
    assert presence.find(A, 0) is True


def test_a_residency_is_announced_once_even_if_it_was_found_first() -> None:
    presence = Presence(10, 5)
    presence.add([A])
    assert presence.announce([A, B]) == [A, B]
    presence.add([A])
    assert presence.announce([A, B, C]) == [C]
    presence.discard([B])
    assert presence.announce([B]) == [B]


def test_removal_is_told_once() -> None:
    presence = Presence(10, 5)
    presence.add([A])
    assert presence.discard([A, B]) == [A]
    assert presence.discard([A]) == []


def test_denial_hides_a_chunk_until_it_expires() -> None:
    presence = Presence(10, 5)
    presence.add([A])
    presence.deny([A], now=0)
    assert presence.find(A, 4.9) is False
    assert presence.holds(A)
    assert presence.find(A, 5) is True


def test_adding_ends_a_denial() -> None:
    presence = Presence(10, 5)
    presence.deny([A], now=0)
    presence.add([A])
    assert presence.find(A, 0) is True


def test_overflow_forgets_the_longest_unused_and_then_asks() -> None:
    presence = Presence(2, 5)
    presence.complete = True
    presence.add([A, B])
    presence.touch([A, C])
    presence.add([C])
    assert (presence.find(A, 0), presence.find(B, 0), presence.find(C, 0)) == (True, None, True)
    assert len(presence) == 2
    presence.check()


def test_denials_are_bounded_and_expire_in_order() -> None:
    presence = Presence(2, 5)
    presence.deny([A, B], now=0)
    presence.deny([A], now=1)
    presence.deny([C], now=2)
    presence.expire(3)
    assert "2 denied" in repr(presence)
    assert presence.find(B, 3) is None
    presence.expire(7)
    assert "0 denied" in repr(presence)
    presence.check()


def test_a_denial_outlives_the_step_that_asked_even_without_a_time_to_live() -> None:
    presence = Presence(10, 0)
    presence.deny([A], now=1)
    presence.expire(1.4)
    assert presence.find(A, 1.4) is False
    assert presence.find(A, 1.5) is None


def test_what_was_seen_before_a_loss_is_not_believed() -> None:
    presence = Presence(10, 5)
    presence.add([A, B])
    before = presence.moment
    presence.discard([A, C])
    presence.add([A, B, C], before)
    assert [presence.holds(k) for k in (A, B, C)] == [False, True, False]
    presence.add([A, C], presence.moment)
    assert presence.holds(A)
    assert presence.holds(C)


def test_what_we_wrote_is_there_whatever_was_lost_before() -> None:
    presence = Presence(10, 5)
    presence.discard([A])
    assert presence.announce([A]) == [A]
    assert presence.holds(A)


def test_losses_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.tiers.presence.MAX_LOSSES", 2)
    presence = Presence(10, 5)
    presence.discard([A, B, C])
    presence.check()
    presence.add([A, B, C], 0)
    assert [presence.holds(k) for k in (A, B, C)] == [True, False, False]


def test_what_was_lost_since_its_write_began_is_neither_announced_nor_known() -> None:
    presence = Presence(10, 5)
    presence.add([C])
    began = presence.moment
    presence.discard([A, C])
    assert presence.announce([A, B, C], began) == [B]
    assert (presence.find(A, 0), presence.find(C, 0)) == (None, None)
    assert presence.announce([A], presence.moment) == [A]


def test_what_was_announced_and_forgotten_is_said_to_be_gone_all_the_same() -> None:
    presence = Presence(2, 5)
    assert presence.announce([A, B, C]) == [A, B, C]
    assert presence.discard([A]) == [A]
