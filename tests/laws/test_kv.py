import hashlib

from kvtiers.testing import StoreLaws, StoreTierLaws
from kvtiers.tiers.kv import KvOptions, build
from tests.servers import valkey


class TestKv(StoreLaws):
    """A place is a prefix of one server that all tests share."""

    options = {}

    def make(self, place, context):
        prefix = "laws-" + hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return build(context, KvOptions(url=self.url(), prefix=prefix, **self.options))

    def url(self):
        return valkey.shared().url

    def peek(self, store, name):
        with valkey.shared().admin() as client:
            return client.get(store._names.of(name))

    def seed(self, store, name, record):
        with valkey.shared().admin() as client:
            client.set(store._names.of(name), record)


class TestKvThroughASocket(TestKv):
    def url(self):
        return f"unix://{valkey.shared().socket}"


class TestExpiringKv(TestKv):
    options = {"ttl_s": 600, "max_batch_bytes": 1}


class TestKvOnACluster(TestKv):
    """Of three servers, each with a part of every call."""

    def url(self):
        return valkey.shared_cluster().url

    def peek(self, store, name):
        with valkey.shared_cluster().admin() as client:
            return client.get(store._names.of(name))

    def seed(self, store, name, record):
        with valkey.shared_cluster().admin() as client:
            client.set(store._names.of(name), record)


class TestKvTier(StoreTierLaws):
    store_laws = TestKv
