import threading

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
    together.close()


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
