"""Faults as values, and a store that has them.

A fault says which operation fails, when, with what error, and whether before or after the effect:
a write that took effect and then reported failure is the one that is easily forgotten.
"""

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.base import ChunkStore, Entry, Item

T = TypeVar("T")


class When(Enum):
    """Where in a call the fault strikes."""

    BEFORE = "before"
    """Nothing was done."""
    AFTER = "after"
    """It was done, and the caller is told that it was not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a store fails."""

    kind: Kind = Kind.IO
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

    def error(self, operation: str) -> KVTiersError:
        """The error it makes."""
        text = f"a fault was injected {self.when.value} {operation}"
        return KVTiersError(text, kind=self.kind, retry=self.retry, operation=operation)

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
        self, inner: ChunkStore, faults: Iterable[Fault] = (), rng: random.Random | None = None
    ) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.faults = list(faults)
        self.struck: list[tuple[str, Fault]] = []
        """Operation and fault, each time one struck."""
        self._rng = rng or random.Random(0)
        self._calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """As the wrapped store, or a fault."""
        return self._call("contains", lambda: self.inner.contains(keys))

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """As the wrapped store, or a fault for each item."""
        return self._transfer("write", items, lambda: self.inner.write(items))

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """As the wrapped store, or a fault for each item."""
        return self._transfer("read", items, lambda: self.inner.read(items))

    def delete(self, keys: Sequence[Key]) -> None:
        """As the wrapped store, or a fault."""
        self._call("delete", lambda: self.inner.delete(keys))

    def scan(self) -> Iterable[Entry]:
        """As the wrapped store, or a fault."""
        return self._call("scan", lambda: self.inner.scan())

    def touch(self, keys: Sequence[Key]) -> None:
        """As the wrapped store, or a fault."""
        self._call("touch", lambda: self.inner.touch(keys))

    def close(self) -> None:
        """As the wrapped store, which is closed even if a fault strikes before."""
        fault = self._next("close")
        self.inner.close()
        if fault is not None:
            raise fault.error("close")

    def calls(self, operation: str | None = None) -> int:
        """How often the operation was called; None: all of them."""
        with self._lock:
            return self._calls.get(operation, 0) if operation else sum(self._calls.values())

    def _call(self, operation: str, act: Callable[[], T]) -> T:
        fault = self._next(operation)
        if fault is None:
            return act()
        if fault.when is When.AFTER:
            act()
        raise fault.error(operation)

    def _transfer(
        self,
        operation: str,
        items: Sequence[Item],
        act: Callable[[], list[KVTiersError | None]],
    ) -> list[KVTiersError | None]:
        fault = self._next(operation)
        if fault is None:
            return act()
        if fault.when is When.AFTER:
            act()
        if fault.raises:
            raise fault.error(operation)
        return [fault.error(operation) for _ in items]

    def _next(self, operation: str) -> Fault | None:
        with self._lock:
            self._calls[operation] = self._calls.get(operation, 0) + 1
            total = sum(self._calls.values())
            for fault in self.faults:
                call = self._calls[operation] if fault.operation else total
                if fault.strikes(operation, call, self._rng):
                    self.struck.append((operation, fault))
                    return fault
        return None

    def check(self) -> None:
        """Raise AssertionError if more faults struck than there were calls."""
        with self._lock:
            assert len(self.struck) <= sum(self._calls.values()), "more faults than calls"

    def __repr__(self) -> str:
        return f"<FaultyStore {self.calls()} calls, {len(self.struck)} struck; {self.inner!r}>"
