"""A store of either layout that tells a pipe what it is about to lose, and what must be there."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.events import Reason
from kvtiers.testing.values import LAYOUT, NAMESPACE, Slots, chunk
from kvtiers.testing.values import key as named
from kvtiers.tiers.base import Item, RemovalReport, StoreContext
from kvtiers.tiers.fs import names, stamps
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.log import LogStore, survivors
from kvtiers.tiers.fs.log.core import LogCore
from kvtiers.tiers.fs.log.pool import Segment
from kvtiers.tiers.fs.log.roller import Roller

REPOSITORY = Path(__file__).parents[2]
CAPACITY = 250 * PAGE_BYTES
"""Bytes: about sixty chunks in files, nine segments in a log."""
STORES = {"files": FilesStore, "log": LogStore}
GROUPS = (0, 1, 7)


def key(n: int) -> Key:
    """Key number ``n``; its chunk has one, two or five pages."""
    return named(n, GROUPS[n % len(GROUPS)])


NUMBERS = range(4000)
NUMBER_OF = {key(n): n for n in NUMBERS}


def open_store(
    layout: str,
    root: Path,
    removed: RemovalReport = lambda keys, reason: None,
    **options: Any,
) -> Any:
    """A bounded store; ``removed`` is its ``on_removed``."""
    clocks = time.monotonic, time.time
    context = StoreContext("test", "1:test", NAMESPACE, LAYOUT, *clocks, removed)
    return STORES[layout](context, str(root), **{"capacity_bytes": CAPACITY} | options)


def write(store: Any, ns: Sequence[int]) -> list[Any]:
    """Store these chunks; the errors."""
    taken = [key(n) for n in ns]
    views = Slots.filled(taken).views(writable=False)
    return store.write([Item(k, v) for k, v in zip(taken, views, strict=True)])


def wrong(store: Any, ns: Iterable[int]) -> dict[int, Any]:
    """Those of these chunks that cannot be read, with why, or that are not what they should be."""
    ns = list(ns)
    slots = Slots([key(n) for n in ns])
    views = slots.views(writable=True)
    errors = store.read([Item(key(n), v) for n, v in zip(ns, views, strict=True)])
    let_promises_end(Path(store._root))
    return {
        n: error or "wrong bytes"
        for i, (n, error) in enumerate(zip(ns, errors, strict=True))
        if error is not None or slots.holds(i) != chunk(key(n))
    }


def present(store: Any, ns: Sequence[int] = NUMBERS) -> set[int]:
    """The chunks among these that it says are there."""
    there = store.contains([key(n) for n in ns])
    let_promises_end(Path(store._root))
    return {n for n, yes in zip(ns, there, strict=True) if yes}


def let_promises_end(root: Path) -> None:
    """As if the time had passed for which chunks stay that were found or read."""
    now = time.time()
    for path in root.glob("*/*/*.kvc"):
        with contextlib.suppress(FileNotFoundError):
            stamp = path.stat().st_mtime
            if stamps.in_use(stamp, now):
                os.utime(path, (now, stamp - stamps.GRACE_S - 1))


# -- what a child says ----------------------------------------------------------------------------


def say(fd: int, what: str, ns: Iterable[int]) -> None:
    """One line, in one write, so that a kill cannot tear it."""
    line = f"{what} {' '.join(map(str, ns))}\n".encode()
    assert len(line) < 4096, "longer than what a pipe takes at once"
    os.write(fd, line)


def open_telling(fd: int, layout: str, root: Path, **options: Any) -> Any:
    """A store that says which chunks have left."""

    def removed(keys: Sequence[Key], reason: Reason) -> None:
        say(fd, "gone", (NUMBER_OF[k] for k in keys))

    return open_store(layout, root, removed, **options)


def tell_of_segments(fd: int) -> None:
    """From now on every log of this process says what is about to leave, and what was copied."""
    empty, write_again = Roller.empty, survivors.write_again

    def emptied(self: Roller, victim: Segment, **options: Any) -> None:
        say(fd, "leaving", (NUMBER_OF[k] for k in set(victim.keys)))
        empty(self, victim, **options)

    def written_again(core: LogCore, victim: Segment) -> None:
        write_again(core, victim)
        with core.lock:
            found = {k: core.index.find(k) for k in victim.keys}
        copied = (k for k, at in found.items() if at is not None and at.segment != victim.number)
        say(fd, "survived", (NUMBER_OF[k] for k in copied))

    Roller.empty = emptied  # type: ignore[method-assign]
    survivors.write_again = written_again


def tell_of_files(fd: int) -> None:
    """From now on this process says which file is about to leave, and which got its name back."""
    replace = os.replace

    def told(old: Any, new: Any, **options: Any) -> None:
        before, after = os.path.basename(old), os.path.basename(new)
        leaves, returns = names.chunk_key(before), names.chunk_key(after)
        if leaves is not None and names.is_leaving(after):
            say(fd, "leaving", [NUMBER_OF[leaves]])
        replace(old, new, **options)
        if returns is not None and names.is_leaving(before):
            say(fd, "survived", [NUMBER_OF[returns]])

    os.replace = told  # type: ignore[assignment]


TELL = {"files": tell_of_files, "log": tell_of_segments}


@dataclass
class Told:
    """What a child said before it died."""

    stored: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    """About to be evicted, and not said to have survived it."""
    gone: set[int] = field(default_factory=set)
    deleting: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)

    def hear(self, line: str) -> str:
        """Take in one line; its first word."""
        what, *ns = line.split()
        if what == "survived":
            self.leaving.difference_update(map(int, ns))
        else:
            getattr(self, what).update(map(int, ns))
        return what

    @property
    def kept(self) -> set[int]:
        """What must be there."""
        return self.stored - self.leaving - self.deleting


# -- a child --------------------------------------------------------------------------------------


@contextmanager
def running(module: str, *arguments: object) -> "Iterator[subprocess.Popen[str]]":
    """``python -m module``, with our path; it ends with the body, and all that it forked."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def kill_after(child: "subprocess.Popen[str]", stores: int, told: Told) -> None:
    """Kill it when it has said ``stored`` so often; hear it to its end."""
    assert child.stdout is not None
    for line in child.stdout:
        stores -= told.hear(line) == "stored"
        if stores == 0:
            child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL, "it ended by itself"


