"""The laws hold on wrapped stores: a wrapper that is told nothing changes nothing."""

from kvtiers.testing import FaultyStore, GatedStore, StoreTierLaws
from tests.laws.test_fs import TestFs as FsLaws
from tests.laws.test_memory import TestMemory as MemoryLaws


class Wrapped:
    """Puts ``wrapper`` around the store that the laws below make."""

    def make(self, place, context):
        return self.wrapper(super().make(place, context))

    def peek(self, store, name):
        return super().peek(store.inner, name)

    def seed(self, store, name, record):
        super().seed(store.inner, name, record)


class TestFaultyMemory(Wrapped, MemoryLaws):
    wrapper = FaultyStore


class TestFaultyFs(Wrapped, FsLaws):
    wrapper = FaultyStore


class TestGatedMemory(Wrapped, MemoryLaws):
    wrapper = GatedStore


class TestFaultyMemoryTier(StoreTierLaws):
    store_laws = TestFaultyMemory


del FsLaws, MemoryLaws  # or pytest would collect them here again
