"""The recorder: bounded, newest first, and safe to read while it is written."""

import sys
import threading
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvtiers.core.settled import MAX_RUNS
from kvtiers.events import PRIMARY, LookedUp, MissReason
from kvtiers.observe.requests import Recorder, weight
from tests.unit.observe.observer_kit import event, hits, misses
from tests.unit.tiers.tier_kit import key


def recorder(**bounds: int) -> Recorder:
    return Recorder(lambda: 5.0, **bounds)


def names(kept: Recorder) -> list[str]:
    return [record.event.request_id for record in kept.latest()]


def test_the_last_are_kept_newest_first() -> None:
    kept = recorder(max_requests=3)
    for name in "abcd":
        kept(event(name, hits(0, 1)))
    kept(LookedUp(PRIMARY, 1, 1))
    assert names(kept) == ["d", "c", "b"]
    assert [r.event.request_id for r in kept.latest(2)] == ["d", "c"]
    assert kept.latest(0) == []
    assert kept.latest(1)[0].settled_at == 5.0
    kept.check()
    assert repr(kept) == f"<Recorder 3 requests, about {3 * weight(event('d', hits(0, 1)))} bytes>"


@given(st.lists(st.integers(0, MAX_RUNS), max_size=60), st.integers(0, 60_000))
def test_bytes_are_bounded(sizes: list[int], bound: int) -> None:
    kept = recorder(max_requests=20, max_bytes=bound)
    for i, runs in enumerate(sizes):
        kept(event(f"r{i}", *(hits(2 * n, 1) for n in range(runs))))
        kept.check()
    assert names(kept) == [f"r{i}" for i in reversed(range(len(sizes)))][: len(kept.latest())]


def test_an_event_weighs_no_less_than_it_takes() -> None:
    why = ((PRIMARY, MissReason.ABSENT), ("1:fs", MissReason.ABSENT), ("2:obj", MissReason.FAILED))
    for runs in (0, 1, MAX_RUNS):
        kept = recorder(max_requests=1 << 20, max_bytes=1 << 40)
        tracemalloc.start()
        for i in range(100):
            chunks = [misses(2 * n, 1, *why)._replace(key=key(1000 * i + n)) for n in range(runs)]
            kept(event(f"request-{i:032}", *chunks))
        took, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert took <= kept._bytes, f"{runs} runs take {took}, said are {kept._bytes}"


def test_a_long_id_weighs_what_it_takes() -> None:
    assert weight(event("\N{GRINNING FACE}" * 1000)) > 4000


def test_what_a_client_was_told_is_found() -> None:
    kept = recorder()
    for name in ("cmpl-1-0-aaaa", "cmpl-12-0-bbbb", "chatcmpl-77-cccc", "cmpl-1-1-dddd", "77"):
        kept(event(name, hits(0, 1)))

    def found(wanted: str) -> list[str]:
        return [record.event.request_id for record in kept.find(wanted)]

    assert found("cmpl-1-0-aaaa") == ["cmpl-1-0-aaaa"]
    assert found("cmpl-1") == ["cmpl-1-1-dddd", "cmpl-1-0-aaaa"], "not cmpl-12"
    assert found("cmpl-12-") == ["cmpl-12-0-bbbb"]
    assert found("77") == ["77"], "an id that is one comes before one that begins with it"
    assert found("12-0") == ["cmpl-12-0-bbbb"], "an X-Request-Id has no kind before it"
    assert found("") == found("nobody") == []


def test_it_is_read_while_it_is_written() -> None:
    kept = recorder(max_requests=50)
    ended = threading.Event()
    problems: list[BaseException] = []

    def look() -> None:
        try:
            while not ended.is_set():
                kept.latest()
                kept.find("r1")
        except BaseException as e:
            problems.append(e)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    readers = [threading.Thread(target=look) for _ in range(3)]
    try:
        for reader in readers:
            reader.start()
        for i in range(3000):
            kept(event(f"r{i}", hits(0, 1)))
    finally:
        ended.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval)
    assert not problems
    assert names(kept)[0] == "r2999"
