import pytest

pytest.register_assert_rewrite("tests.unit.tiers.tier_kit", "tests.unit.tiers.fs.fs_kit")
