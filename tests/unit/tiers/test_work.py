from collections.abc import Callable
from typing import Any

import pytest

from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.base import Item, JobKind
from kvtiers.tiers.work import ask, transfer
from tests.unit.tiers.tier_kit import ScriptedStore, error, filled, key

ITEMS = [Item(key(n), filled(n)) for n in (1, 2, 3)]


def raise_(e: BaseException) -> Callable[[Any], Any]:
    def act(_: Any) -> Any:
        raise e

    return act


BROKEN_RESULTS = [
    lambda _: None,
    lambda _: [],
    lambda _: [None] * 4,
    lambda _: "abc",
    lambda _: {1: None},
    raise_(ZeroDivisionError("oops")),
    raise_(SystemExit()),
    raise_(OSError(5, "io")),
]


@pytest.mark.parametrize("answer", BROKEN_RESULTS)
@pytest.mark.parametrize(("kind", "method"), [(JobKind.STORE, "write"), (JobKind.LOAD, "read")])
def test_broken_transfers_fail_every_item(answer: Any, kind: JobKind, method: str) -> None:
    store = ScriptedStore()
    store.answers[method] = answer
    results = transfer(store, kind, ITEMS, 2, lambda: False)
    assert [e and e.kind for e in results] == [Kind.BROKEN] * 3
    assert all(method in str(e) for e in results)


def test_one_bad_result_is_the_fault_of_that_item_only() -> None:
    store = ScriptedStore()
    store.answers["write"] = lambda _: [None, False, error(Kind.CORRUPT)]
    results = transfer(store, JobKind.STORE, ITEMS, 0, lambda: False)
    assert [e and e.kind for e in results] == [None, Kind.BROKEN, Kind.CORRUPT]


def test_a_raised_error_of_ours_keeps_its_kind() -> None:
    store = ScriptedStore()
    store.answers["read"] = raise_(error(Kind.CLOSED))
    results = transfer(store, JobKind.LOAD, ITEMS, 0, lambda: False)
    assert [e and e.kind for e in results] == [Kind.CLOSED] * 3


@pytest.mark.parametrize("answer", [*BROKEN_RESULTS, lambda _: [1, 0, 1]])
def test_broken_contains_is_no_answer(answer: Any) -> None:
    store = ScriptedStore()
    store.answers["contains"] = answer
    result = ask(store, [i.key for i in ITEMS])
    assert isinstance(result, KVTiersError)
    assert result.kind is Kind.BROKEN


def test_only_passing_errors_are_tried_again_and_only_those_items() -> None:
    store = ScriptedStore()
    store.answers["write"] = lambda items: [
        error(Kind.IO, Retry.MAY) if i.key == key(2) else None for i in items
    ]
    results = transfer(store, JobKind.STORE, ITEMS, 2, lambda: False)
    assert store.called("write") == [(key(1), key(2), key(3)), (key(2),), (key(2),)]
    failed = results[1]
    assert failed is not None
    assert failed.retry is Retry.EXHAUSTED
    assert "tried again" in str(failed)
    assert results[0] is results[2] is None


def test_a_retry_that_works_is_a_success() -> None:
    store = ScriptedStore()
    answers = iter([[error(Kind.IO, Retry.MAY)] * 3, [None] * 3])
    store.answers["read"] = lambda _: next(answers)
    assert transfer(store, JobKind.LOAD, ITEMS, 2, lambda: False) == [None] * 3


@pytest.mark.parametrize(
    "answer", [error(Kind.FULL, Retry.MAY), error(Kind.IO), error(Kind.IO, Retry.EXHAUSTED)]
)
def test_what_may_not_be_retried_is_not(answer: KVTiersError) -> None:
    store = ScriptedStore()
    store.answers["write"] = lambda items: [answer] * len(items)
    assert transfer(store, JobKind.STORE, ITEMS, 2, lambda: False) == [answer] * 3
    assert len(store.calls) == 1


def test_no_retry_after_the_deadline() -> None:
    store = ScriptedStore()
    store.answers["write"] = lambda items: [error(Kind.IO, Retry.MAY)] * len(items)
    transfer(store, JobKind.STORE, ITEMS, 2, lambda: True)
    assert len(store.calls) == 1
