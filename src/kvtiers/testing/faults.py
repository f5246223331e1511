"""Faults as values, and a store that has them.

A fault says what happens, in which operation, at which call, and whether before or after the
effect: a write that took effect and then reported failure is the one that is easily forgotten.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.testing.gates import Gate
from kvtiers.tiers.base import ChunkStore, Entry, Item

T = TypeVar("T")

_HANG = "hang"


class What(Enum):
    """What a fault does."""

    ERROR = "error"
    """The call answers or raises an error; ``AFTER`` its effect that is a late success."""
    SHORT = "short"
    """Of each chunk only the first pages are moved, and that is called a success."""
    FLIP = "flip"
    """A bit of each chunk changes on its way, and that is called a success."""
    VANISH = "vanish"
    """The chunks of the call are deleted, and nobody is told."""
    DELAY = "delay"
    """Seconds pass on the store's clock."""
    HANG = "hang"
    """The call waits until the store is told to ``release``."""


_OPERATIONS = {
    What.SHORT: ("write", "read"),
    What.FLIP: ("write", "read"),
    What.VANISH: ("contains", "write", "read"),
}
"""Where these can strike; the others anywhere."""


class When(Enum):
    """Where in a call the fault strikes. On its way a chunk is damaged either way."""

    BEFORE = "before"
    """Nothing was done."""
    AFTER = "after"
    """It was done, and the caller does not know."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a store fails. Raises ValueError for one that cannot strike."""

    kind: Kind = Kind.IO
    """Of an ``ERROR``."""
    operation: str | None = None
    """Name of the method; None: any."""
    when: When = When.BEFORE
    nth: int | None = None
    """Strikes at this call of the operation, counted from 1; None: at every call."""
    sticky: bool = False
    """With ``nth``: at every later call as well."""
    probability: float = 1.0
    """Of striking where it otherwise would; the random numbers are the store's."""
    raises: bool = False
    """``write`` and ``read`` raise, which they should not, instead of answering per item."""
    retry: Retry = Retry.NEVER
    what: What = What.ERROR
    seconds: float = 0.0
    """Of a ``DELAY``."""
    chunks: Callable[[Key], bool] | None = None
    """Which chunks it concerns, e.g. those of one group; None: all. The others do well."""

    def __post_init__(self) -> None:
        where = _OPERATIONS.get(self.what)
        if where is not None and self.operation not in where:
            raise ValueError(f"{self.what.value} strikes in {' or '.join(where)} only")

    def error(self, operation: str) -> KVTiersError:
        """The error it makes."""
        text = f"a fault was injected {self.when.value} {operation}"
        return KVTiersError(text, kind=self.kind, retry=self.retry, operation=operation)

    def concerns(self, key: Key) -> bool:
        """Whether it may strike this chunk."""
        return self.chunks is None or self.chunks(key)

    def strikes(self, operation: str, call: int, rng: random.Random) -> bool:
        """Whether it strikes at the ``call``-th call that it could."""
        if self.operation not in (None, operation):
            return False
        if self.nth is not None and not (call == self.nth or (self.sticky and call > self.nth)):
            return False
        return self.probability >= 1.0 or rng.random() < self.probability


