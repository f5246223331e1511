"""What a law is: a numbered obligation of a contract that any implementation can be held to.

A laws class is subclassed with a few small hooks and run by pytest, or one law at a time with
:func:`run`. Laws cannot be redefined; what an implementation does not do it declares in its
capabilities, and then the law holds it to refusing.
"""

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar, final

F = TypeVar("F", bound=Callable[..., None])


class LawBroken(AssertionError):
    """An implementation does not do what its contract obliges it to."""


def must(holds: object, otherwise: str) -> None:
    """Raise LawBroken with ``otherwise`` unless ``holds``; also under ``python -O``."""
    if not holds:
        raise LawBroken(otherwise)


def law(number: str) -> Callable[[F], F]:
    """Mark a method as the law ``number`` (``S1``). Its docstring states the obligation."""

    def mark(function: F) -> F:
        function.__law__ = number  # type: ignore[attr-defined]
        return final(function)

    return mark


class Laws:
    """Base of the laws classes. Raises TypeError when a subclass redefines a law."""

    patience_s: ClassVar[float] = 20.0
    """How long a call that must not block may take, and how long one that may is waited for."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            for name, value in vars(base).items():
                if hasattr(value, "__law__") and inspect.getattr_static(cls, name) is not value:
                    raise TypeError(
                        f"{cls.__name__} redefines {name}: the law {value.__law__} cannot be "
                        "changed or left out; declare in the capabilities what is not supported"
                    )

    @contextmanager
    def watched(self, what: str, release: Callable[[], object]) -> Iterator[None]:
        """Within, ``what`` must not wait for what ``release`` lets go of. Never hangs for ever.

        The calls stay on the caller's thread, as they are on the scheduler's.
        """
        late = threading.Event()

        def fire() -> None:
            late.set()
            release()

        timer = threading.Timer(self.patience_s, fire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
        must(not late.is_set(), f"{what} waits for the medium")


def laws_of(cls: type[Laws]) -> dict[str, str]:
    """The names of the methods that are laws, by number, in the order of their definition."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if hasattr(value, "__law__"):
                found[value.__law__] = name
    return found


def run(laws: Laws, number: str, place: Path) -> Exception | None:
    """Run one law with the empty folder ``place``; what it found, None if the law holds."""
    method: Callable[..., Any] = getattr(laws, laws_of(type(laws))[number])
    wants_place = "tmp_path" in inspect.signature(method).parameters
    try:
        method(place) if wants_place else method()
    except Exception as e:
        return e
    return None


class Holdings:
    """Threads and file descriptors of this process, to see what is left of an object."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = _open_files()

    def must_be_back(self, patience_s: float) -> None:
        """Raise LawBroken naming what is held now and was not before."""
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(patience_s)
            must(not thread.is_alive(), f"the thread {thread.name} is left running")
        left = _open_files() - self._files
        must(not left, f"file descriptors are left open: {sorted(left)}")


def _open_files() -> set[tuple[int, str]]:
    """Number and target of each open file descriptor; empty where the system does not tell."""
    found = set()
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return set()
    for name in names:
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # the descriptor that listed the folder
    return found
