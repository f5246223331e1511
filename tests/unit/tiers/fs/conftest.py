import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fs_kit import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")
