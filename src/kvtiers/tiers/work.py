"""What lanes do: transfers and questions; and how a store is held to its word.

``since`` is the moment, in the tier's ``Presence``, at which a piece of work was made.

A store may be anybody's. Whatever it raises or returns becomes an error per item, never the end
of a lane.
"""

from collections.abc import Callable, Sequence

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.base import ChunkStore, Item, Job, JobKind
from kvtiers.tiers.fullness import Fullness
from kvtiers.tiers.lanes import Inbox, Priority, Work


def fault(operation: str, error: BaseException) -> KVTiersError:
    """What a store raised, in our family; ``Kind.BROKEN`` for what it should not have raised."""
    if isinstance(error, KVTiersError):
        return error
    return KVTiersError(
        f"the store broke its contract: {operation} raised {type(error).__name__}: {error}",
        kind=Kind.BROKEN,
        operation=operation,
    )


def _broken(operation: str, what: str) -> KVTiersError:
    return KVTiersError(
        f"the store broke its contract: {operation} returned {what}",
        kind=Kind.BROKEN,
        operation=operation,
    )


def ask(
    store: ChunkStore,
    keys: Sequence[Key],
    question: Callable[[Sequence[Key]], list[bool]] | None = None,
) -> list[bool] | KVTiersError:
    """Call ``contains``, or what asks the same: one bool per key, or why there is no answer."""
    try:
        answers = (question or store.contains)(keys)
    except BaseException as e:
        return fault("contains", e)
    if not isinstance(answers, list | tuple) or len(answers) != len(keys):
        return _broken("contains", "something other than one answer per key")
    if not all(isinstance(a, bool) for a in answers):
        return _broken("contains", "something other than bools")
    return list(answers)


def transfer(
    store: ChunkStore, kind: JobKind, items: Sequence[Item], retries: int, stop: Callable[[], bool]
) -> list[KVTiersError | None]:
    """Write or read ``items``; those that failed in passing are tried again at once.

    ``FULL`` is not: making room is the store's own affair. ``stop`` ends the retries early.
    """
    results = _call(store, kind, items)
    for attempt in range(retries):
        again = [i for i, e in enumerate(results) if e is not None and _passing(e)]
        if not again or stop():
            break
        for i, error in zip(again, _call(store, kind, [items[i] for i in again]), strict=True):
            last = attempt + 1 == retries
            results[i] = _exhausted(error) if last and error and _passing(error) else error
    return results


def _passing(error: KVTiersError) -> bool:
    return error.retry is Retry.MAY and error.kind is not Kind.FULL


def _exhausted(error: KVTiersError) -> KVTiersError:
    return KVTiersError(
        f"{error} (tried again, in vain)",
        kind=error.kind,
        retry=Retry.EXHAUSTED,
        operation=error.operation,
        context=error.context,
    )


def _call(store: ChunkStore, kind: JobKind, items: Sequence[Item]) -> list[KVTiersError | None]:
    operation = "write" if kind is JobKind.STORE else "read"
    try:
        results = store.write(items) if kind is JobKind.STORE else store.read(items)
    except BaseException as e:
        return [fault(operation, e)] * len(items)
    if not isinstance(results, list | tuple) or len(results) != len(items):
        return [_broken(operation, "something other than one result per item")] * len(items)
    return [
        e if e is None or isinstance(e, KVTiersError) else _broken(operation, f"{type(e)}")
        for e in results
    ]


class Transfer(Work):
    """A slice of a job."""

    def __init__(
        self, job: Job, part: Sequence[int], deadline: float, since: int, mover: "Mover"
    ) -> None:
        """``part``: the indices of its chunks in the job."""
        super().__init__()
        self.priority = Priority.STORE if job.kind is JobKind.STORE else Priority.LOAD
        self.job_id = job.id
        self.kind = job.kind
        self.deadline = deadline
        self.since = since
        self.keys = [job.keys[i] for i in part]
        self.bytes = [job.views.sizes[i] for i in part]
        self.results: list[KVTiersError | None] = []
        self.began = 0.0
        self.ended = 0.0
        self._part = part
        self._views = job.views
        self._mover = mover

    def items(self) -> list[Item]:
        """Its chunks and where they are in host memory."""
        return [Item(key, self._views[i]) for key, i in zip(self.keys, self._part, strict=True)]

    def run(self) -> None:
        """Move the items, let go of their memory, tell the scheduler thread."""
        self._mover.move(self)

    def release(self) -> None:
        """Make the views unusable: their memory is somebody else's from now on."""
        self._views.release(self._part)


class Mover:
    """What transfers need to run."""

    def __init__(
        self,
        store: ChunkStore,
        inbox: Inbox,
        clock: Callable[[], float],
        retries: int,
        fullness: Fullness,
    ) -> None:
        self.stopping = False
        self._store = store
        self._inbox = inbox
        self._clock = clock
        self._retries = retries
        self._fullness = fullness

    def move(self, piece: Transfer) -> None:
        """Runs on a lane."""
        piece.began = self._clock()
        try:
            items = piece.items()
        except Exception as e:  # host memory is gone: the job must end all the same
            piece.results = [fault("view", e)] * len(piece.keys)
        else:
            piece.results = transfer(
                self._store,
                piece.kind,
                items,
                self._retries,
                lambda: self.stopping or self._clock() >= piece.deadline,
            )
        piece.ended = self._clock()
        piece.release()
        self._fullness.note(piece.ended)
        self._inbox.post(piece)


class Question(Work):
    """A batch of ``contains``."""

    priority = Priority.LOOKUP

    def __init__(
        self, keys: list[Key], deadline: float, since: int, store: ChunkStore, inbox: Inbox
    ) -> None:
        super().__init__()
        self.keys = keys
        self.deadline = deadline
        self.since = since
        self.answer: list[bool] | KVTiersError = []
        self._store = store
        self._inbox = inbox

    def run(self) -> None:
        """Ask, tell the scheduler thread."""
        self.answer = ask(self._store, self.keys)
        self._inbox.post(self)
