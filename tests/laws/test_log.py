from kvtiers.chunks import PAGE_BYTES
from kvtiers.testing import StoreLaws, StoreTierLaws
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.fs.log import format as fmt


class TestLog(StoreLaws):
    capacity_bytes = 4 << 20

    def make(self, place, context):
        return LogStore(context, str(place / "kv"), capacity_bytes=self.capacity_bytes)

    def peek(self, store, name):
        at = store._index.find(name)
        if at is None:
            return None
        found = store._files.read_pages(at.segment, at.page, 1 + at.pages)
        return None if found is None else bytes(found)

    def seed(self, store, name, record):
        """What is shorter than the place is followed by bytes that were not there."""
        at = store._index.find(name)
        if at is None:
            count = fmt.pages_of(len(record))
            segment, (row,) = store._allocate([(name, count - 1)])
            segment.wrote([row])
            store._index.put(segment.number, [row])
            store._end_write(segment)
            at = store._index.find(name)
        buffer = store._files.read_pages(at.segment, at.page, 1 + at.pages)
        kept = min(len(record), len(buffer))
        buffer[:kept] = record[:kept]
        buffer[kept:] = bytes(byte ^ 0xFF for byte in buffer[kept:])
        store._files.write(at.segment, at.page, [buffer])


class TestBufferedLog(TestLog):
    def make(self, place, context):
        return LogStore(
            context,
            str(place / "kv"),
            capacity_bytes=self.capacity_bytes,
            direct_io="off",
            fsync=True,
        )


class TestSmallLog(TestLog):
    capacity_bytes = 400 * PAGE_BYTES


class TestLogTier(StoreTierLaws):
    store_laws = TestLog
