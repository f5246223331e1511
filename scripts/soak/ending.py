"""What has to hold when all is over."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvtiers.tiers.base import Item
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.log import LogStore
from scripts.soak.chunks import NUMBERS, blank, right
from scripts.soak.roles import Work, context
from scripts.soak.tools import DONE, verify
from scripts.soak.watch import SETTLES_S, disk_bytes

_PAUSE_S = 0.2


def read_all(role: str, root: Path, capacity: int) -> None:
    """Each chunk is right, or is damaged, said to be, and gone; then nothing is wrong any more."""
    work = Work()
    make: Any = FilesStore if role == "files" else LogStore
    store = make(context(work), str(root), capacity_bytes=capacity)
    settle(role, root, store, capacity)
    kinds: list[Counter[str]] = []
    for _ in range(2):
        kinds.append(Counter())
        for entry in list(store.scan()):
            n = NUMBERS[entry.key]
            view = blank(n)
            (error,) = store.read([Item(entry.key, view)])
            kinds[-1]["ok" if error is None else error.kind.value] += 1
            if error is None and not right(n, view):
                raise SystemExit(f"WRONG BYTES at the end: {entry.key.hex()}")
    bad = sum(n for kind, n in kinds[0].items() if kind != "ok")
    said = work.counts["removed corrupt"] + work.counts["removed vanished"]
    if said != bad or set(kinds[1]) - {"ok"}:
        raise SystemExit(f"{role}: {kinds[0]}, {said} reported, then {kinds[1]}")
    store.check()
    manifests = sum(p.stat().st_size for p in root.rglob("manifest.json"))
    counted = store.used_bytes + (manifests if role == "log" else 0)
    if counted != disk_bytes(root):
        raise SystemExit(f"{role}: it counts {counted} bytes, {disk_bytes(root)} are there")
    if counted > capacity:
        raise SystemExit(f"{role}: {counted} bytes are above the capacity of {capacity}")
    store.close()
    process = verify(root)
    _, said_there = process.communicate()
    if process.returncode != DONE:
        raise SystemExit(f"{role}: kvtiers verify is not clean: {said_there}")
    print(f"{role}: at the end {dict(kinds[0])}, {counted >> 20} of {capacity >> 20} MiB, verified")


def settle(role: str, root: Path, store: Any, capacity: int) -> None:
    """Wait until what was promised to the last readers may leave, and has left.

    Raises SystemExit if the capacity, which may be smaller than theirs, is not kept by then.
    """
    until = time.monotonic() + SETTLES_S
    while disk_bytes(root) > capacity:
        if time.monotonic() > until:
            raise SystemExit(f"{role}: {disk_bytes(root)} bytes are above {capacity} and stay")
        time.sleep(_PAUSE_S)
        for _ in store.scan():  # begins by evicting what is too much
            pass
