"""What a law is: a numbered obligation of a contract that any implementation can be held to.

A laws class is subclassed with a few small hooks and run by pytest, or one law at a time with
:func:`run`. Laws cannot be redefined, hidden, marked or skipped; what an implementation does not
do it declares in its capabilities, and then the law holds it to refusing. Only whole modules, and
fixtures around a law, can still skip: what they leave out pytest reports as skipped.
"""

import functools
import inspect
import os
import threading
import time
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, TypeVar, cast, final

F = TypeVar("F", bound=Callable[..., None])
H = TypeVar("H", bound=Callable[..., Any])

_POLL_S = 0.001


class LawBroken(AssertionError):
    """An implementation does not do what its contract obliges it to."""


def must(holds: object, otherwise: str) -> None:
    """Raise LawBroken with ``otherwise`` unless ``holds``; also under ``python -O``."""
    if not holds:
        raise LawBroken(otherwise)


def law(number: str) -> Callable[[F], F]:
    """Mark a method as the law ``number`` (``S1``). Its docstring states the obligation."""

    def mark(function: F) -> F:
        @functools.wraps(function)
        def run_it(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except BaseException as e:
                if not any(c.__name__ in _WAYS_OUT for c in type(e).__mro__):
                    raise
                raise LawBroken(f"the law {number} was left out by a hook: {e}") from e

        run_it.__law__ = number  # type: ignore[attr-defined]
        return cast(F, final(run_it))

    return mark


def hook(function: H) -> H:
    """Mark a method of a laws class as one that a subclass defines."""
    function.__hook__ = True  # type: ignore[attr-defined]
    return function


_WAYS_OUT = ("Skipped", "SkipTest", "XFailed")
"""What pytest and unittest take for an answer that is neither yes nor no."""
_MARKS_OUT = ("skip", "skipif", "xfail", "parametrize")
_NAMES_OUT = ("__test__", "__init__", "__new__", "__getattribute__", "__setattr__", "__delattr__")
"""With these a class is not collected by pytest, or answers with other methods than it has."""


class _Standing(ABCMeta):
    """Makes classes whose laws stand: while a class is made, and ever after."""

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        for base in cls.__mro__[:-1]:
            if not _is_ours(base):
                for key, value in vars(base).items():
                    _refuse_way_out(cls, key, value)
        numbers: dict[str, str] = {}
        for key, value in _fixed(cls).items():
            number = getattr(value, "__law__", key)
            twice = numbers.setdefault(number, key) != key
            if twice or inspect.getattr_static(cls, key) is not value:
                raise _redefined(cls, key, value)

    def __setattr__(cls, name: str, value: object) -> None:
        _refuse_change(cls, name)
        _refuse_way_out(cls, name, value)
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        _refuse_change(cls, name)
        super().__delattr__(name)


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith(__package__)


def _fixed(cls: type) -> dict[str, object]:
    """What no subclass may define anew, by name: laws, and what our laws use, but for hooks."""
    defined = [(base, *item) for base in cls.__mro__ for item in vars(base).items()]
    hooks = {n for base, n, value in defined if hasattr(value, "__hook__") and _is_ours(base)}
    found: dict[str, object] = {}
    for base, name, value in reversed(defined):
        is_method = isinstance(value, FunctionType | staticmethod | classmethod)
        is_used = is_method and _is_ours(base) and name not in hooks
        if is_used or hasattr(value, "__law__"):
            found.setdefault(name, value)
    return found


def _refuse_change(cls: type, name: str) -> None:
    if (value := _fixed(cls).get(name)) is not None:
        raise _redefined(cls, name, value)


def _refuse_way_out(cls: type, name: str, value: object) -> None:
    if name in _NAMES_OUT:
        raise TypeError(f"{cls.__name__} defines {name}: pytest would leave its laws out")
    if name == "pytestmark":
        marks = value if isinstance(value, list | tuple) else [value]
        out = [m for mark in marks if (m := getattr(mark, "name", "")) in _MARKS_OUT]
        if out:
            raise TypeError(
                f"{cls.__name__} is marked {out[0]}: laws cannot be left out; what cannot run "
                "here at all is left out by its module"
            )


def _redefined(cls: type, name: str, value: object) -> TypeError:
    what = f"the law {number}" if (number := getattr(value, "__law__", None)) else "what laws use"
    return TypeError(
        f"{cls.__name__} redefines {name}: {what} cannot be changed or left out; declare in the "
        "capabilities what is not supported"
    )


class Laws(metaclass=_Standing):
    """Base of the laws classes. Raises TypeError for what would change a law or leave one out."""

    patience_s: ClassVar[float] = 20.0
    """How long a call that must not block may take, and how long one that may is waited for."""

    def __setattr__(self, name: str, value: object) -> None:
        _refuse_change(type(self), name)
        super().__setattr__(name, value)

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
        until = time.monotonic() + patience_s
        while (left := _open_files() - self._files) and time.monotonic() < until:
            time.sleep(_POLL_S)  # a library closes its connections on a thread of its own
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
