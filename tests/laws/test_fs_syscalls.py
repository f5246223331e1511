"""The file system fails at call 1, 2, ... of one kind, once or from then on: fs keeps its word.

Opening works or says ConfigError; methods answer or raise in our family; what was answered as
written is there and right; what is read is right; and a store that is opened when the fault has
passed serves and leaves nothing behind but chunks and its manifest.
"""

import errno
import itertools
import os
from contextlib import contextmanager

import pytest

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.testing import Slots, must
from kvtiers.testing.bench import Environment, StoreBench
from kvtiers.testing.laws import Holdings
from kvtiers.testing.values import NAMESPACE, chunk, keys
from kvtiers.tiers.fs import (
    account,
    capacity,
    damaged,
    direct,
    files,
    folders,
    leaving,
    names,
    quarantine,
    room,
    scratch,
    shared,
    stamps,
    tree,
    vectored,
    victims,
    workplace,
)
from kvtiers.tiers.fs.files import FilesStore

CALLS = (
    "open",
    "pwritev",
    "pwrite",
    "preadv",
    "pread",
    "replace",
    "unlink",
    "stat",
    "lstat",
    "fstat",
    "utime",
    "mkdir",
    "fchmod",
    "fsync",
    "scandir",
    "listdir",
    "statvfs",
)
MODULES = (
    account,
    capacity,
    damaged,
    direct,
    files,
    folders,
    leaving,
    names,
    workplace,
    quarantine,
    room,
    scratch,
    shared,
    stamps,
    tree,
    vectored,
    victims,
)
NAMES = keys("a", "b", "c", group=1)


class FaultyOs:
    """The module ``os``, whose ``call`` fails the n-th time, or from then on."""

    def __init__(self, call, nth, code, sticky):
        self.calls = 0
        self.struck = False
        self._call, self._nth, self._code, self._sticky = call, nth, code, sticky

    def __getattr__(self, name):
        real = getattr(os, name)
        return self._wrap(real) if name == self._call else real

    def _wrap(self, real):
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self._nth or (self._sticky and self.calls > self._nth):
                self.struck = True
                raise OSError(self._code, os.strerror(self._code))
            return real(*args, **kwargs)

        return call


def live(root, environment, **options):
    """Open, write, read, delete, scan, close; what was answered as written and not deleted."""
    try:
        store = FilesStore(environment.context(), str(root), **options)
    except ConfigError:
        return []
    bench = StoreBench(store, environment)
    results = bench.write_from(Slots.filled(NAMES))
    written = [k for k, error in zip(NAMES, results, strict=True) if error is None]
    read_what_can_be(bench)
    store.touch(NAMES)
    for act in (lambda: store.contains(NAMES), lambda: list(store.scan())):
        allowed(act)
    if allowed(lambda: store.delete(NAMES[:1])) is not None or NAMES[0] in written:
        written = [k for k in written if k != NAMES[0]]
    bench.write_from(Slots.filled(NAMES[1:]))
    read_what_can_be(bench)
    allowed(store.close)
    store.check()
    gone = {k for k, _ in environment.removed}
    return [k for k in written if k not in gone]


def read_what_can_be(bench):
    slots = Slots(NAMES)
    for i, error in enumerate(bench.read_into(slots)):
        assert error is not None or slots.holds(i) == chunk(NAMES[i])


def allowed(act):
    """None, or the error of our family that ``act`` raised; anything else is a fault of ours."""
    try:
        act()
    except KVTiersError as e:
        return e
    return None


def must_serve(root, written, **options):
    """A fault-free store at the same place has what was written, serves, and leaves no litter."""
    environment = Environment(NAMESPACE)
    store = FilesStore(environment.context(), str(root), **options)
    bench = StoreBench(store, environment)
    bench.must_hold(written)
    kinds = bench.read(NAMES)
    assert set(kinds) <= {None, Kind.VANISHED}
    bench.write(NAMES)
    bench.must_hold(NAMES)
    store.close()
    store.check()
    left = {p.name for p in root.rglob("*") if p.is_file() and p.parent.parent.name != names.TEMP}
    assert left == {names.MANIFEST, names.QUOTA, *(f"{k[:-4].hex()}-g1.kvc" for k in NAMES)}


@contextmanager
def failing(call, nth, code, sticky=False):
    """Within, the file system fails as told."""
    faulty = FaultyOs(call, nth, code, sticky)
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            if hasattr(module, "os"):
                patch.setattr(module, "os", faulty)
        yield faulty


def cases():
    for bounded, sticky, call in itertools.product((False, True), (False, True), CALLS):
        name = f"{call}-{'sticky' if sticky else 'transient'}-{'bounded' if bounded else 'free'}"
        yield pytest.param(call, sticky, bounded, id=name)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(("call", "sticky", "bounded"), list(cases()))
def test_whatever_call_fails_the_promises_hold(call, sticky, bounded, code, tmp_path):
    bound = {"capacity_bytes": 1 << 20} if bounded else {"eviction": "external"}
    options = {"fsync": call == "fsync", **bound}
    for nth in itertools.count(1):
        assert nth < 200, f"{call} is called without end"
        root = tmp_path / str(nth)
        with failing(call, nth, code, sticky) as faulty:
            written = live(root, Environment(NAMESPACE), **options)
        if not faulty.struck:
            return
        must_serve(root, written, **options)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_store_that_cannot_be_opened_keeps_nothing_open(call, tmp_path):
    for nth in itertools.count(1):
        holdings = Holdings()
        context = Environment(NAMESPACE).context()
        try:
            with failing(call, nth, errno.EIO) as faulty:
                FilesStore(context, str(tmp_path / str(nth)), capacity_bytes=1 << 20).close()
        except ConfigError as e:
            must(faulty.struck, f"refused without a fault: {e}")
            holdings.must_be_back(1.0)
            continue
        assert nth > 1
        return
