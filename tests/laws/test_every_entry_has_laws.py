"""Nothing is built in that is not held to the laws."""

import pytest

from kvtiers.host.policies import BUILT_IN
from kvtiers.testing import PolicyLaws, StoreLaws, StoreTierLaws
from kvtiers.testing.bench import Environment
from kvtiers.testing.values import NAMESPACE
from kvtiers.tiers import TIER_TYPES, TierType
from tests.laws import test_fs, test_kv, test_memory, test_obj, test_policies

MODULES = (test_fs, test_kv, test_memory, test_obj, test_policies)


def laws_classes(family):
    found = [v for module in MODULES for n, v in vars(module).items() if n.startswith("Test")]
    return [cls for cls in found if issubclass(cls, family)]


STORES = sorted(name for name, tier in TIER_TYPES.items() if isinstance(tier, TierType))


@pytest.mark.parametrize("name", STORES)
def test_every_built_in_tier_has_laws_for_its_store_and_for_its_tier(name, tmp_path, s3):
    test_obj.Server.use(s3)
    module = TIER_TYPES[name].build.__module__
    stores = [
        cls
        for cls in laws_classes(StoreLaws)
        if of_module(cls().make(tmp_path, Environment(NAMESPACE).context()), module)
    ]
    assert stores, f"write tests/laws/test_{name}.py: a class with StoreLaws"
    tiers = [cls for cls in laws_classes(StoreTierLaws) if cls.store_laws in stores]
    assert tiers, f"add a class with StoreTierLaws to the laws of {name}"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_policy_has_laws(name):
    assert BUILT_IN[name] in [type(cls().make(1)) for cls in laws_classes(PolicyLaws)]


def of_module(store, module):
    store.close()
    return type(store).__module__.startswith(module)
