from kvtiers.chunks import PAGE_BYTES
from kvtiers.testing import StoreLaws, StoreTierLaws
from kvtiers.tiers.memory import MemoryStore, _Chunk


class TestMemory(StoreLaws):
    capacity = 40 * 6 * PAGE_BYTES

    def make(self, place, context):
        return MemoryStore(context, self.capacity)

    def peek(self, store, name):
        found = store._chunks.get(name)
        return found and found.header + found.payload

    def seed(self, store, name, record):
        if name in store._chunks:
            store._drop(name)
        store._chunks[name] = _Chunk(record[:PAGE_BYTES], record[PAGE_BYTES:], 0.0)
        store._used += len(record)


class TestMemoryTier(StoreTierLaws):
    store_laws = TestMemory
