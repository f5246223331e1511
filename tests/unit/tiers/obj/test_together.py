import subprocess
import sys
import threading

import pytest

from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.obj.together import Together, one_by_one


def failing():
    raise KVTiersError("no", kind=Kind.IO)


def test_what_each_returned_in_order():
    together = Together(3, "test")
    acts = [lambda n=n: n for n in range(10)]
    acts[4] = failing
    for run in (together.run, one_by_one):
        results = run(acts)
        assert results[:4] + results[5:] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert results[4].kind is Kind.IO
        assert results[4].__traceback__ is None
    assert together.run([]) == []
    together.close()


def test_no_more_than_so_many_at_once():
    most, running, seen = 3, threading.Semaphore(3), []
    gathered = threading.Barrier(most)

    def act():
        assert running.acquire(blocking=False), "more than the bound"
        gathered.wait(20)  # as many as may are here at once
        running.release()
        seen.append(1)

    together = Together(most, "test")
    assert together.run([act] * (4 * most)) == [None] * (4 * most)
    assert len(seen) == 4 * most
    together.check()
    together.close()


@pytest.mark.parametrize("raised", [MemoryError("none left"), BaseException("a panic")])
def test_whatever_one_raises_all_have_ended_when_it_returns(raised):
    together = Together(2, "test")
    let_go, ended = threading.Event(), []

    def bad():
        let_go.set()
        raise raised

    def slow():
        assert let_go.wait(20)
        ended.append(1)
        return "done"

    results = together.run([bad, slow, bad])
    assert (ended, results[1]) == ([1], "done")
    assert [results[0].kind, results[2].kind] == [Kind.BROKEN] * 2
    assert one_by_one([bad])[0].kind is Kind.BROKEN
    together.close()


def test_what_is_begun_takes_no_thread_from_requests():
    together = Together(1, "test")
    begun, let_go = threading.Event(), threading.Event()

    def long():
        begun.set()
        let_go.wait(20)

    together.begin(long)
    assert begun.wait(20)
    assert together.run([lambda: 1, lambda: 2]) == [1, 2]
    let_go.set()
    together.close()


def test_where_no_thread_can_be_started_the_caller_does_it():
    def refused(target, name):
        raise RuntimeError("can't start new thread")

    together, done = Together(2, "test", refused), []
    assert together.run([threading.current_thread] * 2) == [threading.current_thread()] * 2
    together.begin(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]
    together.close()


def test_its_check_can_fail():
    together = Together(1, "test")
    together._threads = [threading.current_thread()] * 2
    with pytest.raises(AssertionError, match="more threads"):
        together.check()


def test_a_request_that_never_ends_does_not_keep_the_process_alive():
    code = (
        "import threading; from kvtiers.tiers.obj.together import Together\n"
        "t, n = Together(2, 'test'), threading.Barrier(3)\n"
        "hang = lambda: (n.wait(20), threading.Event().wait())\n"
        "t.begin(hang)\n"
        "t.begin(lambda: t.run([hang, lambda: None]))\n"
        "n.wait(20)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_single_one_is_done_here():
    together = Together(1, "test")
    assert together.run([threading.current_thread]) == [threading.current_thread()]
    together.close()


def test_what_close_comes_before_is_not_done():
    together = Together(1, "test")
    begun, let_go, done = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        let_go.wait(20)
        return "done"

    results = []
    caller = threading.Thread(
        target=lambda: results.extend(together.run([first, lambda: done.append(1)]))
    )
    caller.start()
    assert begun.wait(20)
    closer = threading.Thread(target=together.close)
    closer.start()
    let_go.set()
    for thread in (closer, caller):
        thread.join(20)
    assert results[0] == "done"
    assert done or results[1].kind is Kind.CLOSED
    after = together.run([first, first])
    assert [error.kind for error in after] == [Kind.CLOSED] * 2
    together.begin(first)
    together.close()
