"""Prefixes of prompts, and who served them."""

import pytest

from kvtiers.proxy.affinity import Affinity, prompt_of, several

LONG = "all human beings are born free and equal in dignity and rights " * 40


def chat(*texts, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": t} for t in texts], **fields}


def common(one, other):
    return sum(a == b for a, b in zip(prompt_of(one, 1), prompt_of(other, 1), strict=False))


def test_a_conversation_that_goes_on_has_the_prefixes_of_its_turn_before():
    first = chat(LONG)
    hashes = prompt_of(first, 1)
    assert len(hashes) >= 5
    assert common(first, chat(LONG, "and", LONG)) == len(hashes)


@pytest.mark.parametrize(
    "fields", [{"model": "n"}, {"tools": [{}]}, {"cache_salt": "s"}, {"chat_template": "t"}]
)
def test_what_changes_the_beginning_changes_all(fields):
    assert common(chat(LONG), {**chat(LONG), **fields}) == 0


def test_what_does_not_change_the_prompt_changes_nothing():
    other = chat(LONG, temperature=0.3, max_tokens=3, stream=True)
    assert prompt_of(chat(LONG), 1) == prompt_of(other, 1)


def test_prompts_that_part_have_their_beginning_in_common():
    other = LONG[:1000] + "x" + LONG[1001:]
    same = common({"prompt": LONG}, {"prompt": other})
    assert 0 < same < len(prompt_of({"prompt": other}, 1))


def test_the_seed_decides_the_hashes():
    assert not set(prompt_of(chat(LONG), 1)) & set(prompt_of(chat(LONG), 2))


def test_few_hashes_are_made_of_the_longest_prompt():
    assert len(prompt_of({"prompt": "x" * (16 << 20)}, 1)) <= 50


def test_tokens_have_prefixes_too_and_a_list_of_one_is_that_one():
    tokens = list(range(1000))
    assert common({"prompt": tokens}, {"prompt": [*tokens, 1]}) >= 5
    assert prompt_of({"prompt": [LONG]}, 1) == prompt_of({"prompt": LONG}, 1)
    assert prompt_of({"prompt": [tokens]}, 1) == prompt_of({"prompt": tokens}, 1)


@pytest.mark.parametrize(
    "prompt", ["", "short", [], [[]], [LONG, LONG], [[1] * 999, [2]], "\ud800"]
)
def test_what_is_short_or_several_has_none(prompt):
    assert prompt_of({"prompt": prompt}, 1) == ()


def test_several_prompts_in_one_request():
    assert several({"prompt": ["a", "b"]})
    assert several({"prompt": [[1], [2]]})
    assert not several({"prompt": [1, 2]})
    assert not several({"prompt": ["a"]})
    assert not several(chat("a", "b"))


def test_the_longest_known_prefix_is_asked_for():
    affinity = Affinity()
    affinity.note((1, 2, 3), "a")
    affinity.note((1, 2, 9), "b")
    assert affinity.source_for((1, 2, 3, 4)) == "a"
    assert affinity.source_for((1, 2, 5)) == "b"
    assert affinity.source_for((7,)) is None
    assert affinity.source_for(()) is None


def test_what_was_used_last_is_kept():
    affinity = Affinity(max_prefixes=3)
    affinity.note((1, 2, 3), "a")
    affinity.note((1,), "a")
    affinity.note((4,), "b")
    affinity.check()
    assert affinity.source_for((2,)) is None
    assert affinity.source_for((1,)) == "a"
    assert repr(affinity) == "<Affinity 3/3 prefixes>"
