"""What the observer says of a request, as JSON values. Pure."""

from typing import Any

from kvtiers.events import LookupsSettled, Run
from kvtiers.observe.prompts import Prompts
from kvtiers.observe.requests import Record
from kvtiers.observe.sentences import why

Document = dict[str, Any]
MAX_EARLIER = 3
"""Earlier settlings of a request that asked again, shown beside the last."""


def summary(record: Record, prompts: Prompts) -> Document:
    """One request, in a list."""
    event = record.event
    tokens = prompts.tokens(event)
    return {
        "request_id": event.request_id,
        "arrived_at": event.arrived_at,
        "settled_at": record.settled_at,
        "waited_s": event.waited_s,
        "tokens": {
            "prompt": event.prompt_tokens,
            "asked": tokens.asked,
            "by_source": dict(event.loaded),
            "missed": tokens.missed,
        },
        "chunks": {
            "asked": event.asked,
            "found": dict(event.found),
            "missed": [
                {"tier": tier, "reason": reason.value, "chunks": chunks}
                for (tier, reason), chunks in sorted(event.missed.items())
            ],
        },
        "why": why(event, prompts),
    }


def life(records: list[Record], prompts: Prompts) -> Document:
    """One request with its runs; ``records`` are those found for one id, the newest first.

    Earlier settlings of the same request are in ``earlier``; other ids that were found, in
    ``others``: vLLM makes several requests of one that asks for several answers.
    """
    last = records[0]
    name = last.event.request_id
    earlier = [r for r in records[1:] if r.event.request_id == name]
    others = dict.fromkeys(r.event.request_id for r in records if r.event.request_id != name)
    return {
        **_whole(last, prompts),
        "earlier": [_whole(record, prompts) for record in earlier[:MAX_EARLIER]],
        "others": list(others),
    }


def _whole(record: Record, prompts: Prompts) -> Document:
    event = record.event
    return {
        **summary(record, prompts),
        "runs": [_run(run, event, prompts) for run in event.runs],
        "untold_chunks": event.untold,
    }


def _run(run: Run, event: LookupsSettled, prompts: Prompts) -> Document:
    span = prompts.span(run.group)
    verdicts = [_verdict(tier, reason.value, event) for tier, reason in run.misses]
    if run.source is not None:
        verdicts.append(_verdict(run.source, None, event))
    return {
        "group": run.group,
        "first": run.first,
        "count": run.chunks,
        "first_token": run.first * span,
        "tokens": run.chunks * span,
        "key": None if run.key is None else run.key.hex(),
        "verdicts": verdicts,
    }


def _verdict(tier: str, reason: str | None, event: LookupsSettled) -> Document:
    """``seconds``: the longest that this request waited for the tier, for any chunk."""
    return {
        "tier": tier,
        "verdict": "hit" if reason is None else "miss",
        "reason": reason,
        "seconds": event.took_s.get(tier, 0.0),
    }
