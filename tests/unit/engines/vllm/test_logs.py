import contextlib
import copy
import logging
import pickle

import pytest

from kvtiers.engines.vllm.logs import saying_refusals
from kvtiers.errors import ConfigError, Kind, KVTiersError, Retry


@pytest.fixture
def lines():
    found = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("kvtiers").addHandler(handler)
    yield found
    logging.getLogger("kvtiers").removeHandler(handler)


def refuse(error) -> None:
    with contextlib.suppress(KVTiersError), saying_refusals(), saying_refusals():
        raise error


def test_a_refusal_is_said_once_also_in_the_process_to_which_it_travels(lines) -> None:
    error = ConfigError("root_dir is missing", key="root_dir")
    refuse(error)
    there = pickle.loads(pickle.dumps(error))
    refuse(there)
    assert lines == ["root_dir is missing"]


def test_equal_words_of_another_refusal_are_said_again(lines) -> None:
    refuse(ConfigError("root_dir is missing"))
    refuse(ConfigError("root_dir is missing"))
    assert len(lines) == 2


def test_nothing_is_put_into_the_context_of_an_error(lines) -> None:
    error = ConfigError("root_dir is missing", key="root_dir")
    refuse(error)
    assert error.context == {"key": "root_dir"}


@pytest.mark.parametrize("move", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no such key", key="root_dri", where="secondary_tiers[0]"),
        KVTiersError(
            "gone",
            kind=Kind.VANISHED,
            retry=Retry.EXHAUSTED,
            operation="read",
            context={"path": "/x"},
        ),
    ],
)
def test_an_error_is_the_same_after_its_way_between_processes(move, error) -> None:
    there = move(error)
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)
    assert repr(there) == repr(error)
