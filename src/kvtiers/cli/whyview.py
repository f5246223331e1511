"""What ``kvtiers why`` shows to people. What an observer sent may be anything."""

import time
from collections.abc import Sequence
from typing import Any

from kvtiers.cli.output import Output
from kvtiers.cli.prefix import Prompt

_MOST_ROWS = 200


def show_request(record: dict[str, Any], output: Output) -> None:
    """The life of one request."""
    came, settled = record.get("arrived_at"), record.get("settled_at")
    output.line(f"request  {record['request_id']}")
    output.line(f"arrived  {_clock(came)}")
    output.line(f"settled  {_clock(settled)}, after waiting {record['waited_s']:.3g} s for tiers")
    output.line(f"why      {record['why']}")
    tiers = _tiers_of(record["runs"])
    rows = [
        (
            str(run["group"]),
            _range(run["first"], run["count"]),
            _range(run["first_token"], run["tokens"]),
            *_verdicts(run, tiers),
            (run["key"] or "")[:16],
        )
        for run in record["runs"]
    ]
    if rows:
        output.line()
        output.table(("GROUP", ">CHUNKS", ">TOKENS", *tiers, "FIRST KEY"), rows)
    if record["untold_chunks"]:
        output.line(f"and {record['untold_chunks']} chunks more")
    for other in record.get("others", []):
        output.line(f"see also {other}")
    for earlier in record.get("earlier", []):
        output.line(f"earlier, {_clock(earlier['settled_at'])}: {earlier['why']}")


def show_prompt(prompt: Prompt, tiers: list[dict[str, Any]], loadable: int, output: Output) -> None:
    """Where the chunks of a prompt are now."""
    output.line(f"an engine would load {loadable} of {prompt.tokens} tokens, if it asked now")
    rows = []
    for group, span, first, count, states in _segments(prompt, tiers):
        begin = first * span
        rows.append((str(group), _range(first, count), _range(begin, count * span), *states))
    labels = tuple(str(tier["tier"]) for tier in tiers)
    output.table(("GROUP", ">CHUNKS", ">TOKENS", *labels), rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        output.line(f"and {len(rows) - _MOST_ROWS} rows more: see --json")
    for tier in tiers:
        if tier["problem"]:
            output.warn(f"{tier['tier']}: {tier['problem']}")


def _segments(
    prompt: Prompt, tiers: list[dict[str, Any]]
) -> list[tuple[int, int, int, int, tuple[str, ...]]]:
    """Group, tokens of a chunk, first chunk, how many, and in each tier the same for all."""
    columns = [_column(tier) for tier in tiers]
    found = []
    offset = 0
    for span in prompt.spans:
        states = list(zip(*columns, strict=True))[offset : offset + len(prompt.keys[span.group])]
        offset += len(states)
        first = 0
        for i in range(1, len(states) + 1):
            if i == len(states) or states[i] != states[first]:
                found.append((span.group, span.tokens_per_chunk, first, i - first, states[first]))
                first = i
    return found


def _column(tier: dict[str, Any]) -> list[str]:
    """What a tier says of each chunk."""
    said: list[str] = []
    for run in tier["runs"]:
        words = run["reason"] or ("hit" if run["state"] == "there" else run["state"])
        said += [words] * run["count"]
    return said


def _tiers_of(runs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    labels = {verdict["tier"] for run in runs for verdict in run["verdicts"]}
    return tuple(sorted(labels, key=lambda label: (len(label.partition(":")[0]), label)))


def _verdicts(run: dict[str, Any], tiers: Sequence[str]) -> tuple[str, ...]:
    said = {v["tier"]: v["reason"] or v["verdict"] for v in run["verdicts"]}
    return tuple(said.get(tier, "") for tier in tiers)


def _range(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else str(first)


def _clock(at: float | None) -> str:
    return "?" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
