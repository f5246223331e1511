"""One life of a store, which ends at its n-th call to the system.

``python -m tests.crash.nth_call LAYOUT ROOT WHAT HOW FIRST STRIDE CALL ...``. WHAT: a whole
``life``, or the ``opening`` of what a killed one left. HOW: ``before`` the call, ``after`` it, or
in the ``middle``, when a write has put down a part. There is a life for n = FIRST, FIRST + STRIDE
and so on, until one comes to its end; their number is printed. This process has no threads and
forks each life; what is left of it is verified, and lives on, in a fork as well.
"""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtiers.chunks import PAGE_BYTES, Key
from tests.crash.crash_kit import (
    CAPACITY,
    TELL,
    Told,
    key,
    open_telling,
    present,
    say,
    verify,
    write,
    wrong,
)

FEW = CAPACITY // 2
"""Bytes: four segments of the least length. A life is short."""
STEPS, REOPENED = 7, 4
LATER, LAST = range(2000, 2004), range(2100, 2108)
"""What is written to what a life left, and at the end."""
WRITTEN = (*range(10 * STEPS), *LATER, *LAST)
LEFT_AT = 50
"""The write at which the life ends that is opened afterwards: it evicts already."""


class Deadly:
    """Kills this process at the ``nth`` of all calls of the functions of ``os`` that it is over."""

    def __init__(self, calls: Sequence[str], nth: int, how: str) -> None:
        self._left, self._how = nth, how
        for name in calls:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left:
                return real(*args, **kwargs)
            if self._how == "middle":
                self._do_a_part(name, real, args)
            elif self._how == "after":
                with contextlib.suppress(OSError):
                    real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("it lives")

        return call

    def _do_a_part(self, name: str, real: Callable[..., Any], args: Sequence[Any]) -> None:
        """A part of a write, in whole pages: all but the last one, half of it, or its head."""
        if name != "pwritev":
            return
        fd, buffers, offset = args
        whole = sum(b.nbytes for b in buffers) // PAGE_BYTES
        part = (whole - 1, whole // 2, 1)[offset // PAGE_BYTES % 3]
        for buffer in buffers:
            count = min(part, buffer.nbytes // PAGE_BYTES)
            real(fd, [buffer[: count * PAGE_BYTES]], offset)
            offset, part = offset + count * PAGE_BYTES, part - count


def live(layout: str, root: Path, fd: int) -> None:
    """Fill, evict, keep what is used, delete, close, open again, go on."""
    TELL[layout](fd)
    store = open_telling(fd, layout, root, capacity_bytes=FEW)
    at = 0
    for step in range(STEPS):
        if step == REOPENED:
            store.close()
            store = open_telling(fd, layout, root, capacity_bytes=FEW)
        for ns in (range(at, at + 7), range(at + 7, at + 10)):
            errors = write(store, ns)
            say(fd, "stored", [n for n, e in zip(ns, errors, strict=True) if e is None])
        assert not wrong(store, present(store, range(at, at + 3)))
        store.touch([key(n) for n in range(at, at + 2)])
        doomed = present(store, (at + 1, max(0, at - 3)))
        say(fd, "deleting", doomed)
        store.delete([key(n) for n in doomed])
        say(fd, "deleted", doomed)
        at += 10
    store.close()
    say(fd, "done", [])


def in_a_fork(act: Callable[[], None]) -> int:
    """Its exit status: 0, 1 for an exception, or minus a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        act()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def hear(fd: int) -> tuple[Told, bool]:
    """What it said, and whether it came to its end."""
    told, done = Told(), False
    with open(fd) as lines:
        for line in lines:
            done = done or line.startswith("done")
            if not line.startswith("done"):
                told.hear(line)
    return told, done


def live_on(layout: str, root: Path, told: Told, fd: int) -> None:
    """All is as it should be; the store goes on, and is killed again before it is closed."""
    lost: set[Key] = set()
    store = verify(
        layout,
        root,
        told.kept,
        lambda keys, reason: lost.update(keys),
        WRITTEN,
        capacity_bytes=FEW,
    )
    kept = present(store, WRITTEN)
    back = kept & (told.deleted | told.gone)
    assert not back, f"came back: {sorted(back)}"
    assert write(store, LATER) == [None] * len(LATER)
    say(fd, "stored", [n for n in (*kept, *LATER) if key(n) not in lost])
    os.kill(os.getpid(), signal.SIGKILL)


def rest(layout: str, root: Path, kept: set[int]) -> None:
    """It is opened twice more, and serves."""
    verify(layout, root, kept, among=WRITTEN, capacity_bytes=FEW).close()
    store = verify(layout, root, kept, among=WRITTEN, capacity_bytes=FEW)
    assert write(store, LAST) == [None] * len(LAST)
    assert wrong(store, LAST) == {}
    store.close()


def open_again(layout: str, root: Path, fd: int) -> None:
    """What a killed one left is opened, counted and closed."""
    TELL[layout](fd)
    store = open_telling(fd, layout, root, capacity_bytes=FEW)
    assert store.scan()
    store.close()
    say(fd, "done", [])


def die_at(
    n: int, how: str, calls: Sequence[str], life: Callable[[int], None]
) -> tuple[Told, bool]:
    """What a life said that ended at call ``n``, and whether it came to its end before."""
    ours, theirs = os.pipe()

    def die() -> None:
        Deadly(calls, n, how)
        life(theirs)

    status = in_a_fork(die)
    os.close(theirs)
    told, done = hear(ours)
    assert status == (0 if done else -signal.SIGKILL), f"life {n} ended with {status}"
    return told, done


def main(layout: str, root: str, what: str, how: str, first: str, stride: str, *calls: str) -> None:
    left, before = Path(root) / "left", Told()
    if what == "opening":
        before, done = die_at(LEFT_AT, "before", ["pwritev"], lambda fd: live(layout, left, fd))
        assert not done, "nothing was left half-done"
    n, lives, done = int(first), 0, False
    while not done:
        place = Path(root) / str(n)
        if what == "opening":
            shutil.copytree(left, place)
        act = live if what == "life" else open_again
        told, done = die_at(n, how, calls, lambda fd, act=act, at=place: act(layout, at, fd))
        for field, ns in vars(before).items():
            getattr(told, field).update(ns)
        then, _ = die_at(0, how, [], lambda fd, at=place, told=told: live_on(layout, at, told, fd))
        assert then.stored, f"life {n} found nothing"
        assert in_a_fork(lambda at=place, then=then: rest(layout, at, then.stored)) == 0, n
        shutil.rmtree(place)
        n, lives = n + int(stride), lives + 1
    os.write(1, f"{lives}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
