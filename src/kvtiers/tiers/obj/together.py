"""Several requests at once, a bounded number of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

from kvtiers.errors import KVTiersError, closed

T = TypeVar("T")


class Together:
    """Threads that wait for requests. Any thread may use it, but none of its own.

    The calls of ``obstore`` that block take less of the processor than those that are awaited, and
    let go of the interpreter's lock as well.
    """

    def __init__(self, most: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(most, thread_name_prefix=name)

    def run(self, acts: Sequence[Callable[[], T]]) -> list[T | KVTiersError]:
        """Do all; for each, in order, what it returned or the KVTiersError that it raised.

        A single one is done on the thread of the caller. Those that ``close`` comes before have
        the error ``CLOSED``.
        """
        if len(acts) <= 1:
            return one_by_one(acts)
        futures = [self._begun(act) for act in acts]
        return [_result(future) for future in futures]

    def begin(self, act: Callable[[], object]) -> None:
        """Do it in the background. An error is nobody's."""
        self._begun(act)

    def _begun(self, act: Callable[[], T]) -> "Future[T | KVTiersError] | None":
        try:
            return self._threads.submit(_outcome, act)
        except RuntimeError:  # it is closed
            return None

    def close(self) -> None:
        """Wait for what is under way; what waits for its turn is not done. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)


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
    except KVTiersError as e:
        e.__context__ = None
        return e.with_traceback(None)  # frames would keep the memory of the chunk
