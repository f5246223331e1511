from collections.abc import Sequence

import pytest

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.tiers.base import Item
from kvtiers.tiers.memory import MemoryStore
from tests.unit.tiers.tier_kit import CHUNK, context, filled, key, page_aligned, payload

STORED = CHUNK + PAGE_BYTES
Removals = list[tuple[list[Key], Reason]]


def make(chunks: int, removals: Removals | None = None) -> MemoryStore:
    def removed(keys: Sequence[Key], reason: Reason) -> None:
        if removals is not None:
            removals.append((list(keys), reason))

    return MemoryStore(context(removed), chunks * STORED)


def write(store: MemoryStore, *ns: int) -> list[KVTiersError | None]:
    return store.write([Item(key(n), filled(n)) for n in ns])


def read(store: MemoryStore, n: int, size: int = CHUNK) -> tuple[bytes, Kind | None]:
    view = page_aligned(size)
    (error,) = store.read([Item(key(n), view)])
    return bytes(view), error.kind if error else None


def test_round_trip() -> None:
    store = make(3)
    assert write(store, 1, 2) == [None, None]
    assert read(store, 2) == (payload(2), None)
    assert store.contains([key(1), key(3)]) == [True, False]
    assert {(e.key, e.bytes) for e in store.scan()} == {(key(1), CHUNK), (key(2), CHUNK)}
    store.check()


def test_least_recently_used_leaves_and_the_capacity_holds() -> None:
    removals: Removals = []
    store = make(2, removals)
    write(store, 1, 2)
    store.touch([key(1), key(9)])
    write(store, 3)
    assert store.contains([key(1), key(2), key(3)]) == [True, False, True]
    read(store, 1)
    write(store, 4)
    assert store.contains([key(1), key(3), key(4)]) == [True, False, True]
    assert removals == [([key(2)], Reason.EVICTED), ([key(3)], Reason.EVICTED)]
    store.check()


def test_absent_and_wrong_length_are_told_apart() -> None:
    removals: Removals = []
    store = make(2, removals)
    write(store, 1)
    assert read(store, 2)[1] is Kind.VANISHED
    assert read(store, 1, 2 * CHUNK)[1] is Kind.CORRUPT
    assert removals == [([key(2)], Reason.VANISHED), ([key(1)], Reason.CORRUPT)]
    assert store.contains([key(1)]) == [False]


def test_damaged_bytes_are_found() -> None:
    store = make(2)
    write(store, 1)
    chunk = store._chunks[key(1)]
    chunk.payload = b"\xff" + chunk.payload[1:]
    assert read(store, 1)[1] is Kind.CORRUPT
    store.check()


def test_chunk_above_the_capacity_is_full() -> None:
    store = make(1)
    (error,) = store.write([Item(key(1), filled(1, 4 * CHUNK))])
    assert error is not None
    assert error.kind is Kind.FULL


def test_capacity_below_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"capacity_bytes is 4096, less.*{STORED}"):
        MemoryStore(context(), PAGE_BYTES)


def test_delete_and_close() -> None:
    store = make(2)
    write(store, 1)
    store.delete([key(1), key(2)])
    assert store.contains([key(1)]) == [False]
    store.close()
    store.close()
    for call in (store.contains, store.write, store.read, store.delete, store.touch):
        with pytest.raises(KVTiersError, match="after close"):
            call([])
    with pytest.raises(KVTiersError, match="after close"):
        store.scan()
    store.check()
    assert "0 chunks" in repr(store)