def verify(
    layout: str,
    root: Path,
    kept: set[int],
    removed: RemovalReport = lambda keys, reason: None,
    among: Sequence[int] = NUMBERS,
    **options: Any,
) -> Any:
    """Open what is left: nothing is lost, torn, wrong, uncounted or left over.

    ``among``: the chunks that were ever written.
    """
    store = open_store(layout, root, removed, **options)
    there = present(store, among)
    assert kept <= there, f"lost {sorted(kept - there)}"
    assert wrong(store, there) == {}
    assert {e.key for e in store.scan()} == {key(n) for n in there}
    assert_accounts(layout, root, store, options.get("capacity_bytes", CAPACITY))
    return store


def assert_accounts(layout: str, root: Path, store: Any, capacity: int) -> None:
    """What the store counts is what lies there, within its capacity, and nothing else does."""
    store.check()
    ours = {p: p.lstat().st_size for p in root.rglob("*") if p.is_file() and p.name != "lock"}
    assert [p for p in ours if not _belongs(p.name)] == [], "left over"
    total = sum(ours.values())
    assert total <= capacity, "above the capacity"
    manifests = sum(size for p, size in ours.items() if p.name == names.MANIFEST)
    counted = store.used_bytes + (manifests if layout == "log" else 0)
    assert counted == total, "the accounts are wrong"


def _belongs(name: str) -> bool:
    """What was about to leave when its owner died is counted, and leaves first."""
    known = names.chunk_key(name) is not None or name in (names.MANIFEST, names.QUOTA)
    return known or name.endswith(".kvs") or names.is_leaving(name)
