"""A process dies at its n-th write, or any other call: nothing is lost or torn.

For every n where the stride is 1. Else n is sampled: every stride-th, from an offset that the seed
chooses, the same in every run.
"""

import random
from pathlib import Path

import pytest

from tests.crash.crash_kit import running

LEAST_LIVES = 4

FILES = ["open", "mkdir", "rename", "replace", "unlink", "rmdir"]
OPENING = [*FILES, "pwrite", "pwritev", "ftruncate", "posix_fallocate"]
WRITES = ["pwritev"]
ALL = [*OPENING, "utime"]

CASES = [
    ("log", "life", "before", 1, WRITES),
    ("log", "life", "middle", 1, WRITES),
    ("log", "life", "after", 3, WRITES),
    ("log", "life", "after", 7, ALL),
    ("log", "opening", "before", 1, OPENING),
    ("log", "opening", "middle", 1, WRITES),
    ("files", "life", "middle", 3, WRITES),
    ("files", "life", "before", 37, ALL),
    ("files", "opening", "before", 1, OPENING),
]


@pytest.mark.parametrize(("layout", "what", "how", "stride", "calls"), CASES)
def test_whatever_call_is_the_last_one(
    layout: str, what: str, how: str, stride: int, calls: list[str], tmp_path: Path
) -> None:
    first = random.Random(f"{layout} {what} {how} {len(calls)}").randint(1, stride)
    arguments = (layout, tmp_path, what, how, first, stride, *calls)
    with running("tests.crash.nth_call", *arguments) as child:
        said, _ = child.communicate(timeout=100)
    assert child.returncode == 0, "what went wrong stands above"
    assert int(said) >= LEAST_LIVES, "it died of next to nothing"
