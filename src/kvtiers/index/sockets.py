"""The two sockets of a stream of events: what comes on its own, and what is asked for again.

As vLLM's publisher does it: a batch is [topic, number (8 bytes, big-endian), payload]; a replay is
asked for by [empty, number] and answered by [empty, topic, number, payload] for each batch that is
kept from that number on, then by one whose number is all ones.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvtiers.kvevents.messages import END_OF_REPLAY, SEQ_BYTES

PAUSE_S = 2.0
"""How long a replay may pause."""

_AT_ONCE = 64
"""After so many batches of a replay others have their turn."""
_MAX_PAYLOAD = 64 << 20
_MAX_WAITING = 10_000
"""Batches that came and were not looked at; above it they are lost, which shows as a gap."""
_HEARTBEAT_MS, _SILENT_MS = 5_000, 15_000
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 5_000


class Message(NamedTuple):
    """One batch on its way."""

    seq: int
    payload: bytes


class Link(NamedTuple):
    """The connection was made, or lost."""

    up: bool


class Live:
    """What an engine publishes. It connects, and connects again, for as long as it is open."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, topic: str) -> None:
        """Call it on the loop that it is used on; close it there."""
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        _common(self._socket)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)

    async def next(self, timeout_s: float) -> Message | Link | None:
        """What happened next; None: nothing within that time. Batches go before news of the link,
        and what is no batch counts as nothing.
        """
        ready = dict(await self._poller.poll(int(timeout_s * 1000)))
        if self._socket in ready:
            return _message(await self._socket.recv_multipart())
        if self._monitor in ready:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            return Link(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return None

    def close(self) -> None:
        """Nothing more is wanted."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


async def replayed(
    context: zmq.asyncio.Context, endpoint: str, start: int, until: float
) -> AsyncGenerator[Message, None]:
    """The batches from ``start`` on that are kept, in order.

    Some are missing where they came faster than they could be sent: a publisher drops what it has
    no room for.

    Raises TimeoutError if the end does not come ``until`` then, by the clock of the loop.
    """
    loop = asyncio.get_running_loop()
    with closing(context.socket(zmq.DEALER)) as socket:
        socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        _common(socket)
        socket.connect(endpoint)
        await socket.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big")])
        for count in itertools.count(1):
            # Where something is always there nothing waits: no deadline would end it, and nobody
            # else had a turn.
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
            now = loop.time()
            if now >= until:
                raise TimeoutError
            async with asyncio.timeout_at(min(until, now + PAUSE_S)):
                frames = await socket.recv_multipart()
            if len(frames) >= 3 and frames[-2] == END_OF_REPLAY:
                return
            message = _message(frames)
            if message is not None:
                yield message


def _common(socket: "zmq.asyncio.Socket") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_PAYLOAD)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)


def _message(frames: list[bytes]) -> Message | None:
    """The last two frames are what counts: publishers differ in those before them."""
    if len(frames) < 3 or len(frames[-2]) != SEQ_BYTES:
        return None
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])
