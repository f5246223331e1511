from pathlib import Path

from kvtiers.chunks import PAGE_BYTES
from kvtiers.testing import StoreLaws, StoreTierLaws
from kvtiers.tiers.fs.files import FilesStore


class TestFs(StoreLaws):
    def make(self, place, context):
        return FilesStore(context, str(place / "kv"), capacity_bytes=64 << 20)

    def peek(self, store, name):
        path = Path(store._path(name))
        return path.read_bytes() if path.exists() else None

    def seed(self, store, name, record):
        path = Path(store._path(name))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(record)


class TestBoundedFs(TestFs):
    def make(self, place, context):
        return FilesStore(context, str(place / "kv"), capacity_bytes=254 * PAGE_BYTES)


class TestExternalFs(TestFs):
    def make(self, place, context):
        return FilesStore(context, str(place / "kv"), eviction="external")


class TestBufferedFs(TestFs):
    def make(self, place, context):
        root = str(place / "kv")
        return FilesStore(context, root, capacity_bytes=64 << 20, direct_io="off")


class TestDurableFs(TestFs):
    def make(self, place, context):
        return FilesStore(context, str(place / "kv"), capacity_bytes=64 << 20, fsync=True)


class TestFsTier(StoreTierLaws):
    store_laws = TestFs


class TestExternalFsTier(StoreTierLaws):
    store_laws = TestExternalFs
