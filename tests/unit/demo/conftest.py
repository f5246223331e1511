"""Records as a good run of the demo leaves them, and ways to spoil them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvtiers.demo.metrics import TokenCounts
from kvtiers.demo.plan import Mode
from kvtiers.demo.records import PassRecord, TurnRecord

TURNS = 4
RESTART_AT = 2

_TTFT_S = {Mode.REFERENCE: 0.2, Mode.NONE: 2.0, Mode.HOST: 0.4, Mode.DISK: 0.8}
_LATER = {
    Mode.REFERENCE: TokenCounts(computed=100, device=900),
    Mode.NONE: TokenCounts(computed=900, device=100),
    Mode.HOST: TokenCounts(computed=100, device=100, host=800),
    Mode.DISK: TokenCounts(computed=100, device=100, host=300, disk=500),
}


def good_records():
    return {mode: _pass(mode) for mode in Mode}


def change(records, mode, change_turn):
    """``records`` with every turn of ``mode`` passed through ``change_turn``."""
    turns = tuple(change_turn(turn) for turn in records[mode].turns)
    return {**records, mode: replace(records[mode], turns=turns)}


def without(*sources):
    """A change of a turn: its tokens from ``sources`` were computed instead."""

    def compute(turn):
        lost = sum(getattr(turn.tokens, source) for source in sources)
        gone = {source: 0 for source in sources}
        tokens = replace(turn.tokens, computed=turn.tokens.computed + lost, **gone)
        return replace(turn, tokens=tokens)

    return compute


def _pass(mode):
    turns = []
    for turn in range(TURNS):
        for conversation in range(2):
            first = turn == 0
            turns.append(
                TurnRecord(
                    conversation=conversation,
                    turn=turn,
                    ttft_s=1.9 if first else _TTFT_S[mode],
                    total_s=3.0,
                    tokens=TokenCounts(computed=1000) if first else _LATER[mode],
                    answer=f"answer {conversation} {turn}",
                    first_after_restart=mode is Mode.DISK and turn == RESTART_AT,
                )
            )
    return PassRecord(mode, tuple(turns), (25.0,))


@pytest.fixture
def samples():
    return SimpleNamespace(good_records=good_records, change=change, without=without)
