from kvtiers.errors import Kind
from kvtiers.testing import StoreTierLaws
from kvtiers.tiers.base import Capabilities
from tests.laws.honest import HonestLaws, HonestStore


class TestHonest(HonestLaws):
    pass


class TestHonestTier(StoreTierLaws):
    store_laws = HonestLaws


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
