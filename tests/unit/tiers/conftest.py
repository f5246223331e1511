import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tier_kit, also for the folders below
pytest.register_assert_rewrite("tier_kit", "fs_kit")  # its asserts hold under python -O too
