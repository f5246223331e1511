from pathlib import Path

import pytest

from tests.unit.tiers.fs.fs_kit import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")
