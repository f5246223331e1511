import pytest

pytest.register_assert_rewrite(
    "tests.crash", "tests.laws", "tests.model", "tests.servers", "tests.unit"
)  # also under python -O
