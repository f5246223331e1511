"""What people are told of a request, and the tokens that it is about."""

import json

import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout
from kvtiers.events import PRIMARY, LookupsSettled, MissReason
from kvtiers.observe.documents import life, summary
from kvtiers.observe.prompts import Prompts, Tokens
from kvtiers.observe.requests import Record
from kvtiers.observe.sentences import why
from tests.unit.observe.observer_kit import event, hits, misses

FULL = Prompts(ChunkLayout((GroupLayout(0, PAGE_BYTES, 16),)))
WINDOWED = Prompts(
    ChunkLayout(
        (GroupLayout(0, PAGE_BYTES, 16, keeps_every_chunk=False), GroupLayout(1, PAGE_BYTES, 16))
    )
)
ABSENT = (PRIMARY, MissReason.ABSENT)


def test_a_full_hit() -> None:
    said = why(event("r", hits(0, 4), prompt_tokens=70), FULL)
    assert said == "All 64 tokens asked for were loaded (64 from 0:primary)."


def test_where_a_prefix_ended_and_what_was_not_asked_for() -> None:
    told = event(
        "r",
        hits(0, 2),
        hits(2, 1, "1:fs"),
        misses(3, 1, ABSENT, ("1:fs", MissReason.CORRUPT)),
        prompt_tokens=170,
        waited_s=0.25,
    )
    assert FULL.tokens(told) == Tokens(asked=160, missed=112, unasked=96)
    assert why(told, FULL) == (
        "48 of 160 tokens were loaded (32 from 0:primary, 16 from 1:fs). The chunk at token 48 was"
        " missing: 0:primary does not have it; what 1:fs had of it was damaged. What follows was"
        " not asked for: a prefix ends at its first missing chunk. It waited 0.25 s for tiers."
    )


def test_what_the_accelerator_had_is_not_asked_for() -> None:
    told = event("r", hits(3, 2), misses(5, 1), prompt_tokens=100)
    assert FULL.tokens(told) == Tokens(asked=48, missed=16, unasked=0)


@pytest.mark.parametrize("reason", list(MissReason))
def test_every_reason_has_words_that_name_the_tier(reason: MissReason) -> None:
    said = why(event("r", misses(0, 1, ABSENT, ("1:fs", reason))), FULL)
    assert "1:fs" in said.partition("; ")[2]


def test_a_copy_that_failed_is_said_first() -> None:
    said = why(event("r", misses(0, 1, (PRIMARY, MissReason.FAILED))), FULL)
    assert "A copy to the accelerator failed" in said


def test_a_window_that_is_missing_is_why_nothing_is_loaded() -> None:
    told = event("r", misses(6, 2, group=0), hits(0, 8, group=1), loaded={}, prompt_tokens=140)
    assert WINDOWED.prefix_group == 1
    assert why(told, WINDOWED) == (
        "None of the 128 tokens asked for were loaded, although 8 chunks were found. The chunk at"
        " token 96 of group 0, which keeps a window or a state, was missing: 0:primary does not"
        " have it."
    )


def test_without_runs_misses_are_counted() -> None:
    told = LookupsSettled("r", 2, {}, {ABSENT: 2}, {}, 0.0, {}, untold=2)
    assert why(told, FULL) == (
        "None of the 32 tokens asked for were loaded. Chunks that were missing: 2 absent in"
        " 0:primary."
    )


def test_documents_are_json_and_agree_with_each_other() -> None:
    told = event(
        "r", hits(0, 2), misses(2, 1, ABSENT, ("1:fs", MissReason.PENDING)), took_s={"1:fs": 5.0}
    )
    record = Record(7.0, told)
    whole = life([record], FULL)
    assert json.loads(json.dumps(whole)) == whole
    assert {**whole, **summary(record, FULL)} == whole
    assert whole["runs"][1] == {
        "group": 0,
        "first": 2,
        "count": 1,
        "first_token": 32,
        "tokens": 16,
        "key": None,
        "verdicts": [
            {"tier": PRIMARY, "verdict": "miss", "reason": "absent", "seconds": 0.0},
            {"tier": "1:fs", "verdict": "miss", "reason": "pending", "seconds": 5.0},
        ],
    }


def test_a_request_that_asked_again_shows_both_and_others_are_named() -> None:
    first, again, other = (event(name, hits(0, n)) for name, n in (("a", 1), ("a", 2), ("a-1", 3)))
    whole = life([Record(3.0, again), Record(2.0, other), Record(1.0, first)], FULL)
    assert [each["settled_at"] for each in whole["earlier"]] == [1.0]
    assert whole["others"] == ["a-1"]
