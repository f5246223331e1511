"""``kvtiers du``: what lies there, by namespace and by what it is for."""

import argparse
from collections import Counter
from typing import Any

from kvtiers.cli.common import add_place, place_of
from kvtiers.cli.output import Output, Unit, size
from kvtiers.tiers.places import Part, Usage

_UNCOUNTED = (Part.TRIAL, Part.FOREIGN)
"""No capacity counts these."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser, namespace=False)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Add up; 0 however much is there."""
    place = place_of(arguments, output)
    with output.progress(None, "counting", Unit.FILES) as advance:
        usage = place.usage(advance)
    total = sum(u.bytes for u in usage if u.part not in _UNCOUNTED)
    disk, capacity = place.free(), place.capacity()

    def human() -> None:
        parts = [part for part in Part if any(u.part is part for u in usage)]
        columns = ("NAMESPACE", *(f">{part.value.upper()}" for part in parts), ">TOTAL")
        output.table(columns, _rows(usage, parts))
        bound = f" of {size(capacity)} capacity" if capacity else ""
        rest = f"; {size(disk[0])} of {size(disk[1])} are free on the disk" if disk else ""
        output.line(f"{size(total)}{bound}{rest}")

    document: dict[str, Any] = {
        "url": place.url,
        "bytes": total,
        "capacity_bytes": capacity,
        "disk_free_bytes": disk and disk[0],
        "disk_bytes": disk and disk[1],
        "usage": [
            {
                "namespace": u.namespace or None,
                "part": u.part.value,
                "files": u.files,
                "bytes": u.bytes,
            }
            for u in usage
        ],
    }
    output.show(document, human)
    return 0


def _rows(usage: list[Usage], columns: list[Part]) -> list[tuple[str, ...]]:
    by_namespace: dict[str, Counter[Part]] = {}
    for u in usage:
        by_namespace.setdefault(u.namespace, Counter())[u.part] += u.bytes
    return [
        (
            name or "(beside them)",
            *(size(parts[part]) if part in parts else "-" for part in columns),
            size(sum(parts.values())),
        )
        for name, parts in by_namespace.items()
    ]
