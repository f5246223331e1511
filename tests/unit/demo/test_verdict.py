from dataclasses import replace

import pytest

from kvtiers.demo.plan import Mode
from kvtiers.demo.verdict import judge


def _failure(records):
    verdict = judge(records)
    assert not verdict.ok
    assert str(verdict).startswith("RESULT failed ")
    assert "\n" not in str(verdict)
    return str(verdict)


def test_good_records_are_ok(samples):
    verdict = judge(samples.good_records())
    assert verdict.ok
    assert str(verdict).startswith("RESULT ok ")
    assert "host tier: 5.0 times as fast, 4800 tokens from host" in str(verdict)
    assert "host + disk: 2.5 times as fast, 1800 tokens from host, 3000 from disk" in str(verdict)


@pytest.mark.parametrize("mode", [Mode.HOST, Mode.DISK])
def test_one_other_answer_fails(samples, mode):
    def other(turn):
        return replace(turn, answer="?") if (turn.conversation, turn.turn) == (1, 2) else turn

    said = _failure(samples.change(samples.good_records(), mode, other))
    assert "1 of 8 answers differ from the reference, first in conversation 2 turn 3" in said
    assert said.count(";") == 0


def test_another_answer_after_a_miss_says_so(samples):
    """A slow tier and a wrong byte look alike otherwise."""

    def other(turn):
        tokens = turn.tokens
        if (turn.conversation, turn.turn) == (1, 1):
            tokens = replace(tokens, computed=tokens.computed + 128, disk=tokens.disk - 128)
        answer = "?" if (turn.conversation, turn.turn) == (1, 2) else turn.answer
        return replace(turn, tokens=tokens, answer=answer)

    said = _failure(samples.change(samples.good_records(), Mode.DISK, other))
    assert "after 128 of its tokens were computed again" in said
    unmissed = samples.change(
        samples.good_records(), Mode.DISK, lambda turn: replace(turn, answer="?")
    )
    assert "computed again" not in _failure(unmissed)


def test_other_answers_without_offload_do_not_matter(samples):
    records = samples.change(
        samples.good_records(), Mode.NONE, lambda turn: replace(turn, answer="?")
    )
    assert judge(records).ok


def test_no_token_from_host_fails(samples):
    said = _failure(samples.change(samples.good_records(), Mode.HOST, samples.without("host")))
    assert "no token came from the host tier" in said


def test_no_token_from_disk_fails(samples):
    said = _failure(samples.change(samples.good_records(), Mode.DISK, samples.without("disk")))
    assert "no token came from disk;" in said


def test_no_token_from_disk_right_after_the_restart_fails(samples):
    def lost(turn):
        affected = turn.first_after_restart and turn.conversation == 1
        return samples.without("disk")(turn) if affected else turn

    said = _failure(samples.change(samples.good_records(), Mode.DISK, lost))
    assert "no token of conversation 2 came from disk after the restart" in said


def test_no_restart_fails(samples):
    def never(turn):
        return replace(turn, first_after_restart=False)

    assert "not restarted" in _failure(samples.change(samples.good_records(), Mode.DISK, never))


@pytest.mark.parametrize("mode", [Mode.HOST, Mode.DISK])
def test_less_than_twice_as_fast_fails(samples, mode):
    def slow(turn):
        return replace(turn, ttft_s=1.01) if turn.turn > 0 else turn

    said = _failure(samples.change(samples.good_records(), mode, slow))
    assert f"{mode.title}: turns from the second on are 2.0 times as fast" in said


def test_the_first_turns_do_not_count_for_speed(samples):
    def slow(turn):
        return replace(turn, ttft_s=60.0) if turn.turn == 0 else turn

    assert judge(samples.change(samples.good_records(), Mode.HOST, slow)).ok


@pytest.mark.parametrize("mode", list(Mode))
def test_a_missing_pass_fails(samples, mode):
    records = samples.good_records()
    del records[mode]
    assert f"{mode.title}: the pass is missing" in _failure(records)


def test_a_missing_turn_fails(samples):
    records = samples.good_records()
    cut = replace(records[Mode.HOST], turns=records[Mode.HOST].turns[:-1])
    assert "not the turns of the reference" in _failure({**records, Mode.HOST: cut})


def test_all_reasons_are_given(samples):
    records = samples.change(samples.good_records(), Mode.HOST, samples.without("host"))
    records = samples.change(records, Mode.DISK, lambda turn: replace(turn, answer="?"))
    said = _failure(records)
    assert "answers differ" in said
    assert "host tier: no token" in said
