"""VLLM's publisher of KV events, with an answer for readers that come late.

Upstream's (0.32) keeps the last batches, counted, and drops what a slow reader of a replay has not
taken; asked for all from the beginning it begins where it still can. Readers that were restarted
never get what they can use. This one folds all that it publishes, of the device too, and answers
with what holds now.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from vllm import envs
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory, ZmqEventPublisher

from kvtiers.engines.vllm.logs import logger
from kvtiers.kvevents import replay
from kvtiers.kvevents.fold import StreamFold
from kvtiers.kvevents.messages import decode
from kvtiers.kvevents.sidefile import SideFile

RING_BYTES = 64 << 20
"""Of batches that are kept for readers that missed something."""


class _Kept(deque[Any]):
    """In place of vLLM's buffer of past batches: bounded by bytes, and folded."""

    def __init__(self, fold: StreamFold, on_cleared: Callable[[], None]) -> None:
        super().__init__()
        self.ring = replay.ReplayRing(RING_BYTES)
        self.fold: StreamFold | None = fold
        self._on_cleared = on_cleared

    def append(self, batch: tuple[int, bytes]) -> None:
        """A batch was published."""
        seq, payload = batch
        self.ring.add(payload, seq)
        if self.fold is None:
            return
        try:
            cleared = [self.fold.take(event) for event in decode(payload).events]
        except Exception:  # the fence: the device's events are published whatever we make of them
            logger.exception("kvtiers cannot follow the KV events; replays are vLLM's from now on")
            self.fold = None
            return
        if any(cleared):
            self._on_cleared()


class InventoryPublisher(ZmqEventPublisher):
    """VLLM's, with another buffer and another answer."""

    def __init__(self, *, fold: StreamFold, on_cleared: Callable[[], None], **options: Any) -> None:
        self._kept = _Kept(fold, on_cleared)
        super().__init__(**options)

    def _socket_setup(self) -> None:
        super()._socket_setup()  # before the thread starts that fills the buffer
        self._buffer = self._kept
        if self._replay is not None:
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def _service_replay(self) -> None:
        assert self._replay is not None
        request = replay.asked(self._replay.recv_multipart())
        if request is None:
            return
        identity, start = request
        ring, fold = self._kept.ring, self._kept.fold
        batches = (
            ring.since(start)
            if start or fold is None
            else replay.from_the_beginning(fold, ring.next_seq, time.time(), self._dp_rank)
        )
        if not replay.answer(self._replay, identity, self._topic_bytes, batches):
            logger.warning("a reader of KV events did not take its replay")

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant. While nothing is published."""
        self._kept.ring.check()
        if self._kept.fold is not None:
            self._kept.fold.check()

    def __repr__(self) -> str:
        return f"<InventoryPublisher {self._kept.ring!r} {self._kept.fold!r}>"


def can_answer(config: Any) -> bool:
    """Whether vLLM will make a publisher of the kind that ours replaces."""
    if config.publisher != "zmq":
        return False
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        logger.warning(
            "kv_event_inventory has no effect with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0: what it"
            " knows of blocks has their integer hashes"
        )
        return False
    return True


def answer_late_readers(max_bytes: int, on_cleared: Callable[[], None]) -> None:
    """The next publisher that vLLM makes in this process, for this engine, is ours.

    It makes it just after the connector of the scheduler. ``on_cleared``: all that was ever said is
    void for readers; called on the publisher's thread. ``max_bytes`` bounds the file with what
    describes blocks.
    """
    registry = EventPublisherFactory._registry

    def make(**options: Any) -> EventPublisher:
        registry["zmq"] = ZmqEventPublisher
        try:
            fold = StreamFold(lambda: SideFile(None, "", max_bytes))
        except OSError as e:
            logger.warning("no room for what KV events say (%s): replays are vLLM's", e)
            return ZmqEventPublisher(**options)
        return InventoryPublisher(fold=fold, on_cleared=on_cleared, **options)

    registry["zmq"] = make
