"""Why a request missed, in words for people. Pure."""

from collections.abc import Sequence

from kvtiers.events import PRIMARY, LookupsSettled, MissReason, Run
from kvtiers.observe.prompts import Prompts

_WORDS = {
    MissReason.ABSENT: "{tier} does not have it",
    MissReason.PENDING: "{tier} was not done in time",
    MissReason.CORRUPT: "what {tier} had of it was damaged",
    MissReason.FILTERED: "{tier} was not asked, since the request may not load from it"
    " (kv_load_tiers)",
    MissReason.TIER_DOWN: "{tier} was not asked, since it is left alone after failures or shut",
    MissReason.WINDOW: "{tier} has it, but something that it takes besides is missing",
    MissReason.NO_ROOM: "{tier} has it, but host memory had no room for it",
    MissReason.FAILED: "{tier} failed to give it",
}
_WAIT_WORTH_SAYING_S = 0.001


def why(event: LookupsSettled, prompts: Prompts) -> str:
    """What was loaded of the prompt, what stopped it there, and how long that took."""
    parts = [_loaded(event, prompts)]
    blocking = _blocking(event.runs, prompts.prefix_group)
    if blocking is not None:
        parts.append(_stopped(blocking, event, prompts))
    elif event.missed and not event.runs:
        parts.append(_counted(event))
    if event.waited_s >= _WAIT_WORTH_SAYING_S:
        parts.append(f"It waited {event.waited_s:.3g} s for tiers.")
    return " ".join(parts)


def misses_in_words(misses: Sequence[tuple[str, MissReason]]) -> str:
    """Which tier had what reason."""
    return "; ".join(_WORDS[why].format(tier=tier) for tier, why in misses)


def _loaded(event: LookupsSettled, prompts: Prompts) -> str:
    tokens = prompts.tokens(event)
    loaded = sum(event.loaded.values())
    sources = ", ".join(f"{n:,} from {tier}" for tier, n in sorted(event.loaded.items()))
    if not loaded:
        found = sum(event.found.values())
        some = f", although {found:,} chunks were found" if found else ""
        return f"None of the {tokens.asked:,} tokens asked for were loaded{some}."
    if tokens.missed:
        return f"{loaded:,} of {tokens.asked:,} tokens were loaded ({sources})."
    return f"All {tokens.asked:,} tokens asked for were loaded ({sources})."


def _stopped(run: Run, event: LookupsSettled, prompts: Prompts) -> str:
    first = run.first * prompts.span(run.group)
    begin = f"The chunk at token {first:,}"
    if run.group != prompts.prefix_group:
        begin += f" of group {run.group}, which keeps a window or a state,"
    named = f" ({run.key.hex()[:16]})" if run.key is not None else ""
    said = f"{begin}{named} was missing: {misses_in_words(run.misses)}."
    if run.misses == ((PRIMARY, MissReason.FAILED),):
        return f"A copy to the accelerator failed, so the rest is computed. {said}"
    if run.group == prompts.prefix_group and prompts.tokens(event).unasked:
        said += " What follows was not asked for: a prefix ends at its first missing chunk."
    return said


def _counted(event: LookupsSettled) -> str:
    """Where nobody knows which chunks they were."""
    counts = sorted(event.missed.items())
    told = ", ".join(f"{n:,} {why.value} in {tier}" for (tier, why), n in counts)
    return f"Chunks that were missing: {told}."


def _blocking(runs: Sequence[Run], prefix_group: int) -> Run | None:
    """The missing chunks that ended the prefix: the first of the group that has all of it, else the
    last of another.
    """
    missing = [run for run in runs if run.source is None]
    in_prefix = [run for run in missing if run.group == prefix_group]
    if in_prefix:
        return in_prefix[0]
    return missing[-1] if missing else None
