"""On which cores copies run, and on how many; pages are touched there, too.

An engine on the CPU ties its OpenMP threads to cores. libgomp (``GOMP_CPU_AFFINITY``) ties the
first thread of the process, too, when it is loaded, and every thread that one starts inherits the
single core: a copier there would take turns with the model on it, while the whole team waits at its
next barrier. So copiers take all cores that the process was given; often some of them are idle
(the second threads of cores, and those that vLLM leaves free).
"""

import multiprocessing
import os
from contextlib import suppress

CORES_PER_THREAD = 8
MAX_THREADS = 4


def copy_threads(cores: int, ranks: int) -> int:
    """How many threads the copies of one rank use where ``ranks`` share ``cores``.

    One moves 10 to 20 GB/s, far more than a model computes on a few cores, and each takes a core
    from the model while it runs.
    """
    return max(1, min(MAX_THREADS, cores // ranks // CORES_PER_THREAD))


def allowed_cores() -> set[int]:
    """The cores of every thread of this process, and of the process it was spawned by."""
    tasks = [int(name) for name in os.listdir("/proc/self/task")]
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        tasks.append(parent.pid)
    cores: set[int] = set()
    for task in tasks:
        with suppress(ProcessLookupError):  # it has ended
            cores |= os.sched_getaffinity(task)
    return cores


def use_allowed_cores() -> None:
    """Let the calling thread run on all of them."""
    with suppress(OSError):  # a control group took some away meanwhile
        os.sched_setaffinity(0, allowed_cores())
