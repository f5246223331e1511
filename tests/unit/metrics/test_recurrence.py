import random
from collections import OrderedDict

import pytest

from kvtiers.chunks import Key
from kvtiers.metrics.recurrence import EACH, MAX_MEASURED, ONE_IN, Recurrence
from tests.unit.metrics.test_distinct import digests


def ask(recurrence: Recurrence, keys: list[Key]) -> list[int]:
    distances = recurrence.ask(keys)
    recurrence.check()
    return distances


def test_nothing_is_known_before_something_was_asked() -> None:
    assert Recurrence().new_fraction is None


def test_the_ceiling_is_what_unlimited_room_would_have_had() -> None:
    """Six conversations of which each turn asks for all that was before, and for something new."""
    recurrence = Recurrence()
    asked = there = 0
    seen: set[Key] = set()
    for turn in range(1, 9):
        for conversation in range(6):
            prompt = digests(conversation, 400 * turn)
            asked += len(prompt)
            there += len(seen.intersection(prompt))
            seen.update(prompt)
            ask(recurrence, prompt)
    assert recurrence.new_fraction is not None
    assert 1.0 - recurrence.new_fraction == pytest.approx(there / asked, abs=0.05)


def test_an_answer_that_was_stored_is_not_new_as_part_of_the_next_prompt() -> None:
    recurrence = Recurrence()
    prompt, answer = digests(1, 1000), digests(2, 1000)
    ask(recurrence, prompt)
    recurrence.generated(answer)
    ask(recurrence, prompt + answer)
    assert recurrence.new_fraction == pytest.approx(1 / 3, abs=0.03)


def test_a_prompt_that_is_new_throughout_is_no_more_than_new() -> None:
    recurrence = Recurrence()
    ask(recurrence, digests(1, 20_000))
    assert recurrence.new_fraction is not None
    assert 0.95 < recurrence.new_fraction <= 1.0


def test_distances_tell_what_a_cache_of_that_size_would_have_had() -> None:
    """Beside a plain LRU list over all keys, for uniform and for skewed use."""
    draw = random.Random(7)
    keys = digests(3, 80_000)
    plain: OrderedDict[Key, None] = OrderedDict()
    recurrence = Recurrence()
    size = 16_000
    hits = asked = near = 0
    for _ in range(2400):
        first = int(len(keys) * draw.random() ** 2) // 100 * 100
        batch = keys[first : first + 100]
        hits += sum(key in plain for key in batch)
        asked += len(batch)
        for key in batch:
            plain.pop(key, None)
            plain[key] = None
            if len(plain) > size:
                plain.popitem(last=False)
        near += sum(d < size for d in ask(recurrence, batch))
    assert near * ONE_IN / asked == pytest.approx(hits / asked, abs=0.06)


def test_what_was_generated_lies_between_two_uses_too() -> None:
    recurrence = Recurrence()
    prompt = digests(1, 6400)
    ask(recurrence, prompt)
    recurrence.generated(digests(2, 6400))
    distances = ask(recurrence, prompt)
    assert sum(distances) / len(distances) == pytest.approx(2 * 6400, rel=0.2)


def test_no_more_is_remembered_than_the_bound() -> None:
    recurrence = Recurrence()
    measured = [bytes([0]) + key[1:] for key in digests(1, MAX_MEASURED + 1)]
    keys = [Key(key) for key in measured]
    assert recurrence.ask(keys) == []
    recurrence.check()
    assert recurrence.ask(keys[:1]) == [], "the first was forgotten"
    assert recurrence.ask(keys[-1:]) == [ONE_IN], "the first came after it"
    assert f"{MAX_MEASURED} remembered" in repr(recurrence)


def test_few_are_counted_exactly_and_many_by_one_in_128() -> None:
    recurrence = Recurrence()
    for n in range(8):
        ask(recurrence, digests(n, 50))
    assert recurrence.new_fraction == pytest.approx(1.0, abs=0.01)
    assert recurrence.asked == 400
    for n in range(8, 8 + 300):
        ask(recurrence, digests(n, EACH))
    assert recurrence._one_in == ONE_IN
    assert recurrence.asked == pytest.approx(400 + 300 * EACH, rel=0.1)
    before = recurrence.new
    ask(recurrence, digests(3, 50))
    assert recurrence.new == before, "what is looked at now was looked at always"


def test_keys_of_any_length_are_looked_at() -> None:
    recurrence = Recurrence()
    ask(recurrence, [Key(b""), Key(b"\x01")] * EACH)
    ask(recurrence, [Key(b""), Key(b"\xff")])
