"""A store under test, with everything it was given in reach of the law."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvtiers.chunks import Key, Namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.testing.laws import must
from kvtiers.testing.values import LAYOUT, ManualClock, Slots, chunk
from kvtiers.tiers.base import ChunkStore, Item, StoreContext


@dataclass(slots=True)
class Environment:
    """What a store is given, and what it said through it."""

    namespace: Namespace
    clock: ManualClock = field(default_factory=ManualClock)
    wall: ManualClock = field(default_factory=lambda: ManualClock(1_700_000_000.0))
    removed: list[tuple[Key, Reason]] = field(default_factory=list)
    interrupt: Callable[[], None] = lambda: None
    """Called whenever the store calls out: a law can hold it there."""

    def context(self) -> StoreContext:
        """The context to build the store with."""
        return StoreContext(
            "laws", "1:laws", self.namespace, LAYOUT, self._clock, self._wall_clock, self._report
        )

    def reasons(self, name: Key) -> list[Reason]:
        """Why ``name`` was reported as removed, once for each report."""
        return [reason for k, reason in list(self.removed) if k == name]

    def _clock(self) -> float:
        return self.clock()

    def _wall_clock(self) -> float:
        self.interrupt()
        return self.wall()

    def _report(self, keys: Sequence[Key], reason: Reason) -> None:
        self.removed += [(k, reason) for k in keys]
        self.interrupt()


@dataclass(slots=True)
class StoreBench:
    """One open store."""

    store: ChunkStore
    environment: Environment

    def write(self, names: Sequence[Key], shift: int = 0) -> Slots:
        """Write the chunks ``names``; all must succeed. The memory they came from."""
        slots = Slots.filled(names, shift)
        results = self.write_from(slots)
        for name, result in zip(names, results, strict=True):
            must(result is None, f"writing {name.hex()} failed: {result!r}")
        return slots

    def write_from(self, slots: Slots) -> list[KVTiersError | None]:
        """Write what ``slots`` holds; one checked result per chunk."""
        items = self.items(slots, writable=False)
        return self._checked("write", self.store.write(items), len(items))

    def read_into(self, slots: Slots) -> list[KVTiersError | None]:
        """Read into ``slots``; one checked result per chunk, nothing outside of them touched."""
        items = self.items(slots, writable=True)
        results = self._checked("read", self.store.read(items), len(items))
        slots.must_be_guarded()
        return results

    def read(self, names: Sequence[Key], shift: int = 0) -> list[Kind | None]:
        """Read ``names``: None for a chunk whose bytes came back right, else its error."""
        slots = Slots(names, shift)
        results = self.read_into(slots)
        for i, (name, error) in enumerate(zip(names, results, strict=True)):
            right = error is not None or slots.holds(i) == chunk(name)
            must(right, f"{name.hex()} was delivered with wrong bytes")
        return [None if error is None else error.kind for error in results]

    def must_hold(self, names: Sequence[Key], shift: int = 0) -> None:
        """All of ``names`` are there and come back bit for bit."""
        must(self.contains(names) == [True] * len(names), "a chunk that was written is not found")
        kinds = self.read(names, shift)
        must(kinds == [None] * len(names), f"chunks that were written do not come back: {kinds}")

    def must_lack(self, names: Sequence[Key]) -> None:
        """None of ``names`` is there, by either way of asking."""
        must(self.contains(names) == [False] * len(names), "an absent chunk is found")
        kinds = self.read(names)
        must(kinds == [Kind.VANISHED] * len(names), f"absent chunks are VANISHED, not {kinds}")

    def contains(self, names: Sequence[Key]) -> list[bool]:
        """Checked to be one bool per key."""
        answers = self.store.contains(names)
        must(isinstance(answers, list), "contains returned no list")
        must(len(answers) == len(names), f"{len(answers)} answers for {len(names)} keys")
        must(all(isinstance(a, bool) for a in answers), "contains answered other than by bools")
        return answers

    @staticmethod
    def items(slots: Slots, *, writable: bool) -> list[Item]:
        """The items of a call on ``slots``."""
        views = slots.views(writable=writable)
        return [Item(k, view) for k, view in zip(slots.keys, views, strict=True)]

    @staticmethod
    def _checked(
        operation: str, results: list[KVTiersError | None], count: int
    ) -> list[KVTiersError | None]:
        must(isinstance(results, list), f"{operation} returned no list")
        must(len(results) == count, f"{operation}: {len(results)} results for {count} items")
        good = all(r is None or isinstance(r, KVTiersError) for r in results)
        must(good, f"{operation} answered with something other than None or KVTiersError")
        return results


@contextmanager
def closing(bench: StoreBench) -> Iterator[StoreBench]:
    """Close the store at the end, quietly if the law is broken already."""
    try:
        yield bench
    except BaseException:
        with suppress(Exception):
            bench.store.close()
        raise
    bench.store.close()


def refusal(act: Callable[[], object]) -> Kind | None:
    """The kind of KVTiersError that ``act`` raises, None if it does not."""
    try:
        act()
    except KVTiersError as e:
        return e.kind
    return None


class Stops:
    """Holds one thread at each place where the store calls out, until it is told to go on."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._done = False
        self._free = False

    def interrupt(self) -> None:
        """Give it to the environment: stops the thread that :meth:`start` started."""
        if threading.current_thread() is not self._thread:
            return
        with self._changed:
            if self._free:
                return
            self._stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._stopped)

    def start(self, act: Callable[[], object]) -> None:
        """Run ``act`` on a thread that stops wherever the store calls out."""

        def run() -> None:
            with suppress(Exception):
                act()
            with self._changed:
                self._done = True
                self._changed.notify_all()

        self._thread = threading.Thread(target=run, name="kvtiers-laws-lane", daemon=True)
        self._thread.start()

    def next(self) -> bool:
        """Wait for the next stop; False if the thread has ended."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._stopped or self._done, self._patience_s)
            must(came, "the store does not return")
            return self._stopped

    def go_on(self) -> None:
        """Let the thread continue to its next stop."""
        with self._changed:
            self._stopped = False
            self._changed.notify_all()

    def finish(self) -> None:
        """Stop the thread no more, and wait for its end."""
        with self._changed:
            self._free = True
            self._stopped = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done, self._patience_s)


def together(acts: Sequence[Callable[[], object]], patience_s: float) -> None:
    """Run all at once, each on a thread; raises the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], object]) -> None:
        try:
            start.wait(patience_s)
            act()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s)
        must(not thread.is_alive(), "calls from several threads do not return")
    if errors:
        raise errors[0]
