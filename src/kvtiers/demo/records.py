"""What a pass left behind: one record a turn, plain values."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtiers.demo.metrics import TokenCounts
from kvtiers.demo.plan import Mode


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One answered request."""

    conversation: int
    turn: int
    ttft_s: float
    total_s: float
    tokens: TokenCounts
    answer: str
    first_after_restart: bool = False
    """The first turn of its conversation that a restarted server answered."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """All turns of one pass, in the order in which they were asked."""

    mode: Mode
    turns: tuple[TurnRecord, ...]
    starts_s: tuple[float, ...] = ()
    """Seconds that each start of the server took."""

    @property
    def later_turns(self) -> tuple[TurnRecord, ...]:
        """The turns from the second on: those whose prompt has been seen before."""
        return tuple(t for t in self.turns if t.turn > 0)

    @property
    def tokens(self) -> TokenCounts:
        """Prompt tokens of all turns together."""
        return total_tokens(self.turns)

    @property
    def later_ttft_s(self) -> float:
        """Time to first token of the later turns, added up (seconds)."""
        return sum(t.ttft_s for t in self.later_turns)


Records = Mapping[Mode, PassRecord]


def total_tokens(turns: Iterable[TurnRecord]) -> TokenCounts:
    """Prompt tokens of ``turns`` together."""
    return sum((t.tokens for t in turns), TokenCounts())


def same_answers(record: PassRecord, reference: PassRecord) -> tuple[bool, ...]:
    """Per turn of ``record`` whether its answer is the one of the reference pass."""
    expected = {(t.conversation, t.turn): t.answer for t in reference.turns}
    return tuple(expected.get((t.conversation, t.turn)) == t.answer for t in record.turns)


def speedup(record: PassRecord, baseline: PassRecord) -> float:
    """How many times sooner the first token of the later turns came than in ``baseline``."""
    return baseline.later_ttft_s / record.later_ttft_s if record.later_ttft_s > 0 else 0.0


def to_json(records: Records) -> dict[str, Any]:
    """The records as JSON values, by name of the mode."""
    reference = records.get(Mode.REFERENCE)
    passes = {}
    for mode, record in records.items():
        same = same_answers(record, reference) if reference else (None,) * len(record.turns)
        passes[mode.value] = {
            "title": mode.title,
            "server_starts_s": list(record.starts_s),
            "ttft_from_second_turn_s": record.later_ttft_s,
            "tokens": asdict(record.tokens),
            "turns": [
                {**asdict(turn), "same_as_reference": equal}
                for turn, equal in zip(record.turns, same, strict=True)
            ],
        }
    return passes
