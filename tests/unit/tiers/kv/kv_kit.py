"""Stores on real servers, and a look behind their backs."""

from collections.abc import Sequence
from typing import Any

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.kv import KvOptions, build
from kvtiers.tiers.kv.store import KvStore
from tests.servers import valkey
from tests.unit.tiers.tier_kit import CHUNK, ManualClock, context, filled, key, payload


class Opened:
    """A store, its clock, and what it reported."""

    def __init__(self, options: KvOptions) -> None:
        self.clock = ManualClock()
        self.removed: list[tuple[Key, Reason]] = []
        store = build(context(self._report, clock=self.clock), options)
        assert isinstance(store, KvStore)
        self.store, self.options = store, options

    def _report(self, keys: Sequence[Key], reason: Reason) -> None:
        self.removed += [(each, reason) for each in keys]

    def name(self, n: int) -> bytes:
        """What the chunk is called at the server."""
        return self.store._names.of(key(n))

    def write(self, *ns: int) -> list[Kind | None]:
        """What became of each."""
        return kinds(self.store.write([Item(key(n), filled(n)) for n in ns]))

    def read(self, *ns: int) -> list[Kind | None]:
        """What became of each; those that came are right."""
        views = [memoryview(bytearray(CHUNK)) for _ in ns]
        results = self.store.read([Item(key(n), v) for n, v in zip(ns, views, strict=True)])
        for n, view, error in zip(ns, views, results, strict=True):
            assert error is not None or view == payload(n)
        return kinds(results)

    def contains(self, *ns: int) -> list[bool]:
        """Whether each is there."""
        return self.store.contains([key(n) for n in ns])

    def failure(self) -> KVTiersError:
        """Why a write fails."""
        (error,) = self.store.write([Item(key(0), filled(0))])
        assert error is not None
        return error


def kinds(results: Sequence[KVTiersError | None]) -> list[Kind | None]:
    return [None if error is None else error.kind for error in results]


def open_store(**options: Any) -> Opened:
    """A store that nobody shares unless a prefix is given."""
    shared = valkey.shared() if "url" not in options else None
    if shared is not None:
        options["url"] = shared.url
        options.setdefault("prefix", shared.new_prefix())
    return Opened(KvOptions(**options))
