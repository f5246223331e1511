"""What is stored: a few thousand chunks, each of bytes that its number tells."""

import mmap
import random

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Namespace
from kvtiers.testing.values import content
from kvtiers.testing.values import key as named

SIZES = (PAGE_BYTES, 4 * PAGE_BYTES, 16 * PAGE_BYTES)
LAYOUT = ChunkLayout(tuple(GroupLayout(i, size, 16) for i, size in enumerate(SIZES)))
NAMESPACE = Namespace({"model": "soak", "format": 1})
KEYS = 6000
CAPACITIES = (24 << 20, 32 << 20, 40 << 20)
"""Bytes; all chunks together are six times as many."""


def key(n: int) -> Key:
    return named(n, n % len(SIZES))


NUMBERS = {key(n): n for n in range(KEYS)}


def filled(n: int) -> memoryview:
    view = blank(n)
    view[:] = content(key(n), view.nbytes)
    return view


def blank(n: int) -> memoryview:
    return memoryview(mmap.mmap(-1, SIZES[n % len(SIZES)]))


def right(n: int, view: memoryview) -> bool:
    return bytes(view) == content(key(n), view.nbytes)


def some(dice: random.Random, most: int = 12) -> list[int]:
    """Chunks of which some are asked for far more often than others."""
    return list({int(KEYS * dice.random() ** 3) for _ in range(dice.randint(1, most))})
