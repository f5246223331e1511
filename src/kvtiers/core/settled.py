"""What is said of a request's lookups when they are over: what was found where, and why not. Pure.

A chunk that host memory has is counted and no more: with a full hit of any length this costs one
event. For each other chunk the answers of the tiers are gone through once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from kvtiers.chunks import ChunkLayout, Key, group_suffix, key_group
from kvtiers.core.attached import AttachedTier
from kvtiers.core.ledger import Request
from kvtiers.events import PRIMARY, LookupsSettled, MissReason, Run

MAX_RUNS = 64
"""Of one request; what is beyond is counted."""

_NOTHING: Mapping[str, int] = MappingProxyType({})
_NO_MISS: Mapping[tuple[str, MissReason], int] = MappingProxyType({})
_NO_WAIT: Mapping[str, float] = MappingProxyType({})

Misses = tuple[tuple[str, MissReason], ...]


class _Fate(NamedTuple):
    """What became of a chunk that host memory lacked at first."""

    source: str | None
    misses: Misses


class _Piece(NamedTuple):
    """Chunks in a row, where they lie."""

    group: int
    first: int
    chunks: int
    fate: _Fate | None
    key: Key | None


_THERE = _Fate(PRIMARY, ())


class Settling:
    """Makes the event of a request whose lookups are over."""

    def __init__(
        self, tiers: Sequence[AttachedTier], layout: ChunkLayout, *, traced: bool = False
    ) -> None:
        """``traced``: say also which chunks met which fate."""
        self._tiers = tiers
        self._traced = traced
        self._spans = {g.group: g.tokens_per_chunk for g in layout.groups}
        self._prefix = layout.prefix_group
        self._suffix = group_suffix(self._prefix.group)

    def of(self, request: Request, now: float, loading: Sequence[Key] = ()) -> LookupsSettled:
        """What became of all that it asked for, if it loads ``loading`` now; () if nothing."""
        below, began = request.below, request.waiting_began
        fates = self._fates(request, now) if below else {}
        there = len(request.hits.difference(below)) if below else len(request.hits)
        found, missed = _counted(there, fates)
        runs = self._runs(request, there, fates, loading) if self._traced else ()
        asked = there + sum(fate is not None for fate in fates.values())
        return LookupsSettled(
            request.context.request_id,
            asked,
            found,
            missed,
            self._loaded(request, loading) if loading else _NOTHING,
            0.0 if began is None else now - began,
            dict(request.took_s) if request.took_s else _NO_WAIT,
            runs,
            asked - sum(run.chunks for run in runs),
            request.context.tokens,
            request.context.arrived_at,
        )

    def _fates(self, request: Request, now: float) -> dict[Key, _Fate | None]:
        """By chunk that host memory lacked; equal ones are one object. None: see ``_fate``."""
        filtered = self._filtered(request)
        known: dict[_Fate | None, _Fate | None] = {}
        fates = {}
        for key in request.below:
            fate = self._fate(key, request, filtered, now)
            fates[key] = known.setdefault(fate, fate)
        return fates

    def _filtered(self, request: Request) -> frozenset[AttachedTier]:
        allows = request.context.tier_filter
        if allows.matches is None:
            return frozenset()
        return frozenset(t for t in self._tiers if not allows.allows(t.medium, t.locality))

    def _fate(
        self, key: Key, request: Request, filtered: frozenset[AttachedTier], now: float
    ) -> _Fate | None:
        """None: a tier was asked ahead of time, and its answer was not waited for."""
        if key in request.hits:
            source = request.origin.get(key)
            if source is None:
                return _THERE  # another request had brought it by then
            above = self._tiers[: source.position - 1]
            return _Fate(source.label, self._misses(key, above, request, filtered, now))
        if request.verdicts.get((0, key)) is MissReason.FAILED:
            return _FAILED
        if not _waited(request) and any(_still_asked(key, tier, request) for tier in self._tiers):
            return None
        return _Fate(None, self._misses(key, self._tiers, request, filtered, now))

    def _misses(
        self,
        key: Key,
        tiers: Sequence[AttachedTier],
        request: Request,
        filtered: frozenset[AttachedTier],
        now: float,
    ) -> Misses:
        verdicts = request.verdicts
        misses = [(PRIMARY, verdicts.get((0, key)) or MissReason.ABSENT)]
        for tier in tiers:
            mark = (tier.position, key)
            if tier in filtered:
                misses.append((tier.label, MissReason.FILTERED))
            elif mark not in verdicts:
                if _still_asked(key, tier, request):
                    request.note_wait(tier.label, now - (request.asked[key].since or now))
                    misses.append((tier.label, MissReason.PENDING))
            else:
                why = verdicts[mark] or _unused(key, tier, request)
                misses.append((tier.label, why))
        return tuple(misses)

    def _loaded(self, request: Request, loading: Sequence[Key]) -> dict[str, int]:
        """Tokens of ``loading`` by source: those of the group that has all of the prefix."""
        keys = loading
        if len(self._spans) > 1:
            keys = [key for key in loading if key.endswith(self._suffix)]
        count = Counter[str]()
        if request.origin:
            origin = request.origin
            count.update(origin[key].label for key in origin.keys() & keys)
        count[PRIMARY] = len(keys) - count.total()
        span = self._prefix.tokens_per_chunk
        return {tier: chunks * span for tier, chunks in count.items() if chunks}

    def _runs(
        self,
        request: Request,
        there: int,
        fates: Mapping[Key, _Fate | None],
        loading: Sequence[Key],
    ) -> tuple[Run, ...]:
        if request.context.end_of is None:
            return ()
        fated = [self._piece(key, fate, request) for key, fate in fates.items()]
        pieces = [piece for piece in fated if piece is not None]
        if loading and len(self._spans) == 1 and self._prefix.keeps_every_chunk:
            pieces += self._gaps(self._piece(loading[0], _THERE, request), there, pieces)
        else:
            hits = [self._piece(key, _THERE, request) for key in request.hits.difference(fates)]
            pieces += [piece for piece in hits if piece is not None]
        return _joined(sorted(pieces, key=itemgetter(0, 1)))

    def _gaps(self, begin: _Piece | None, there: int, others: Sequence[_Piece]) -> Iterator[_Piece]:
        """Where ``there`` chunks lie that host memory had: of a prefix all chunks were asked for,
        from where ``begin`` does on, so they fill what the ``others`` leave.
        """
        if begin is None:
            return
        at, key, left = begin.first, begin.key, there
        for other in sorted(piece.first for piece in others):
            count = min(other - at, left)
            if count > 0:
                yield _Piece(begin.group, at, count, _THERE, key)
                left -= count
            at, key = max(at, other + 1), None
        if left > 0:
            yield _Piece(begin.group, at, left, _THERE, key)

    def _piece(self, key: Key, fate: _Fate | None, request: Request) -> _Piece | None:
        assert request.context.end_of is not None
        end, group = request.context.end_of(key), key_group(key)
        span = self._spans.get(group)
        if end is None or span is None:
            return None
        return _Piece(group, -(-end // span) - 1, 1, fate, key)


_FAILED = _Fate(None, ((PRIMARY, MissReason.FAILED),))


def _counted(
    there: int, fates: Mapping[Key, _Fate | None]
) -> tuple[Mapping[str, int], Mapping[tuple[str, MissReason], int]]:
    """Chunks found, by tier, and misses, by tier and reason."""
    found = {PRIMARY: there} if there else {}
    if not fates:
        return found, _NO_MISS
    missed: dict[tuple[str, MissReason], int] = {}
    for fate, count in Counter(fates.values()).items():
        if fate is None:
            continue
        if fate.source is not None:
            found[fate.source] = found.get(fate.source, 0) + count
        for miss in fate.misses:
            missed[miss] = missed.get(miss, 0) + count
    return found, missed


def _waited(request: Request) -> bool:
    """Whether it ended while it still waited; else it did not have to wait for what is missing."""
    return request.gave_up or request.finished


def _still_asked(key: Key, tier: AttachedTier, request: Request) -> bool:
    """Whether the tier was asked and has said nothing."""
    asked = request.asked.get(key)
    turn = tier.position - 1
    silent = asked is not None and asked.turn == turn and asked.since is not None
    return silent and (tier.position, key) not in request.verdicts


def _unused(key: Key, tier: AttachedTier, request: Request) -> MissReason:
    """Why a chunk that the tier has did not come."""
    return MissReason.PENDING if _waited(request) else MissReason.WINDOW


def _joined(pieces: Sequence[_Piece]) -> tuple[Run, ...]:
    """Pieces in order, those that follow each other with one fate as one; the first of them."""
    runs: list[Run] = []
    for group, first, chunks, fate, key in pieces:
        if fate is None:
            continue
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.group == group
            and last.first + last.chunks == first
            and (last.source, last.misses) == fate
        ):
            runs[-1] = last._replace(chunks=last.chunks + chunks)
        elif len(runs) == MAX_RUNS:
            break
        else:
            runs.append(Run(group, first, chunks, fate.source, fate.misses, key))
    return tuple(runs)
