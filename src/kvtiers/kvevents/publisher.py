"""Events of an engine that is not vLLM, over ZeroMQ as vLLM publishes its own.

PUB sends each batch once; whoever is too slow misses some and sees it by the numbers. ROUTER
answers who asks for them again (:mod:`kvtiers.kvevents.replay`), from the beginning with what holds
now. What was not said yet waits in the narrator's table, what was not taken yet in queues of
ZeroMQ, one for each reader. These count messages: no batch is large, so they are bounded in bytes.
"""

import time
from collections.abc import Callable, Sequence

import zmq

from kvtiers.errors import ConfigError
from kvtiers.kvevents import replay
from kvtiers.kvevents.messages import SEQ_BYTES, Batch, KVEvent, encode_within
from kvtiers.kvevents.narrator import Narrator

_CHUNKS_PER_BATCH = 1024
_BATCH_BYTES = 64 << 10
_REPLAYED_AT_ONCE = 64
"""Batches of a replay, of about 1024 chunks, that may wait for its reader."""
_LOOK_AGAIN_S = 0.05
"""How often it is looked whether somebody asks for a replay."""


class Publisher:
    """An outlet of :class:`kvtiers.kvevents.announcer.Announcer`, used by its thread."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int | None = None,
        ring_bytes: int = 64 << 20,
        queue_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Endpoints as in vLLM's ``--kv-events-config``; those with ``*`` are bound.

        ``ring_bytes`` bounds what is kept for who missed something, ``queue_bytes`` what waits for
        each reader: beyond it that reader misses batches. ``topic`` is ``kv@POD@MODEL`` for llm-d.
        Raises ConfigError if an endpoint cannot be had.
        """
        if queue_bytes < 1:
            raise ConfigError(f"queue_bytes is {queue_bytes}: give 1 or more", key="queue_bytes")
        self._batch_bytes = min(_BATCH_BYTES, queue_bytes)
        self._topic = topic.encode()
        self._rank = rank
        self._clock = clock
        self._ring = replay.ReplayRing(ring_bytes)
        most = queue_bytes // self._batch_bytes
        self._pub = _socket(zmq.PUB, endpoint, most, bind=_is_bound(endpoint))
        self._router: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._router = _socket(zmq.ROUTER, replay_endpoint, _REPLAYED_AT_ONCE, bind=True)

    def room(self) -> int:
        """Always some: PUB drops, it does not wait."""
        return _CHUNKS_PER_BATCH

    def say(self, events: Sequence[KVEvent]) -> None:
        """Publish a batch, or several if it is large; none if there is nothing in it."""
        if not events:
            return
        batch = Batch(self._clock(), events, self._rank)
        for payload in encode_within(batch, self._batch_bytes):
            seq = self._ring.add(payload)
            self._pub.send_multipart((self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload))

    def serve(self, narrator: Narrator) -> float | None:
        """Answer who asks for a replay, one at a time: who asks all the time silences nobody."""
        if self._router is None:
            return None
        if not self._router.poll(0):
            return _LOOK_AGAIN_S
        request = replay.asked(self._router.recv_multipart())
        if request is not None:
            identity, start = request
            batches = (
                self._ring.since(start)
                if start
                else replay.from_the_beginning(
                    narrator.told, self._ring.next_seq, self._clock(), self._rank
                )
            )
            replay.answer(self._router, identity, self._topic, batches)
        return 0.0

    def close(self) -> None:
        """Leave the endpoints. What was said is on its way for a second."""
        self._pub.close(linger=1000)
        if self._router is not None:
            self._router.close(linger=1000)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self._ring.check()

    def __repr__(self) -> str:
        return f"<Publisher batch {self._ring.next_seq} is next, {self._ring!r}>"


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _socket(kind: int, endpoint: str, most: int, *, bind: bool) -> "zmq.Socket[bytes]":
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, most)  # messages, for each reader
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as e:
        socket.close(linger=0)
        raise ConfigError(
            f"the endpoint {endpoint} for KV events cannot be had ({e}); give another one",
            key="endpoint",
        ) from e
    return socket
