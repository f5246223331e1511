"""A maintenance pass over a bucket: what was written first leaves first, beside engines.

A bucket keeps no time of use, so age and order go by when an object was written. A pack leaves as a
whole. Nobody is asked: what an engine misses then it computes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtiers.errors import KVTiersError
from kvtiers.tiers.obj import manifests, names
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.obj.fronts import read_front
from kvtiers.tiers.options import bad_option
from kvtiers.tiers.places import Aim, Part, Report, how_many_leave, unheard

_TRIAL_S = 86400.0
"""A measurement takes no day: what is older was left by one that was killed."""
_AT_ONCE = 1000
"""Objects that one request deletes."""

Run = Callable[[Sequence[Callable[[], int]]], list[int | KVTiersError]]


class Leaver(NamedTuple):
    """An object that may leave. Ordered by when it was written."""

    written_at: float
    name: str
    bytes: int
    namespace: str
    packed: bool


def choose(found: Sequence[Leaver], used: int, aim: Aim, now: float) -> Sequence[Leaver]:
    """Of ``found``, ordered, those that leave where ``used`` bytes lie."""
    return found[
        : how_many_leave([(each.written_at, each.bytes) for each in found], used, aim, now)
    ]


def maintain(
    client: Client,
    aim: Aim,
    run: Run,
    *,
    dry_run: bool = False,
    wall_clock: Callable[[], float] = time.time,
    advance: Callable[[int], None] = unheard,
) -> Report:
    """Clean up what lies below the prefix of ``client``, or one namespace of it.

    ``run`` does requests at the same time. ``advance`` hears of bytes that left.
    Raises ConfigError for a wrong aim, KVTiersError if it cannot be listed.
    """
    aim.refuse_nonsense()
    work = _Pass(client, run, dry_run, Report(), advance)
    folders = client.folders()
    found = manifests.namespaces(client, folders)
    ours = {each.id for each in found if each.namespace is not None}
    if aim.namespace is not None and aim.namespace not in ours:
        raise bad_option("namespace", f"is {aim.namespace!a}, which {client.where} does not hold")
    now = wall_clock()
    leavers, trials = [], []
    looked_at = folders if aim.namespace is None else [aim.namespace]
    for name, bytes_, written_at in _objects(client, looked_at):
        namespace, part = names.part_of(name)
        if part is Part.TRIAL:
            if now - written_at > _TRIAL_S:
                trials.append(Leaver(written_at, name, bytes_, "", False))
        elif part is not Part.FOREIGN:
            work.report.before_bytes += bytes_
            if part is Part.CHUNKS and namespace in ours:
                pack = names.pack_at(namespace, name)
                # A writer whose clock is ahead must not keep its packs for ever.
                at = written_at if pack is None else min(written_at, pack.time_ms / 1000)
                leavers.append(Leaver(at, name, bytes_, namespace, pack is not None))
    used = work.report.before_bytes
    work.remove_trials(trials)
    work.remove(choose(sorted(leavers), used, aim, now))
    return work.report


def _objects(client: Client, folders: Iterable[str]) -> Iterator[tuple[str, int, float]]:
    """Of those folders that are ours: what others have there is not even listed."""
    for folder in folders:
        if names.is_ours(folder):
            for page in client.objects(folder):
                yield from page


@dataclass(slots=True)
class _Pass:
    client: Client
    run: Run
    dry_run: bool
    report: Report
    advance: Callable[[int], None]

    def remove_trials(self, trials: Sequence[Leaver]) -> None:
        """They are counted before, too, so that what is left is right."""
        self.report.before_bytes += sum(trial.bytes for trial in trials)
        for trial in self._deleted(trials):
            self.report.temporary.append((trial.name, trial.bytes))

    def remove(self, chosen: Sequence[Leaver]) -> None:
        asked = self.run([partial(self._chunks_in, each) for each in chosen])
        counts = {
            each.name: 0 if isinstance(count, KVTiersError) else count
            for each, count in zip(chosen, asked, strict=True)
        }
        for gone in self._deleted(chosen):
            left = self.report.packs if gone.packed else self.report.chunks
            left.append((gone.name, gone.bytes))
            self.report.by_namespace[gone.namespace] += counts[gone.name]

    def _chunks_in(self, leaver: Leaver) -> int:
        if not leaver.packed:
            return 1
        pack = names.pack_at(leaver.namespace, leaver.name)
        assert pack is not None
        said = read_front(self.client, leaver.namespace, pack)
        return sum(entry.length > 0 for entry in said) if isinstance(said, list) else 0

    def _deleted(self, chosen: Sequence[Leaver]) -> Iterator[Leaver]:
        for at in range(0, len(chosen), _AT_ONCE):
            some = chosen[at : at + _AT_ONCE]
            try:
                if not self.dry_run:
                    self.client.delete([leaver.name for leaver in some])
            except KVTiersError as e:
                self.report.problems.append(str(e))
                self.report.failed += [leaver.name for leaver in some]
                continue
            self.advance(sum(leaver.bytes for leaver in some))
            yield from some
