from kvtiers.errors import Kind
from kvtiers.testing import StoreTierLaws
from kvtiers.tiers.base import Capabilities
from tests.laws.honest import HonestLaws, HonestStore
from tests.laws.plain_tier import PlainLaws


class TestHonest(HonestLaws):
    pass


class TestHonestTier(StoreTierLaws):
    store_laws = HonestLaws


class TestPlainTier(PlainLaws):
    pass


class ModestStore(HonestStore):
    """Says that it can neither delete nor list, and keeps its word."""

    capabilities = Capabilities(persistent=True, shared=True, delete=False, scan=False)

    def delete(self, keys):
        self.refuse_if_closed()
        raise self.error("it cannot delete", Kind.UNSUPPORTED)

    def scan(self):
        self.refuse_if_closed()
        raise self.error("it cannot list", Kind.UNSUPPORTED)


class TestModest(HonestLaws):
    store_type = ModestStore


class TestModestTier(StoreTierLaws):
    store_laws = TestModest


class LonelyStore(HonestStore):
    """Is nobody else's while it is open, and refuses whoever comes."""

    capabilities = Capabilities(persistent=True, shared=False)
    owned = set()

    def __init__(self, place, context):
        super().__init__(place, context)
        self.owner = str(place), context.namespace.id
        if self.owner in self.owned:
            raise self.error("somebody else's", Kind.IO)
        self.owned.add(self.owner)

    def close(self):
        super().close()
        self.owned.discard(self.owner)


class TestLonely(HonestLaws):
    store_type = LonelyStore


class TestLonelyTier(StoreTierLaws):
    store_laws = TestLonely
