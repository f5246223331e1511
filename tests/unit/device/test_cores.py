import multiprocessing
import os
import threading

import pytest

from kvtiers.device.cores import allowed_cores, copy_threads, use_allowed_cores


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (8, 8, 1), (16, 1, 2), (16, 2, 1), (64, 2, 4), (256, 2, 4)],
)
def test_one_thread_for_eight_cores_of_a_rank(cores, ranks, threads):
    assert copy_threads(cores, ranks) == threads


def cores_seen(bound, widen):
    """What a thread may run on that is bound to one core, as libgomp binds, and is then freed."""
    seen = []

    def work():
        os.sched_setaffinity(0, bound)
        if widen:
            use_allowed_cores()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seen[0]


def test_a_thread_that_is_bound_to_one_core_gets_back_those_of_its_process():
    everything = os.sched_getaffinity(0)
    assert allowed_cores() == everything
    assert cores_seen({min(everything)}, widen=False) == {min(everything)}
    assert cores_seen({min(everything)}, widen=True) == everything


def bound_child(bound, answer):
    os.sched_setaffinity(0, bound)
    answer.put(allowed_cores())


def test_a_process_that_was_bound_when_it_was_spawned_has_the_cores_of_its_parent():
    everything = os.sched_getaffinity(0)
    fork = multiprocessing.get_context("fork")
    answer = fork.SimpleQueue()
    child = fork.Process(target=bound_child, args=({min(everything)}, answer))
    child.start()
    assert answer.get() == everything
    child.join()
