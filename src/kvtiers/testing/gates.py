"""A store that a test can hold, so that "while the store hangs" needs no sleeping."""

import threading
from collections.abc import Iterable, Sequence

from kvtiers.chunks import Key
from kvtiers.errors import KVTiersError
from kvtiers.testing.laws import must
from kvtiers.tiers.base import ChunkStore, Entry, Item

MAY_BLOCK = ("contains", "write", "read", "delete", "scan")
"""Operations that a store may block in."""


class Gate:
    """Holds calls by their name until it is told to let them through. Any thread."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._waiting = 0
        self._changed = threading.Condition()

    def hold(self, *operations: str) -> None:
        """From now on calls of these operations wait; of all that may block if none is named."""
        with self._changed:
            self._held.update(operations or MAY_BLOCK)

    def release(self) -> None:
        """Let all waiting and later calls through."""
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def wait_until_held(self, patience_s: float = 20.0, count: int = 1) -> None:
        """Wait until ``count`` calls wait here. Raises LawBroken if they do not come."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._waiting >= count, patience_s)
        must(came, f"only {self._waiting} of {count} calls reached the store")

    def let_through(self, operation: str) -> None:
        """Wait here while ``operation`` is held."""
        with self._changed:
            if operation not in self._held:
                return
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: operation not in self._held)
            self._waiting -= 1

    def check(self) -> None:
        """Raise AssertionError if fewer than no calls wait."""
        with self._changed:
            assert self._waiting >= 0, "a call left the gate twice"

    def __repr__(self) -> str:
        held = ", ".join(sorted(self._held)) or "nothing"
        return f"<Gate holds {held}: {self._waiting} calls wait>"


class GatedStore(Gate):
    """Wraps a store; calls of held operations wait, before their effect, until ``release``."""

    def __init__(self, inner: ChunkStore) -> None:
        super().__init__()
        self.inner = inner
        self.capabilities = inner.capabilities

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """As the wrapped store, when it is let through; at once if the store is ``instant``."""
        if not self.capabilities.instant:
            self.let_through("contains")
        return self.inner.contains(keys)

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """As the wrapped store, when it is let through."""
        self.let_through("write")
        return self.inner.write(items)

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """As the wrapped store, when it is let through."""
        self.let_through("read")
        return self.inner.read(items)

    def delete(self, keys: Sequence[Key]) -> None:
        """As the wrapped store, when it is let through."""
        self.let_through("delete")
        self.inner.delete(keys)

    def scan(self) -> Iterable[Entry]:
        """As the wrapped store, when it is let through."""
        self.let_through("scan")
        return self.inner.scan()

    def touch(self, keys: Sequence[Key]) -> None:
        """As the wrapped store, when it is let through."""
        self.let_through("touch")
        self.inner.touch(keys)

    def close(self) -> None:
        """As the wrapped store, when it is let through."""
        self.let_through("close")
        self.inner.close()

    def check(self) -> None:
        """Raise AssertionError if fewer than no calls wait, or a held operation does not exist."""
        super().check()
        assert all(hasattr(self, name) for name in self._held), "an unknown operation is held"

    def __repr__(self) -> str:
        held = ", ".join(sorted(self._held)) or "nothing"
        return f"<GatedStore holds {held}: {self._waiting} calls wait; {self.inner!r}>"
