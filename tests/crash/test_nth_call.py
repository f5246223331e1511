"""A process dies at its n-th write, or any other call, for every n: nothing is lost or torn."""

from pathlib import Path

import pytest

from tests.crash.crash_kit import spawn

FILES = ["open", "mkdir", "rename", "replace", "unlink", "rmdir"]
OPENING = [*FILES, "pwrite", "pwritev", "ftruncate", "posix_fallocate"]
WRITES = ["pwritev"]
ALL = [*OPENING, "utime"]

CASES = [
    ("log", "life", "before", 1, WRITES),
    ("log", "life", "middle", 1, WRITES),
    ("log", "life", "after", 3, WRITES),
    ("log", "life", "after", 13, ALL),
    ("log", "opening", "before", 1, OPENING),
    ("log", "opening", "middle", 1, WRITES),
    ("files", "life", "middle", 29, WRITES),
    ("files", "life", "before", 1009, ALL),
    ("files", "opening", "before", 1, OPENING),
]


@pytest.mark.parametrize(("layout", "what", "how", "stride", "calls"), CASES)
def test_whatever_call_is_the_last_one(
    layout: str, what: str, how: str, stride: int, calls: list[str], tmp_path: Path
) -> None:
    child = spawn("tests.crash.nth_call", layout, tmp_path, what, how, stride, *calls)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 0, "what went wrong stands above"
    assert int(said) > stride, "it died of nothing"
