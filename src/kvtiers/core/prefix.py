"""The prefix planner: how much of a prompt can be loaded, and which chunks that takes.

Arithmetic on what attention reads; tools plan with it, engines and simulations may. When the keys
and values of the first ``P`` tokens are taken over, the tokens from ``P`` on are computed. What
these read of the tokens before ``P`` must be there, and nothing else needs to be:

- full attention (and MLA with its indexers): all of them;
- a window of ``W`` tokens, which the reading token is part of: ``P - W + 1`` and later;
- attention within local chunks of ``C`` tokens: those of the chunk that ``P`` lies in, so none
  where ``P`` is a multiple of ``C``;
- recurrent state (Mamba, gated delta-net, short convolutions): what is stored with the chunk that
  ends at ``P`` exactly.

This is how vLLM (0.32) keeps blocks (``get_num_skipped_tokens`` of its managers), so the chunks
planned are those that its offloading scheduler loads onto an empty device, and the length is its
answer if ``granularity`` is 1: vLLM may end inside a chunk, but not inside one with state (cache
mode ``align``). It differs where it does not go by what is read:

- of a window it asks for one chunk more if ``W - 1`` is a multiple of the chunk, and of local
  chunks for the ``C`` tokens before ``P`` whatever ``P`` is: it may answer with less;
- it loads nothing if full attention leaves less than one chunk of another group;
- a state stored between the ends of chunks has a key of its own, and adds part of a chunk;
- draft models (EAGLE, MTP) keep more than a window and drop the last chunk.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtiers.chunks import Lookup

Ask = Callable[[int, int], Lookup]
"""From the index of a group and that of a chunk, counted from the start of the prompt, to what is
known of it. A chunk beyond the prompt is a MISS: it has no key."""


class Attention(Enum):
    """What of a group's tokens is read later."""

    FULL = "full"
    """All: full attention, MLA, and the indexers of sparse attention."""
    SLIDING = "sliding"
    """The last ``window_tokens``, the reading token included."""
    CHUNKED_LOCAL = "chunked_local"
    """Those since the last multiple of ``window_tokens``."""
    STATE = "state"
    """None; the state at the boundary stands for them."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """A KV-cache group. Raises ValueError if a size is missing or less than 1."""

    group: int
    """Its index, as in keys."""
    tokens_per_chunk: int
    attention: Attention = Attention.FULL
    window_tokens: int | None = None
    """Of a window or a local chunk; of others ``None``."""

    def __post_init__(self) -> None:
        windowed = self.attention in (Attention.SLIDING, Attention.CHUNKED_LOCAL)
        if windowed != (self.window_tokens is not None):
            need = "needs" if windowed else "has no"
            raise ValueError(f"group {self.group}: {self.attention.value} {need} window_tokens")
        if self.tokens_per_chunk < 1 or (windowed and (self.window_tokens or 0) < 1):
            raise ValueError(f"group {self.group}: a size in tokens is less than 1")

    def chunks(self, tokens: int) -> range:
        """The chunks that are read once the first ``tokens`` tokens are taken over.

        The last one may end later: then its beginning is read.
        """
        end = -(-tokens // self.tokens_per_chunk)
        first = self._first_token(tokens)
        return range(first // self.tokens_per_chunk if first < tokens else end, end)

    def without(self, chunk: int, tokens: int, step: int) -> int:
        """The longest prefix that is shorter than ``tokens``, a multiple of ``step``, and does not
        read ``chunk``, which one of ``tokens`` does.
        """
        start = chunk * self.tokens_per_chunk
        if self.attention is Attention.CHUNKED_LOCAL:
            # It reads nothing at all where a local chunk begins, be that inside of a missing one.
            both = math.lcm(step, self.window_tokens or 1)
            end = self._first_token(tokens) // both * both
            if end > start:
                return end
        return start - start % step

    def _first_token(self, tokens: int) -> int:
        """The first token that is read; ``tokens`` if none is. It never falls as tokens grow."""
        size = self.window_tokens or 0
        match self.attention:
            case Attention.FULL:
                return 0
            case Attention.SLIDING:
                return max(0, tokens - size + 1)
            case Attention.CHUNKED_LOCAL:
                return tokens - tokens % size
            case Attention.STATE:
                return max(0, tokens - 1)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What can be loaded of a prompt."""

    tokens: int
    chunks: Mapping[int, range]
    """By group: exactly the chunks that are needed; empty where nothing is read."""
    waits_for: tuple[tuple[int, int], ...] = ()
    """Those of them, as (group, chunk), that are HIT_PENDING or RETRY. If there are any, ask again:
    where one turns out to be a MISS the prefix is shorter."""


