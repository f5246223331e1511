"""From chunks to tokens of a prompt, by what the groups of a model span. Pure."""

from typing import NamedTuple

from kvtiers.chunks import ChunkLayout
from kvtiers.events import LookupsSettled


class Tokens(NamedTuple):
    """What became of a prompt."""

    asked: int
    """Those that the accelerator lacked, of whole chunks and up to the end of the prompt."""
    missed: int
    """Of them, those that were not loaded."""
    unasked: int
    """Of these, those that no tier was asked for, as others before them were missing."""


class Prompts:
    """Spans of a model's groups."""

    def __init__(self, layout: ChunkLayout) -> None:
        self._spans = {g.group: g.tokens_per_chunk for g in layout.groups}
        self.prefix_group = layout.prefix_group.group

    def span(self, group: int) -> int:
        """Tokens of a chunk; of an unknown group 0."""
        return self._spans.get(group, 0)

    def tokens(self, event: LookupsSettled) -> Tokens:
        """How much of the prompt was asked for, and not loaded."""
        span = self._spans[self.prefix_group]
        runs = [run for run in event.runs if run.group == self.prefix_group]
        chunks = sum(run.chunks for run in runs)
        if not runs:
            chunks = event.asked if len(self._spans) == 1 else 0
        loaded = sum(event.loaded.values())
        looked_up = max(chunks * span, loaded)
        asked = looked_up
        if event.prompt_tokens is not None:
            first = runs[0].first * span if runs else 0
            whole = event.prompt_tokens // span * span
            asked = max(looked_up, whole - first)
        return Tokens(asked, asked - loaded, asked - looked_up)

    def __repr__(self) -> str:
        return f"<Prompts of {len(self._spans)} groups>"
