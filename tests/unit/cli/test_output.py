"""Sizes, ages and text as people read them."""

import pytest

from kvtiers.cli.commands.gc import parse_age
from kvtiers.cli.output import age, clean, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 63, "8.0 EiB"),
        (1 << 80, "1048576.0 EiB"),
    ],
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59, "59 s"), (90, "1.5 min"), (7200, "2 h"), (1e6, "11.6 d")],
)
def test_ages(seconds, text):
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30min", 1800),
        ("30m", 1800),
        ("12h", 43200),
        ("1.5d", 129600),
        ("2w", 1209600),
    ],
)
def test_ages_as_they_are_written(text, seconds):
    assert parse_age("--older-than", text) == seconds


def test_text_is_printable_and_of_one_line():
    assert clean("a\x1b[1m\n\u202eb\udc80 \u00e9") == "a\\x1b[1m\\n\\u202eb\\udc80 \u00e9"