def most_tokens(groups: Sequence[AttentionGroup], prompt_tokens: int) -> int:
    """How many tokens of a prompt an engine may load, whatever is stored.

    The last one is computed in any case, for its logits. With full attention alone that may be once
    more, over a prefix that was loaded whole; with a window or a state the prefix ends before it.
    """
    whole = all(g.attention is Attention.FULL for g in groups)
    return prompt_tokens if whole else max(0, prompt_tokens - 1)


def longest_prefix(
    groups: Sequence[AttentionGroup], tokens: int, ask: Ask, *, granularity: int | None = None
) -> Prefix:
    """The longest prefix of at most ``tokens`` tokens that can be loaded, and what it takes.

    Its length is a multiple of ``granularity`` tokens, by default of the least common multiple of
    the groups' chunks, and always of the chunks of groups with state. What is pending counts as
    there.

    ``ask`` is called at most once for each chunk, and for chunks that turn out not to be needed as
    little as can be: full attention first, from the left, so that of an unknown prompt one chunk is
    asked for; then groups that need few chunks. A missing chunk rules out every longer prefix that
    reads it, so a window is tried from its left edge, and a miss there skips the whole window, as
    in the string search of Boyer and Moore (CACM 20(10), 1977). If all is stored, exactly what is
    needed is asked for.

    Time is linear: in the chunks asked for, and per MISS in the number of groups. Raises ValueError
    for no groups, two of one index, negative ``tokens`` or a granularity below 1.
    """
    step = _step(groups, tokens, granularity)
    there: dict[int, range] = {}
    """By group, a run of chunks that are there; the one that follows it is a MISS or not needed."""
    pending: list[tuple[int, int]] = []

    def missing(group: AttentionGroup, tokens: int) -> int | None:
        """The first chunk that was not there, of those that ``tokens`` takes."""
        need = group.chunks(tokens)
        known = there.get(group.group, range(need.stop, need.stop))
        if need and need.stop > known.stop:
            return known.stop
        for chunk in range(need.start, min(known.start, need.stop)):
            verdict = ask(group.group, chunk)
            if verdict is Lookup.MISS:
                there[group.group] = range(need.start, chunk)
                return chunk
            if verdict is not Lookup.HIT:
                pending.append((group.group, chunk))
        there[group.group] = range(min(known.start, need.start), known.stop)
        return None

    order = sorted(groups, key=_turn)
    tokens -= tokens % step
    at = 0
    while at < len(order):
        group, before = order[at], tokens
        while (chunk := missing(group, tokens)) is not None:
            tokens = group.without(chunk, tokens, step)
        # Those before it agreed to a longer prefix.
        at = 0 if at and tokens < before else at + 1
    chunks = {g.group: g.chunks(tokens) for g in groups}
    return Prefix(tokens, chunks, tuple((g, c) for g, c in sorted(pending) if c in chunks[g]))


def _step(groups: Sequence[AttentionGroup], tokens: int, granularity: int | None) -> int:
    if not groups or len({g.group for g in groups}) < len(groups):
        raise ValueError("a prefix is planned for one or more groups of different index")
    if tokens < 0 or (granularity is not None and granularity < 1):
        raise ValueError(f"tokens ({tokens}) or granularity ({granularity}) is too small")
    bound = [
        g.tokens_per_chunk for g in groups if granularity is None or g.attention is Attention.STATE
    ]
    return math.lcm(granularity or 1, *bound)


def _turn(group: AttentionGroup) -> tuple[bool, int]:
    """Full attention first, of it the longest chunks; then what needs the fewest chunks."""
    if group.attention is Attention.FULL:
        return False, -group.tokens_per_chunk
    return True, (group.window_tokens or 1) // group.tokens_per_chunk
