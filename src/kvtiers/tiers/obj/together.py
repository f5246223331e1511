"""Several requests at once, a bounded number of them."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvtiers.errors import KVTiersError, closed
from kvtiers.tiers.lanes import StartThread, start_daemon
from kvtiers.tiers.work import fault

T = TypeVar("T")

_Task = tuple["Future[Any]", Callable[[], Any]]


class Together:
    """Threads that wait for requests. Any thread may use it, but none of its own.

    The calls of ``obstore`` that block take less of the processor than those that are awaited, and
    let go of the interpreter's lock as well. Threads are daemons, as lanes are: a request that
    never ends does not keep the process alive.
    """

    def __init__(self, most: int, name: str, start: StartThread = start_daemon) -> None:
        self._most = most
        self._name = name
        self._start = start
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        """One for each thread that waits for a task which nobody counts on yet."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._background: list[threading.Thread] = []

    def run(self, acts: Sequence[Callable[[], T]]) -> list[T | KVTiersError]:
        """Do all; for each, in order, what it returned or the error that it raised.

        All have ended then, whatever any of them raised. A single one is done on the thread of the
        caller. Those that ``close`` comes before have the error ``CLOSED``.
        """
        if len(acts) <= 1:
            return one_by_one(acts)
        futures = [self._begun(act) for act in acts]
        return [_result(future) for future in futures]

    def begin(self, act: Callable[[], object]) -> None:
        """Do it in the background, on a thread of its own. An error is nobody's."""
        with self._lock:
            self._background = [thread for thread in self._background if thread.is_alive()]
            if self._closed:
                return
            try:
                thread = self._start(lambda: _done(act), f"{self._name}-background")
                self._background.append(thread)
                return
            except RuntimeError:  # the system starts no more
                pass
        _done(act)

    def _begun(self, act: Callable[[], T]) -> "Future[T | KVTiersError] | None":
        future: Future[T | KVTiersError] = Future()
        with self._lock:
            if self._closed:
                return None
            if self._has_a_thread():
                self._tasks.put((future, act))
                return future
        future.set_result(_outcome(act))
        return future

    def _has_a_thread(self) -> bool:
        """Start another one if all are busy and it may be; False if there is none at all."""
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            try:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(self._start(self._serve, name))
            except RuntimeError:  # the system starts no more; those that there are have to do
                pass
        return bool(self._threads)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, act = task
            if future.set_running_or_notify_cancel():
                future.set_result(_outcome(act))
            del task, future, act  # they keep the memory of a chunk
            self._idle.release()

    def close(self) -> None:
        """Wait for what is under way; what waits for its turn is not done. Idempotent."""
        with self._lock:
            self._closed = True
            threads = [*self._threads, *self._background]
        self._cancel()
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join()

    def _cancel(self) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                return
            if task is not None:
                task[0].cancel()
                task[0].set_running_or_notify_cancel()  # whoever waits hears of it

    def check(self) -> None:
        """Raise AssertionError if there are more threads than the bound."""
        assert len(self._threads) <= self._most, "more threads than requests at once"

    def __repr__(self) -> str:
        return f"<Together {len(self._threads)}/{self._most} threads>"


def one_by_one(acts: Sequence[Callable[[], T]]) -> list[T | KVTiersError]:
    """As :meth:`Together.run`, on this thread, one after the other."""
    return [_outcome(act) for act in acts]


def _result(future: "Future[T | KVTiersError] | None") -> T | KVTiersError:
    try:
        return closed("the store", "request") if future is None else future.result()
    except CancelledError:
        return closed("the store", "request")


def _outcome(act: Callable[[], T]) -> T | KVTiersError:
    try:
        return act()
    except KeyboardInterrupt:  # of a tool, on its own thread
        raise
    except BaseException as e:
        # Whatever it is: who is told of it may give memory away that others still write to.
        error = fault("request", e)
        error.__context__ = None
        return error.with_traceback(None)  # frames would keep the memory of the chunk


def _done(act: Callable[[], object]) -> None:
    _outcome(act)
