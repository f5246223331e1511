import struct

from kvtiers.chunks import PAGE_BYTES
from kvtiers.testing import StoreLaws, StoreTierLaws
from kvtiers.tiers.fs.log import LogStore

CHECKSUM = struct.Struct("<Q")


class TestLog(StoreLaws):
    """The record of a chunk is the checksum of its row, and its payload in whole pages."""

    capacity_bytes = 4 << 20

    def make(self, place, context):
        return LogStore(context, str(place / "kv"), capacity_bytes=self.capacity_bytes)

    def peek(self, store, name):
        core = store._core
        at = core.index.find(name)
        if at is None:
            return None
        return CHECKSUM.pack(at.checksum) + core.files.read_pages(at.segment, at.page, at.pages)

    def seed(self, store, name, record):
        """What is shorter than its place is followed by bytes that were not there before."""
        core = store._core
        if core.index.find(name) is None:
            pages = max(1, (len(record) - CHECKSUM.size) // PAGE_BYTES)
            segment, run = store._roller.make_room([(name, pages * PAGE_BYTES)])
            assert core.append(segment, run, [memoryview(bytes(pages * PAGE_BYTES))]) is None
        at = core.index.find(name)
        whole = bytearray(self.peek(store, name))
        kept = min(len(record), len(whole))
        whole[:kept] = record[:kept]
        whole[kept:] = bytes(byte ^ 0xFF for byte in whole[kept:])
        core.files.write_pages(at.segment, at.page, bytes(whole[CHECKSUM.size :]))
        (checksum,) = CHECKSUM.unpack_from(whole)
        row = (name, at.page, at.pages * PAGE_BYTES, checksum)
        core.index.put(at.segment, core.pool.segments[at.segment].sequence, [row])


class TestBufferedLog(TestLog):
    def make(self, place, context):
        return LogStore(
            context,
            str(place / "kv"),
            capacity_bytes=self.capacity_bytes,
            direct_io="off",
            fsync=True,
        )


class TestDurableLog(TestLog):
    def make(self, place, context):
        root = str(place / "kv")
        return LogStore(context, root, capacity_bytes=self.capacity_bytes, fsync=True)


class TestSmallLog(TestLog):
    capacity_bytes = 400 * PAGE_BYTES


class TestLogTier(StoreTierLaws):
    store_laws = TestLog


class TestSmallLogTier(StoreTierLaws):
    store_laws = TestSmallLog
