from dataclasses import MISSING, dataclass, replace
from typing import Any, Literal

import pytest

from kvtiers.errors import ConfigError
from kvtiers.options import (
    Option,
    Reader,
    Unfit,
    Wording,
    nearest,
    not_an_option,
    option,
    options_of,
    read_options,
    read_value,
    reader_of,
    refuse_unknown,
    table,
    where,
    whole,
)

WORDING = Wording(
    unknown="{key} is new; {hint}",
    near="try {near}",
    others="there are {known}",
    missing="{key} is not there; give {expects}",
    unfit="{key} is {value}; give {expects}",
)
EVEN = Reader("an even number", where(whole, lambda n: n % 2 == 0))


@dataclass(frozen=True)
class Some:
    folder: str
    pairs: int = option(EVEN, "How many | pairs of ``x``.", 2)
    mode: Literal["a", "b"] | None = None
    fast: bool = False
    noted: tuple[str, ...] = not_an_option(())


OPTIONS = options_of(Some)


def read(**values: Any) -> Some:
    refuse_unknown(values, OPTIONS, WORDING)
    return Some(**read_options(OPTIONS, values, WORDING))


def test_options_are_the_fields_that_users_may_set() -> None:
    assert list(OPTIONS) == ["folder", "pairs", "mode", "fast"]
    assert OPTIONS["folder"].default is MISSING
    assert OPTIONS["pairs"].reader is EVEN
    assert OPTIONS["mode"].reader.expects == '"a" or "b" or null'


def test_values_are_read() -> None:
    assert read(folder="x", pairs=4.0, mode="b") == Some("x", 4, "b")
    assert read(folder="", mode=None) == Some("")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"foldr": 1}, "foldr is new; try folder"),
        ({"zzz": 1}, "zzz is new; there are folder, pairs, mode, fast"),
        ({"noted": ()}, "noted is new; there are folder, pairs, mode, fast"),
        ({}, "folder is not there; give a string"),
        ({"folder": 3}, "folder is 3; give a string"),
        ({"folder": "x", "pairs": 3}, "pairs is 3; give an even number"),
        ({"folder": "x", "pairs": True}, "pairs is True; give an even number"),
        ({"folder": "x", "mode": "{key}"}, 'mode is \'{key}\'; give "a" or "b" or null'),
        ({"folder": ["secret"]}, "folder is a list; give a string"),
        ({"folder": {"secret": 1}}, "folder is a mapping; give a string"),
    ],
)
def test_refusals_are_in_the_callers_words_and_name_the_key(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**values)
    assert str(caught.value) == sentence
    assert caught.value.context == {"key": sentence.split()[0]}


def test_a_refusal_does_not_drag_along_how_it_was_found() -> None:
    with pytest.raises(ConfigError) as caught:
        read_value("n", EVEN, 1, WORDING)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [0, -3, 1e12], [1.5, True, "1", None, float("inf"), float("nan")]),
        (float, [1, -0.5], [True, "1", None, float("inf"), float("nan"), 10**400]),
        (str, ["", "x"], [b"x", 1, None]),
        (bool, [True, False], [0, 1, "true", None]),
        (int | None, [None, 5], [False, "5"]),
        (Literal["on", "off"], ["on"], ["ON", True, ["on"]]),
    ],
)
def test_types_say_what_fits(hint: Any, good: list[Any], bad: list[Any]) -> None:
    reader = reader_of(hint)
    for value in good:
        assert reader.read(value) == value
    for value in bad:
        with pytest.raises(Unfit):
            reader.read(value)


def test_a_type_that_nobody_can_read_is_an_error_of_the_programmer() -> None:
    with pytest.raises(TypeError, match="needs a Reader of its own"):
        reader_of(dict[str, int])


def test_the_nearest_word_whatever_its_case() -> None:
    assert nearest("LUR", ("lru", "arc")) == "lru"
    assert nearest("belady", ("lru", "arc")) is None


def test_the_table() -> None:
    rows = table([OPTIONS["pairs"], OPTIONS["folder"], replace(OPTIONS["fast"], doc="Fast.")])
    assert rows.splitlines()[2:] == [
        "| `pairs` | an even number | 2 | How many \\| pairs of `x`. |",
        "| `folder` | a string | required |  |",
        "| `fast` | true or false | false | Fast. |",
    ]
    assert "| not set |" in table([OPTIONS["mode"]])
    assert "| none |" in table([Option("list", EVEN, ())])
