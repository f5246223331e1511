"""An honest store to be sabotaged: plain, persistent and shared, with its disk in plain sight."""

import threading
from collections import OrderedDict

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.testing import StoreLaws
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry

DISKS: dict = {}
"""What lies at each place: records by namespace and key, least recently used first."""


class HonestStore:
    capabilities = Capabilities(persistent=True, shared=True)
    max_chunks = 48

    def __init__(self, place, context):
        self.context = context
        self.lock = threading.Lock()
        self.disk = DISKS.setdefault(str(place), OrderedDict())
        self.closed = False

    def contains(self, keys):
        self.refuse_if_closed()
        return [self.place_of(key) in self.disk for key in keys]

    def write(self, items):
        self.refuse_if_closed()
        return [self.write_one(item) for item in items]

    def write_one(self, item):
        self.context.wall_clock()
        whole = self.pack(item)
        with self.lock:
            evicted = self.put(self.place_of(item.key), whole)
        if evicted:
            self.context.on_removed(evicted, Reason.EVICTED)
        return

    def pack(self, item):
        return record.pack(item.key, self.context.namespace.id, item.view) + bytes(item.view)

    def put(self, where, whole):
        evicted = []
        if where not in self.disk:
            while len(self.disk) >= self.max_chunks:
                evicted.append(self.disk.popitem(last=False)[0][1])
            self.disk[where] = whole
        return evicted

    def read(self, items):
        self.refuse_if_closed()
        return [self.read_one(item) for item in items]

    def read_one(self, item):
        whole = self.disk.get(self.place_of(item.key))
        if whole is None:
            self.context.on_removed([item.key], Reason.VANISHED)
            return self.error("gone", Kind.VANISHED)
        payload = whole[PAGE_BYTES:]
        if len(payload) == item.view.nbytes:
            self.fill(item, payload)
        error = self.verify(whole, item)
        if error is not None:
            self.drop_damaged(item.key)
        return error

    def fill(self, item, payload):
        item.view[:] = payload

    def verify(self, whole, item):
        return record.verify(whole[:PAGE_BYTES], item.key, self.context.namespace.id, item.view)

    def drop_damaged(self, key):
        with self.lock:
            self.disk.pop(self.place_of(key), None)
        self.context.on_removed([key], Reason.CORRUPT)

    def delete(self, keys):
        self.refuse_if_closed()
        with self.lock:
            for key in keys:
                self.disk.pop(self.place_of(key), None)

    def scan(self):
        self.refuse_if_closed()
        ours = self.context.namespace.id
        return [Entry(k, len(v), 0.0) for (n, k), v in list(self.disk.items()) if n == ours]

    def touch(self, keys):
        self.refuse_if_closed()

    def close(self):
        self.closed = True

    def place_of(self, key):
        return self.context.namespace.id, key

    def refuse_if_closed(self):
        if self.closed:
            raise self.error("closed", Kind.CLOSED)

    def error(self, what, kind):
        return KVTiersError(what, kind=kind)


class HonestLaws(StoreLaws):
    """The laws on the honest store, or on what ``store_type`` names."""

    store_type = HonestStore

    def make(self, place, context):
        return self.store_type(place, context)

    def peek(self, store, name):
        return store.disk.get(store.place_of(name))

    def seed(self, store, name, record):
        store.disk[store.place_of(name)] = record
