"""What the laws work with: a clock that a test moves, keys, chunk bytes, guarded memory."""

import gc
import hashlib
import mmap
from collections.abc import Sequence
from contextlib import suppress

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Namespace, make_key
from kvtiers.testing.laws import must

LAYOUT = ChunkLayout(
    (
        GroupLayout(0, PAGE_BYTES, 16),
        GroupLayout(1, 2 * PAGE_BYTES, 16),
        GroupLayout(7, 5 * PAGE_BYTES, 16, keeps_every_chunk=False),
    )
)
"""The layout that stores and tiers under test are built with."""
NAMESPACE = Namespace({"model": "laws", "format": 1})
OTHER_NAMESPACE = Namespace({"model": "laws", "format": 2})

_GUARD = 0xA5


class ManualClock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time now."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.now += seconds


def content(key: Key, nbytes: int) -> bytes:
    """The bytes of the chunk ``key``: no two keys, and no two offsets in one, look alike."""
    return hashlib.shake_128(key).digest(nbytes)


def chunk(key: Key) -> bytes:
    """The bytes of the chunk ``key`` in :data:`LAYOUT`."""
    return content(key, LAYOUT.chunk_bytes(key))


def key(name: object, group: int = 0) -> Key:
    """A key of the usual length, named by anything with a ``str``."""
    return make_key(hashlib.sha256(str(name).encode()).digest(), group)


def keys(*names: object, group: int = 0) -> list[Key]:
    """Several keys of one group."""
    return [key(name, group) for name in names]


def near_misses(of: Key) -> list[Key]:
    """Keys that a careless store may take for ``of``: none of them equals it."""
    digest = of[:-4]
    flips = [
        make_key(digest[:at] + bytes([digest[at] ^ bit]) + digest[at + 1 :], 0)
        for at in (0, 1, 2, len(digest) // 2, len(digest) - 1)
        for bit in (1, 0x80)
    ]
    groups = [make_key(digest, group.group) for group in LAYOUT.groups]
    prefixes = [make_key(digest[:-1], 0), make_key(digest + bytes(4), 0), make_key(digest[:4], 0)]
    return [k for k in (*flips, *groups, *prefixes) if k != of]


class Slots:
    """Memory for some chunks, page aligned, with guards before, between and behind them.

    ``shift`` bytes move every slot off its page boundary.
    """

    def __init__(self, names: Sequence[Key], shift: int = 0) -> None:
        self.keys = tuple(names)
        sizes = [LAYOUT.chunk_bytes(k) for k in names]
        self._starts: list[int] = []
        at = PAGE_BYTES
        for size in sizes:
            self._starts.append(at + shift)
            at += size + PAGE_BYTES
        self._sizes = sizes
        self._map = mmap.mmap(-1, at + PAGE_BYTES)
        self._map[:] = bytes([_GUARD]) * len(self._map)
        self._views: list[memoryview] = []

    @classmethod
    def filled(cls, names: Sequence[Key], shift: int = 0) -> "Slots":
        """Slots that hold the bytes of their chunks."""
        slots = cls(names, shift)
        for i, name in enumerate(names):
            slots.fill(i, content(name, slots._sizes[i]))
        return slots

    def views(self, *, writable: bool) -> list[memoryview]:
        """One view per slot, to be given away."""
        with memoryview(self._map) as whole, whole.toreadonly() as readonly:
            source = whole if writable else readonly
            views = [source[self._span(i)] for i in range(len(self.keys))]
        self._views += views
        return views

    def holds(self, i: int) -> bytes:
        """What slot ``i`` holds now."""
        return self._map[self._span(i)]

    def fill(self, i: int, data: bytes) -> None:
        """Put ``data`` into slot ``i``."""
        self._map[self._span(i)] = data

    def scribble(self) -> bytes:
        """Use the memory for something else; returns how it looks, guards included."""
        for i, size in enumerate(self._sizes):
            self.fill(i, bytes([0x3C]) * size)
        return self.image()

    def image(self) -> bytes:
        """All of the memory, guards included."""
        return self._map[:]

    def must_be_guarded(self) -> None:
        """Raise LawBroken if a byte outside the slots has changed."""
        outside = bytearray(self._map)
        for i, size in enumerate(self._sizes):
            outside[self._span(i)] = bytes([_GUARD]) * size
        must(outside.count(_GUARD) == len(outside), "memory outside of the views was written to")

    def must_be_free(self) -> None:
        """Raise LawBroken if a view that was given away, or a part of one, is still in use."""
        for view in self._views:
            with suppress(BufferError):  # found below
                view.release()
        if self._exported():
            gc.collect()  # what only a cycle keeps alive is not in use
        must(not self._exported(), "a view is still in use: a slice or a wrapper of it is kept")

    def _exported(self) -> bool:
        try:
            self._map.resize(len(self._map))
        except BufferError:
            return True
        return False

    def _span(self, i: int) -> slice:
        return slice(self._starts[i], self._starts[i] + self._sizes[i])
