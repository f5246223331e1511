import pytest

pytest.register_assert_rewrite("model.simulation", "model.sim_tier")  # also under python -O
