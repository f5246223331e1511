"""Whether the demo showed what it claims. Pure: records in, a sentence out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtiers.demo.plan import Mode
from kvtiers.demo.records import PassRecord, Records, TurnRecord, same_answers, speedup

MIN_SPEEDUP = 2.0
"""The later turns must get their first token at least this many times sooner."""

_OFFLOADED = (Mode.HOST, Mode.DISK)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome and the reasons for it."""

    ok: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """The last line of the demo."""
        return f"RESULT {'ok' if self.ok else 'failed'} {'; '.join(self.reasons)}"


def judge(records: Records) -> Verdict:
    """Judge complete records of all modes; whatever is missing or worse than claimed fails."""
    failures = tuple(_incomplete(records)) or (
        *_differing(records),
        *_unused(records),
        *_slow(records),
    )
    if failures:
        return Verdict(False, failures)
    return Verdict(True, tuple(_achieved(records)))


def _incomplete(records: Records) -> Iterator[str]:
    reference = records.get(Mode.REFERENCE)
    asked = [(t.conversation, t.turn) for t in reference.turns] if reference else []
    for mode in Mode:
        record = records.get(mode)
        if record is None or not record.later_turns:
            yield f"{mode.title}: the pass is missing"
        elif [(t.conversation, t.turn) for t in record.turns] != asked:
            yield f"{mode.title}: not the turns of the reference"


def _differing(records: Records) -> Iterator[str]:
    reference = records[Mode.REFERENCE]
    for mode in _OFFLOADED:
        same = same_answers(records[mode], reference)
        if all(same):
            continue
        first = same.index(False)
        turn, expected = records[mode].turns[first], reference.turns[first]
        yield (
            f"{mode.title}: {same.count(False)} of {len(same)} answers differ from the reference, "
            f"first in conversation {turn.conversation + 1} turn {turn.turn + 1} "
            f"({turn.tokens.cached} tokens cached, {expected.tokens.cached} in the reference)"
            f"{_missed(records[mode].turns[: first + 1], reference, turn.conversation)}"
        )


def _missed(turns: Sequence[TurnRecord], reference: PassRecord, conversation: int) -> str:
    """What was computed again until then: from there on it rounds otherwise, with no byte wrong."""
    ours = [turn.tokens.computed for turn in turns if turn.conversation == conversation]
    theirs = [t.tokens.computed for t in reference.turns if t.conversation == conversation]
    missed = sum(ours) - sum(theirs[: len(ours)])
    if missed <= 0:
        return ""
    return (
        f", after {missed} of its tokens were computed again, which rounds otherwise: the tier was "
        "too slow for what left host memory, or lost it"
    )


def _unused(records: Records) -> Iterator[str]:
    if records[Mode.HOST].tokens.host <= 0:
        yield f"{Mode.HOST.title}: no token came from the host tier"
    disk = records[Mode.DISK]
    if disk.tokens.disk <= 0:
        yield f"{Mode.DISK.title}: no token came from disk"
    restarted = [t for t in disk.turns if t.first_after_restart]
    if not restarted:
        yield f"{Mode.DISK.title}: the server was not restarted"
    for turn in restarted:
        if turn.tokens.disk <= 0:
            yield (
                f"{Mode.DISK.title}: no token of conversation {turn.conversation + 1} came from "
                "disk after the restart"
            )


def _slow(records: Records) -> Iterator[str]:
    for mode in _OFFLOADED:
        factor = speedup(records[mode], records[Mode.NONE])
        if factor < MIN_SPEEDUP:
            yield (
                f"{mode.title}: turns from the second on are {factor:.1f} times as fast as "
                f"without offload, not {MIN_SPEEDUP:.1f}"
            )


def _achieved(records: Records) -> Iterator[str]:
    turns = len(records[Mode.REFERENCE].turns)
    yield f"all {turns} answers of each mode are those of the reference"
    for mode in _OFFLOADED:
        yield f"{mode.title}: {_gain(records[mode], records[Mode.NONE])}"


def _gain(record: PassRecord, baseline: PassRecord) -> str:
    tokens = record.tokens
    sources = f"{tokens.host} tokens from host"
    if record.mode is Mode.DISK:
        sources += f", {tokens.disk} from disk"
    return f"{speedup(record, baseline):.1f} times as fast, {sources}"
