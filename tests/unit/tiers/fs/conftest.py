from pathlib import Path

import pytest

from tests.unit.tiers.fs.fs_kit import Folder
from tests.unit.tiers.fs.log.log_kit import Log


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "kv")
