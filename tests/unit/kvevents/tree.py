"""Prompts of blocks that share prefixes, and what describes their chunks."""

import hashlib

from kvtiers.chunks import make_key
from kvtiers.hashing import event_hash
from kvtiers.kvevents.descriptions import Description

BLOCK = 4


class Chunk:
    """``blocks`` blocks after ``parent``; ``salt`` makes its tokens."""

    def __init__(self, parent, salt, blocks=1, group=0):
        self.parent = parent
        self.start = 0 if parent is None else parent.start + BLOCK * len(parent.digests)
        digest = b"" if parent is None else parent.digests[-1]
        self.tokens, self.digests = [], []
        for i in range(blocks):
            tokens = [(salt * 31 + i * 7 + n) % 50_000 for n in range(BLOCK)]
            digest = hashlib.sha256(digest + repr(tokens).encode()).digest()
            self.tokens += tokens
            self.digests.append(digest)
        self.key = make_key(self.digests[-1], group)
        self.group = group

    @property
    def hashes(self):
        return [event_hash(d) for d in self.digests]

    @property
    def description(self):
        before = None if self.parent is None else self.parent.hashes[-1]
        return Description(before, self.hashes, self.tokens, BLOCK, self.start)


def prompt(length, seed=0, blocks=1, group=0, after=None):
    """Chunks in prefix order."""
    chunks = []
    for i in range(length):
        after = Chunk(after, seed * 1000 + i, blocks, group)
        chunks.append(after)
    return chunks


def keys(chunks):
    return tuple(c.key for c in chunks)


def about_to_be_stored(captured):
    """What an announcer is told of a chunk that was captured."""
    (chunk,) = captured
    return chunk.key, chunk.description, True
