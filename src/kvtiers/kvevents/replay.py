"""What a late or restarted reader is told: one contiguous run of batches up to now.

A request is ``[identity, b"", first sequence number]``, each reply ``[identity, b"", topic,
sequence number, payload]``, and the last one ``[identity, b"", b"", END_OF_REPLAY, b""]``, as
vLLM's. Readers refuse a replay that does not begin with what they asked for, or has gaps.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import zmq

from kvtiers.kvevents.messages import END_OF_REPLAY, SEQ_BYTES, Batch, KVEvent, encode

CHUNKS_PER_BATCH = 1024
PATIENCE_S = 5.0
"""How long a reader may take nothing of a replay before it is given up."""
LONGEST_S = 60.0
"""How long a reader may take for a whole replay. Meanwhile nothing is published to anybody, and an
engine whose publisher lets so much wait that it has no more room stops until it has.
"""

Numbered = tuple[int, bytes]
"""Sequence number and payload."""


class ReplayRing:
    """The last payloads, as many as fit into so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[Numbered] = deque()
        self.nbytes = 0
        self.next_seq = 0
        """The sequence number of the next batch."""

    def add(self, payload: bytes, seq: int | None = None) -> int:
        """Keep a payload; its sequence number, the next one unless some were skipped."""
        seq = self.next_seq if seq is None else seq
        self.next_seq = seq
        self.next_seq += 1
        self._kept.append((seq, payload))
        self.nbytes += len(payload)
        while self.nbytes > self._max_bytes:
            self.nbytes -= len(self._kept.popleft()[1])
        return seq

    def since(self, start: int) -> list[Numbered]:
        """What is kept from ``start`` on. It begins later if that is gone."""
        return [one for one in self._kept if one[0] >= start]

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self.nbytes <= self._max_bytes, "more is kept than the bound"
        assert self.nbytes == sum(len(p) for _, p in self._kept), "bytes do not add up"
        seqs = [seq for seq, _ in self._kept]
        assert seqs == sorted({*seqs}), "batches are not in order"
        assert not seqs or seqs[-1] == self.next_seq - 1, "the last batch is missing"

    def __repr__(self) -> str:
        return f"<ReplayRing {len(self._kept)} batches, {self.nbytes} bytes>"


class Inventory(Protocol):
    """Whoever knows what was said and still holds."""

    def inventory(self, max_chunks: int, max_parts: int) -> Iterator[list[KVEvent]]:
        """That, in at most so many parts; see :meth:`Told.inventory`."""

    @property
    def said(self) -> int:
        """How many chunks it is about."""


def from_the_beginning(
    known: Inventory, next_seq: int, now: float, rank: int | None
) -> Iterator[Numbered]:
    """Batches 0 to ``next_seq`` - 1, all empty but the last ones: these tell what holds now.

    Exact if nothing was said since the last of them. Consume all of it at once.
    """
    if not next_seq:
        return
    parts = min(next_seq, -(-known.said // CHUNKS_PER_BATCH))
    empty = encode(Batch(now, (), rank))
    for seq in range(next_seq - parts):
        yield seq, empty
    if parts:
        told = known.inventory(CHUNKS_PER_BATCH, parts)
        yield from numbered(told, next_seq - parts, next_seq, now, rank)


def numbered(
    told: Iterable[Sequence[KVEvent]], first: int, end: int, now: float, rank: int | None
) -> Iterator[Numbered]:
    """Batches ``first`` to ``end`` - 1; with what is told, then empty."""
    seq = first
    for events in told:
        yield seq, encode(Batch(now, events, rank))
        seq += 1
    for rest in range(seq, end):
        yield rest, encode(Batch(now, (), rank))


def asked(frames: Sequence[bytes]) -> tuple[bytes, int] | None:
    """Who asks for what comes from which number on; None: it is no request."""
    if len(frames) != 3 or frames[1] or len(frames[2]) != SEQ_BYTES:
        return None
    return frames[0], int.from_bytes(frames[2], "big")


def answer(
    socket: "zmq.Socket[bytes]", identity: bytes, topic: bytes, batches: Iterable[Numbered]
) -> bool:
    """Send a replay; False if the reader is gone, or too slow.

    ``socket`` is a ROUTER with ``ROUTER_MANDATORY``: without that it drops what a slow reader has
    not taken, and the replay has gaps.
    """
    end = time.monotonic() + LONGEST_S
    for seq, payload in batches:
        frames = (identity, b"", topic, seq.to_bytes(SEQ_BYTES, "big"), payload)
        if not _send(socket, frames, end):
            return False
    return _send(socket, (identity, b"", b"", END_OF_REPLAY, b""), end)


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[bytes], end: float) -> bool:
    until = None
    while True:
        try:
            socket.send_multipart(frames, zmq.DONTWAIT)
            return True
        except zmq.Again:
            until = until or min(end, time.monotonic() + PATIENCE_S)
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        except zmq.ZMQError:  # EHOSTUNREACH: it hung up
            return False
