from dataclasses import dataclass
from typing import Any, Literal

import pytest

from kvtiers.errors import ConfigError
from kvtiers.tiers.options import RunnerOptions, located, parse, require


@dataclass(frozen=True, kw_only=True)
class Options(RunnerOptions):
    root_dir: str
    capacity_bytes: int | None = None
    mode: Literal["auto", "on"] = "auto"
    fsync: bool = False


def complaint(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Options, {"root_dir": "/x", **values})
    return str(located(caught.value, "secondary_tiers[1]"))


def test_good_values() -> None:
    options = parse(
        Options,
        {"root_dir": "/x", "capacity_bytes": 1 << 40, "mode": "on", "load_deadline_s": 3},
    )
    assert options == Options(root_dir="/x", capacity_bytes=1 << 40, mode="on", load_deadline_s=3)


def test_unknown_key_names_the_nearest() -> None:
    assert complaint(root_dri="/y") == (
        "secondary_tiers[1].root_dri is not a known option: did you mean root_dir?"
    )
    assert "the options are n_read_threads, " in complaint(zzz=1)


def test_missing_key() -> None:
    with pytest.raises(ConfigError, match="root_dir is missing: give a string"):
        parse(Options, {})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("root_dir", 3, "a string"),
        ("capacity_bytes", 1.5, "a whole number of bytes or null"),
        ("capacity_bytes", "10GB", "a whole number of bytes or null"),
        ("capacity_bytes", True, "a whole number of bytes or null"),
        ("n_read_threads", False, "an integer"),
        ("mode", "off", '"auto" or "on"'),
        ("fsync", 1, "true or false"),
        ("load_deadline_s", True, "a number"),
        ("load_deadline_s", float("nan"), "a number"),
        ("load_deadline_s", float("inf"), "a number"),
    ],
)
def test_wrong_types_name_the_key_and_what_is_expected(key: str, value: Any, expected: str) -> None:
    assert complaint(**{key: value}) == f"secondary_tiers[1].{key} is {value!r}: give {expected}"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("n_read_threads", 0, "at least 1"),
        ("n_write_threads", -2, "at least 1"),
        ("load_deadline_s", 0, "above 0"),
        ("negative_ttl_s", -1.0, "0 or more"),
        ("max_queued_store_bytes", -1, "0 or more"),
        ("breaker_failures", 0, "at least 1"),
    ],
)
def test_values_out_of_range(key: str, value: Any, expected: str) -> None:
    assert complaint(**{key: value}) == f"secondary_tiers[1].{key} is {value:g}: give {expected}"


def test_a_value_that_may_hold_credentials_is_not_shown() -> None:
    assert complaint(mode=["hunter2"]) == 'secondary_tiers[1].mode is a list: give "auto" or "on"'
    assert "hunter2" not in complaint(root_dir={"secret": "hunter2"})


def test_numbers_are_read_as_the_settings_of_the_engine_are() -> None:
    options = parse(Options, {"root_dir": "/x", "capacity_bytes": 1e12, "load_deadline_s": 3})
    assert options.capacity_bytes == 10**12
    assert type(options.capacity_bytes) is int
    assert type(options.load_deadline_s) is float


def test_an_error_without_a_key_gets_the_place_in_front() -> None:
    assert str(located(ConfigError("no luck"), "secondary_tiers[0]")) == (
        "secondary_tiers[0]: no luck"
    )
    require(True, "key", "is fine")


@pytest.mark.parametrize("key", ["n_read_threads", "n_write_threads"])
def test_threads_are_bounded(key: str) -> None:
    assert complaint(**{key: 257}) == f"secondary_tiers[1].{key} is 257: give at most 256"


@pytest.mark.parametrize("key", ["capacity_bytes", "n_read_threads", "load_deadline_s"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["big", "low", "huge"])
def test_numbers_that_no_machine_word_holds_are_refused(key: str, value: int) -> None:
    assert complaint(**{key: value}) == (
        f"secondary_tiers[1].{key} is too large: give less than 2**63"
    )
