"""The laws against a real S3 server. Chunks of the laws are small: packed, and then not packed."""

import hashlib

import pytest

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import KVTiersError
from kvtiers.testing import StoreLaws, StoreTierLaws
from kvtiers.testing.values import LAYOUT
from kvtiers.tiers.obj import ObjOptions, client_of, packs
from kvtiers.tiers.obj.packs import Packed
from kvtiers.tiers.obj.store import ObjStore


class Server:
    """Where the laws are tried; a bucket for all, a prefix for each place."""

    endpoint: str
    buckets: dict[str, str] = {}
    transport: str

    @classmethod
    def use(cls, s3, transport="obstore"):
        cls.endpoint, cls.transport = s3.endpoint, transport
        if s3.endpoint not in cls.buckets:
            cls.buckets[s3.endpoint] = s3.new_bucket()

    @classmethod
    def client(cls, place):
        prefix = hashlib.sha256(str(place).encode()).hexdigest()
        url = f"s3://{cls.buckets[cls.endpoint]}/{prefix}"
        options = ObjOptions(
            url=url, endpoint=cls.endpoint, allow_http=True, transport=cls.transport
        )
        return client_of(options)


@pytest.fixture(autouse=True)
def server(s3):
    Server.use(s3)


class TestObjects(StoreLaws):
    def make(self, place, context):
        return ObjStore(context, Server.client(place), pack_below_bytes=0)

    def peek(self, store, name):
        try:
            return bytes(store._client.get(store._name(name), 1 << 20))
        except KVTiersError:
            return None

    def seed(self, store, name, record):
        store._client.put(store._name(name), [record])


class TestPacks(StoreLaws):
    def make(self, place, context):
        return ObjStore(context, Server.client(place))

    def peek(self, store, name):
        (place,) = store._shelf.find([name])
        return place and bytes(store._shelf.read(place.pack, [place])[0])

    def seed(self, store, name, record):
        """Write its pack anew with ``record`` at the end, where it can be short or long."""
        store._shelf.refresh(store._together.run)
        (place,) = store._shelf.find([name])
        pack = place.pack if place else store._shelf._name(1)
        with store._shelf._lock:
            held = store._shelf._index.held_by(pack)
        others = {key: self.peek(store, key) for key, _ in held if key != name}
        entries = packs.lay_out(list(others), [len(r) - PAGE_BYTES for r in others.values()])
        at = PAGE_BYTES + sum(map(len, others.values()))
        claimed = max(len(record), PAGE_BYTES + LAYOUT.chunk_bytes(name))
        front = packs.pack_front(store._id, [*entries, Packed(name, at, claimed)])
        store._client.put(pack.below(store._id), [front, *others.values(), record])
        store._shelf.lost(pack)


class TestBoundedObjects(TestObjects):
    def make(self, place, context):
        client = Server.client(place)
        return ObjStore(context, client, capacity_bytes=64 << 20, pack_below_bytes=0)


class TestBoundedPacks(TestPacks):
    def make(self, place, context):
        return ObjStore(context, Server.client(place), capacity_bytes=64 << 20)


class TestObjectsTier(StoreTierLaws):
    store_laws = TestObjects


class TestPacksTier(StoreTierLaws):
    store_laws = TestPacks
