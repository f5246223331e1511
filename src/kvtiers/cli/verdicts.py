"""What a check of ``doctor`` ends with."""

from dataclasses import dataclass
from enum import Enum


class Grade(Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was found and, unless all is well, what to do."""

    name: str
    grade: Grade
    found: str
    remedy: str = ""
