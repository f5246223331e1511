"""``kvtiers verify``: read everything, say what is damaged, and put that aside if asked to."""

import argparse
from dataclasses import dataclass, replace

from kvtiers.chunks import PAGE_BYTES
from kvtiers.cli.common import (
    add_dry_run,
    add_place,
    batched,
    chosen,
    place_of,
    refuse_owned,
)
from kvtiers.cli.output import Advance, Output, size
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.places import Fault, Found, Part, Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser)
    parser.add_argument("--repair", action="store_true", help="take damaged chunks away")
    add_dry_run(parser)


@dataclass(slots=True)
class _Bad:
    """A chunk that is not what it should be."""

    namespace: str
    entry: Entry
    problem: str
    damaged: bool
    """False if it could not be read, so that nobody knows."""
    outcome: str = "left"


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Read; 0 if all is well, 1 if anything is damaged or could not be looked at."""
    if arguments.dry_run and not arguments.repair:
        raise ConfigError("--dry-run says what --repair would do: give both")
    place = place_of(arguments, output)
    if arguments.repair:
        refuse_owned(place)
    found = chosen(place, arguments.namespace)
    total, bad = _read_all(place, found, output)
    faults = _faults(place, found, arguments.namespace is None)
    unseen = len(output.warnings)
    if arguments.repair:
        faults = _mend(place, faults, arguments.dry_run)
        _repair(place, found, bad, arguments.dry_run, output)
    damaged_namespaces = [each for each in found if each.namespace is None]
    document = {
        "url": place.url,
        "chunks": total.chunks,
        "bytes": total.bytes,
        "damaged": [
            {
                "namespace": b.namespace,
                "key": b.entry.key.hex(),
                "problem": b.problem,
                "damaged": b.damaged,
                "outcome": b.outcome,
            }
            for b in bad
        ],
        "faults": [
            {"namespace": f.namespace or None, "problem": f.problem, "outcome": f.outcome}
            for f in faults
        ],
        "damaged_namespaces": [
            {"namespace": each.id, "problem": each.problem} for each in damaged_namespaces
        ],
    }

    def human() -> None:
        for each in damaged_namespaces:
            output.line(f"namespace {each.id}: {each.problem}; no engine can use it")
        for f in faults:
            output.line(f"{f.problem} ({f.outcome})")
        for b in bad:
            output.line(f"{b.problem} ({b.outcome})")
        output.line(
            f"{total.chunks} chunks, {size(total.bytes)} read: "
            f"{_verdict(len(bad), len(faults), unseen)}"
        )

    output.show(document, human)
    return 1 if bad or faults or damaged_namespaces or unseen else 0


def _verdict(bad: int, faults: int, unseen: int) -> str:
    verdict = f"{bad} damaged" if bad else "all intact"
    if faults:
        verdict += f", faults besides: {faults}"
    if unseen:
        verdict += f", but {unseen} things could not be looked at"
    return verdict


def _faults(place: Place, found: list[Found], everywhere: bool) -> list[Fault]:
    """Of what was chosen; of no namespace any more if everything was."""
    ids = [each.id for each in found]
    return [f for name in ([*ids, ""] if everywhere else ids) for f in place.faults(name)]


def _mend(place: Place, faults: list[Fault], dry_run: bool) -> list[Fault]:
    if not faults or not dry_run:
        return place.mend(faults) if faults else []
    return [replace(f, outcome=f"would be {f.repair}" if f.repair else f.outcome) for f in faults]


@dataclass(slots=True)
class _Total:
    chunks: int = 0
    bytes: int = 0


def _read_all(place: Place, found: list[Found], output: Output) -> tuple[_Total, list[_Bad]]:
    ids = {each.id for each in found}
    stored = [u for u in place.usage() if u.namespace in ids and u.part is Part.CHUNKS]
    total, bad = _Total(), []
    with output.progress(sum(u.bytes for u in stored), "reading") as advance:
        for name in sorted(ids):
            for some in batched(place.entries(name)):
                bad += _read(place, name, some, total, advance)
    return total, bad


def _read(
    place: Place, name: str, entries: list[Entry], total: _Total, advance: Advance
) -> list[_Bad]:
    bad, by_key = [], {e.key: e for e in entries}
    for key, payload in place.read(name, list(by_key)):
        entry = by_key[key]
        advance(PAGE_BYTES + entry.bytes)
        if isinstance(payload, KVTiersError) and payload.kind is Kind.VANISHED:
            continue  # an engine took it away meanwhile
        total.chunks += 1
        total.bytes += entry.bytes
        if isinstance(payload, KVTiersError):
            bad.append(_Bad(name, entry, str(payload), payload.kind is Kind.CORRUPT))
    return bad


def _repair(
    place: Place, found: list[Found], bad: list[_Bad], dry_run: bool, output: Output
) -> None:
    namespaces = {each.id: each.namespace for each in found}
    for name in dict.fromkeys(b.namespace for b in bad):
        ours = [b for b in bad if b.namespace == name and b.damaged]
        namespace = namespaces[name]
        if namespace is None:
            output.warn(f"namespace {name} is left as it is: {_problem_of(found, name)}")
        elif dry_run:
            for b in ours:
                b.outcome = "would be removed"
        elif ours:
            for b, outcome in zip(
                ours, place.repair(namespace, [b.entry for b in ours]), strict=True
            ):
                b.outcome = outcome


def _problem_of(found: list[Found], name: str) -> str:
    return next(each.problem for each in found if each.id == name)
