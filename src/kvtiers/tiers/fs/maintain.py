"""A maintenance pass over a root, beside living engines or without any.

It removes what dead engines left, quarantine beyond what is kept, chunks by age and then by
recency down to a size, and empty folders. It keeps to what engines keep to: the lock of the
quota file while chunks leave, and the promises in the times of files.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvtiers.errors import map_errors
from kvtiers.tiers.fs import names, quarantine, scratch, stamps, tree
from kvtiers.tiers.fs.account import bury_dead
from kvtiers.tiers.fs.folders import has_our_manifest
from kvtiers.tiers.fs.leaving import take_away
from kvtiers.tiers.fs.quota import Quota
from kvtiers.tiers.fs.shared import QuotaFile
from kvtiers.tiers.fs.tree import Candidate
from kvtiers.tiers.options import bad_option
from kvtiers.tiers.places import Aim, Report, unheard

_PORTION = 512
"""Files that leave in one turn at the quota file, while engines wait for theirs."""
_ANNOUNCED_S = 60.0
"""Up to when a pass says that it deletes; said anew with every portion."""


def choose(found: list[Candidate], used: int, aim: Aim, now: float) -> list[Candidate]:
    """Of ``found``, ordered by use, those that leave where ``used`` bytes lie."""
    chosen = []
    for candidate in found:
        aside = f"/{names.QUARANTINE}/" in candidate.name  # put there for somebody to look at
        old = not aside and _is_old(candidate, aim, now)
        above = aim.max_bytes is not None and used > aim.max_bytes
        if old or above:
            chosen.append(candidate)
            used -= candidate.size
        elif not aside:
            break  # the rest is younger, and fits
    return chosen


def _is_old(candidate: Candidate, aim: Aim, now: float) -> bool:
    return aim.older_than_s is not None and candidate.stamp < now - aim.older_than_s


def maintain(
    root: str,
    aim: Aim,
    *,
    dry_run: bool = False,
    wall_clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
    advance: Callable[[int], None] = unheard,
) -> Report:
    """Clean up ``root``, or one namespace of it, and say what left.

    Where engines may have promised chunks without a need to say so, it says that it is about to
    delete and pauses for the grace time first. ``advance`` is told of bytes of chunks that left.
    Raises ConfigError for a wrong call, KVTiersError if the root cannot be read.
    """
    aim.refuse_nonsense()
    with map_errors("maintain", root):
        chosen = _namespaces(root, aim.namespace)
        work = _Pass(
            root, chosen, aim.namespace is not None, dry_run, Report(), wall_clock, advance
        )
        work.remove_temporary()
        work.remove_quarantined()
        work.remove_chunks(aim, pause)
        work.remove_empty_folders()
    return work.report


def _namespaces(root: str, namespace: str | None) -> list[str]:
    ours = [n for n in sorted(names.namespaces(root)) if has_our_manifest(os.path.join(root, n))]
    if namespace is None:
        return ours
    if namespace not in ours:
        raise bad_option("namespace", f"is {namespace!a}, which {root} does not hold")
    return [namespace]


@dataclass(slots=True)
class _Pass:
    root: str
    namespaces: list[str]
    narrowed: bool
    """Whether it is about one namespace only."""
    dry_run: bool
    report: Report
    wall_clock: Callable[[], float]
    advance: Callable[[int], None]

    def remove_temporary(self) -> None:
        for namespace in self.namespaces:
            dead = scratch.dead(self.root, namespace)
            if not self.dry_run:
                scratch.sweep(self.root, [namespace])
            for name, size in dead:
                if self.dry_run or not os.path.lexists(os.path.join(self.root, name)):
                    self.report.temporary.append((name, size))
                else:
                    self.report.failed.append(name)

    def remove_quarantined(self) -> None:
        for namespace in self.namespaces:
            self._remove(quarantine.overfull(self.root, namespace))

    def remove_chunks(self, aim: Aim, pause: Callable[[float], None]) -> None:
        now = self.wall_clock()
        found = [c for folder in self._candidates() for c in folder]
        free = sorted(c for c in found if not stamps.in_use(c.stamp, now))
        namespaces = self.namespaces if self.narrowed else None
        used = tree.measure_for(self.report, self.root, namespaces)
        gone = self.report.bytes
        used -= gone if self.dry_run else 0
        self.report.before_bytes = used + gone
        chosen = choose(free, used, aim, now)
        if chosen and not self.dry_run and self._announce():
            pause(stamps.GRACE_S)
        for at in range(0, len(chosen), _PORTION):
            self._remove(chosen[at : at + _PORTION])
        rest = used - sum(c.size for c in chosen)
        if aim.max_bytes is not None and rest > aim.max_bytes:
            self.report.in_use += len(found) - len(free)

    def _candidates(self) -> Iterator[list[Candidate]]:
        return tree.candidates(self.root, self.namespaces)

    def _announce(self) -> bool:
        """Say that chunks are about to leave; whether engines have to be given time."""
        with QuotaFile(self.root) as file, file.locked() as quota:
            bury_dead(self.root, quota)
            known = quota.cleaning_until > self.wall_clock()
            quota.cleaning_until = self.wall_clock() + _ANNOUNCED_S
            bounded = any(m.capacity is not None for m in quota.members.values())
            return bounded and not known  # the others mark whatever they find

    def _remove(self, going: list[Candidate]) -> None:
        if self.dry_run:
            for candidate in going:
                self._left(candidate.name, candidate.size)
        elif going:
            with QuotaFile(self.root) as file, file.locked() as quota:
                if quota.cleaning_until:
                    quota.cleaning_until = self.wall_clock() + _ANNOUNCED_S
                for candidate in going:
                    self._remove_one(candidate, quota)

    def _left(self, name: str, size: int) -> None:
        namespace, folder, _ = name.split("/")
        if folder == names.QUARANTINE:
            self.report.quarantined.append((name, size))
            return
        self.report.chunks.append((name, size))
        self.report.by_namespace[namespace] += 1
        self.advance(size)

    def _remove_one(self, known: Candidate, quota: Quota) -> None:
        path = os.path.join(self.root, known.name)
        try:
            info = os.lstat(path)
            used = known.stamp and info.st_mtime != known.stamp
            if used or not take_away(path, known.stamp, self.wall_clock()):
                self.report.in_use += 1
                return
        except FileNotFoundError:
            return
        except OSError:
            self.report.failed.append(known.name)
            return
        quota.free(info.st_size)
        self._left(known.name, info.st_size)

    def remove_empty_folders(self) -> None:
        gone = {name for name, _ in self.report.chunks}
        remove = partial(self._would_remove_folder, gone) if self.dry_run else self._remove_folder
        for namespace in self.namespaces:
            for fan in sorted(filter(names.is_fan, os.listdir(os.path.join(self.root, namespace)))):
                if remove(f"{namespace}/{fan}"):
                    self.report.empty_folders.append(f"{namespace}/{fan}")

    def _remove_folder(self, name: str) -> bool:
        """Whether it was empty, and is gone."""
        try:
            os.rmdir(os.path.join(self.root, name))
        except OSError:  # it has something in it, or got something
            return False
        return True

    def _would_remove_folder(self, gone: set[str], name: str) -> bool:
        """Whether nothing is in it but what would have left."""
        path = os.path.join(self.root, name)
        try:
            inside = os.listdir(path)
        except OSError:  # gone, or not ours to see
            return False
        return not os.path.islink(path) and gone.issuperset(f"{name}/{below}" for below in inside)