class FaultyStore:
    """Wraps a store and lets it fail as told. Any thread."""

    def __init__(
        self,
        inner: ChunkStore,
        faults: Iterable[Fault] = (),
        rng: random.Random | None = None,
        let_pass: Callable[[float], None] = time.sleep,
    ) -> None:
        """``let_pass`` lets seconds pass: give the ``advance`` of a manual clock."""
        self.inner = inner
        self.capabilities = inner.capabilities
        self.faults = list(faults)
        self.struck: list[tuple[str, Fault]] = []
        """Operation and fault, each time one struck."""
        self._rng = rng or random.Random(0)
        self._let_pass = let_pass
        self._hangs = Gate()
        self._hangs.hold(_HANG)
        self._calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """As the wrapped store, or a fault."""
        return self._call("contains", lambda: self.inner.contains(keys), keys)

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """As the wrapped store, or a fault for each item."""
        return self._transfer("write", items, self.inner.write)

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """As the wrapped store, or a fault for each item."""
        return self._transfer("read", items, self.inner.read)

    def delete(self, keys: Sequence[Key]) -> None:
        """As the wrapped store, or a fault."""
        self._call("delete", lambda: self.inner.delete(keys), keys)

    def scan(self) -> Iterable[Entry]:
        """As the wrapped store, or a fault."""
        return self._call("scan", lambda: self.inner.scan())

    def touch(self, keys: Sequence[Key]) -> None:
        """As the wrapped store, or a fault."""
        self._call("touch", lambda: self.inner.touch(keys), keys)

    def close(self) -> None:
        """As the wrapped store, which is closed even if an error strikes before."""
        fault = self._next("close")
        if fault is None or fault.what is What.ERROR:
            self.inner.close()
        else:
            self._around(fault, (), self.inner.close)
        if fault is not None and fault.what is What.ERROR:
            raise fault.error("close")

    def wait_until_held(self, patience_s: float = 20.0, count: int = 1) -> None:
        """Wait until ``count`` calls hang. Raises LawBroken if they do not come."""
        self._hangs.wait_until_held(patience_s, count)

    def release(self) -> None:
        """Nothing hangs any more, now or later."""
        self._hangs.release()

    def calls(self, operation: str | None = None) -> int:
        """How often the operation was called; None: all of them."""
        with self._lock:
            return self._calls.get(operation, 0) if operation else sum(self._calls.values())

    def _call(self, operation: str, act: Callable[[], T], keys: Sequence[Key] = ()) -> T:
        fault = self._next(operation, keys)
        if fault is None:
            return act()
        if fault.what is not What.ERROR:
            return self._around(fault, keys, act)
        if fault.when is When.AFTER:
            act()
        raise fault.error(operation)

    def _transfer(
        self,
        operation: str,
        items: Sequence[Item],
        act: Callable[[Sequence[Item]], list[KVTiersError | None]],
    ) -> list[KVTiersError | None]:
        keys = [item.key for item in items]
        fault = self._next(operation, keys)
        if fault is None:
            return act(items)
        if fault.what is What.ERROR:
            return _failing(fault, operation, items, act)
        if fault.what in (What.SHORT, What.FLIP):
            damage = _write_damaged if operation == "write" else _read_damaged
            return damage(fault, items, act)
        return self._around(fault, keys, lambda: act(items))

    def _around(self, fault: Fault, keys: Sequence[Key], act: Callable[[], T]) -> T:
        if fault.when is When.BEFORE:
            self._befall(fault, keys)
        result = act()
        if fault.when is When.AFTER:
            self._befall(fault, keys)
        return result

    def _befall(self, fault: Fault, keys: Sequence[Key]) -> None:
        if fault.what is What.VANISH:
            self.inner.delete([key for key in keys if fault.concerns(key)])
        elif fault.what is What.DELAY:
            self._let_pass(fault.seconds)
        else:
            self._hangs.let_through(_HANG)

    def _next(self, operation: str, keys: Sequence[Key] = ()) -> Fault | None:
        with self._lock:
            self._calls[operation] = self._calls.get(operation, 0) + 1
            total = sum(self._calls.values())
            for fault in self.faults:
                if fault.chunks is not None and not any(map(fault.chunks, keys)):
                    continue
                call = self._calls[operation] if fault.operation else total
                if fault.strikes(operation, call, self._rng):
                    self.struck.append((operation, fault))
                    return fault
        return None

    def check(self) -> None:
        """Raise AssertionError if more faults struck than there were calls."""
        with self._lock:
            assert len(self.struck) <= sum(self._calls.values()), "more faults than calls"
        self._hangs.check()

    def __repr__(self) -> str:
        return f"<FaultyStore {self.calls()} calls, {len(self.struck)} struck; {self.inner!r}>"


_Act = Callable[[Sequence[Item]], list[KVTiersError | None]]


def _failing(
    fault: Fault, operation: str, items: Sequence[Item], act: _Act
) -> list[KVTiersError | None]:
    """Errors for the chunks it concerns; the others are moved."""
    struck = [fault.concerns(item.key) for item in items]
    late = fault.when is When.AFTER
    moved = [item for item, hit in zip(items, struck, strict=True) if late or not hit]
    results = act(moved) if moved else []
    if fault.raises:
        raise fault.error(operation)
    rest = iter(results)
    answers = [next(rest) if late or not hit else None for hit in struck]
    return [
        fault.error(operation) if hit else answer
        for hit, answer in zip(struck, answers, strict=True)
    ]


def _write_damaged(fault: Fault, items: Sequence[Item], act: _Act) -> list[KVTiersError | None]:
    return act(
        [Item(i.key, _damaged(fault, i.view)) if fault.concerns(i.key) else i for i in items]
    )


def _damaged(fault: Fault, view: memoryview) -> memoryview:
    if fault.what is What.SHORT:
        return view[: _short(view)]
    copied = bytearray(view)
    copied[-1] ^= 1
    return memoryview(copied).toreadonly()


def _read_damaged(fault: Fault, items: Sequence[Item], act: _Act) -> list[KVTiersError | None]:
    ends = [bytes(item.view[_short(item.view) :]) for item in items]
    results = act(items)
    for item, end in zip(items, ends, strict=True):
        if not fault.concerns(item.key):
            continue
        if fault.what is What.SHORT:
            item.view[_short(item.view) :] = end
        else:
            item.view[-1] ^= 1
    return results


def _short(view: memoryview) -> int:
    """Where a chunk is cut: in its middle, at a page if it has several."""
    half = view.nbytes // 2
    return half - half % PAGE_BYTES if half > PAGE_BYTES else half
