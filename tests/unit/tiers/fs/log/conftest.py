import pytest

from tests.unit.tiers.fs.log.log_kit import Log


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "kv")
