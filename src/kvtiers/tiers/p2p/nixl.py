"""Bulk data by NIXL: the consumer reads chunks out of the producer's host memory.

The producer says where a pinned chunk lies and what the XXH3-64 of its bytes is; the consumer reads
it into the slot, sums it, and says that it need not be kept. So nothing is ever written by another.
What UCX chooses below (RDMA, shared memory, TCP) is UCX's affair, and so is where it listens: that
is neither loopback nor authenticated by us, see decision 0022.
"""

import logging
import struct
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from xxhash import xxh3_64_intdigest

from kvtiers.errors import ConfigError
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.lanes import StartThread
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.reading import Chunk, Forget, Read, Reader
from kvtiers.tiers.p2p.transport import Delivered, Sent
from kvtiers.tiers.p2p.wire import ProtocolError

_log = logging.getLogger("kvtiers")

_OFFER = struct.Struct("<QQ")
_TURN_BYTES = 2 << 20
"""Summed before others have their turn."""
_CHUNKS_AT_ONCE = 64
"""Announced together."""
_READ_BYTES = 4 << 20
"""Read together: it still lies in the processor's cache when it is summed."""


def new_agent(backends: Sequence[str], num_threads: int) -> Any:
    """An agent of NIXL. Raises ConfigError if there is none to be had."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as e:
        raise ConfigError(
            f"transport is nixl, which is not installed ({e}): pip install nixl", key="transport"
        ) from e
    try:
        config = nixl_agent_config(backends=list(backends), num_threads=num_threads)
        return nixl_agent(f"kvtiers-{uuid.uuid4()}", config)
    except Exception as e:
        raise ConfigError(f"transport is nixl, which does not start: {e}", key="transport") from e


class NixlSender:
    """Sums chunks and says where they are."""

    def __init__(self, loop: Loop, calls: Sent, offer: bytes) -> None:
        self.offer = offer
        self._loop = loop
        self._calls = calls
        self._queue: deque[tuple[int, int, memoryview]] = deque()
        self._announced: set[tuple[int, int]] = set()
        self._turn_is_due = False
        self._closed = False

    def push(self, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Queue them to be summed."""
        self._queue.extend((transfer, place, view) for place, view in chunks)
        self._go_on()

    def _go_on(self) -> None:
        if self._queue and not self._turn_is_due and not self._closed:
            self._turn_is_due = True
            self._loop.at(self._loop.clock(), self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        budget = _TURN_BYTES
        rows: dict[int, list[tuple[int, int, int]]] = {}
        while self._queue and budget > 0 and not self._closed:
            transfer, place, view = self._queue.popleft()
            try:
                row = (place, address_of(view), xxh3_64_intdigest(view))
                budget -= view.nbytes
            except ValueError:  # host memory was reset
                self._calls.sent(transfer, place, False)
                continue
            self._announced.add((transfer, place))
            rows.setdefault(transfer, []).append(row)
            if len(rows[transfer]) == _CHUNKS_AT_ONCE:
                self._calls.ready(transfer, rows.pop(transfer))
        for transfer, announced in rows.items():
            self._calls.ready(transfer, announced)
        self._go_on()

    def taken(self, transfer: int, places: Sequence[int]) -> None:
        """Those are done. Raises ProtocolError for what was not announced."""
        named = {(transfer, place) for place in places}
        if not named <= self._announced:
            raise ProtocolError("you took what was not offered")
        self._announced -= named
        for place in places:
            self._calls.sent(transfer, place, True)

    def drop(self, transfer: int) -> None:
        """The consumer reads none of it any more, or does not count what it reads."""
        queued = [place for number, place, _ in self._queue if number == transfer]
        self._queue = deque(entry for entry in self._queue if entry[0] != transfer)
        announced = {entry for entry in self._announced if entry[0] == transfer}
        self._announced -= announced
        for place in (*queued, *(place for _, place in announced)):
            self._calls.sent(transfer, place, False)

    def close(self) -> None:
        """Announce nothing more."""
        self._closed = True
        self._queue.clear()
        self._announced.clear()

    def check(self) -> None:
        """Raise AssertionError if chunks wait for a turn that does not come."""
        assert not self._queue or self._turn_is_due or self._closed, "chunks wait for no turn"

    def __repr__(self) -> str:
        return f"<NixlSender {len(self._queue)} to be summed, {len(self._announced)} offered>"


class NixlReceiver:
    """Reads into slots."""

    def __init__(
        self, transport: "NixlTransport", memory: range, metadata: bytes, calls: Delivered
    ) -> None:
        """``memory``: the addresses of the producer's host memory."""
        self._transport = transport
        self._memory = memory
        self._metadata = metadata
        self._calls = calls
        self._expected: dict[int, list[memoryview]] = {}
        self._reading: dict[int, set[int]] = {}
        self._stopped: set[int] = set()
        self._closed = False

    def expect(self, transfer: int, views: Sequence[memoryview]) -> None:
        """Nothing lands before it is said to be ready."""
        self._expected[transfer] = list(views)

    def ready(self, transfer: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Read them. Raises ProtocolError for addresses that are not the producer's memory."""
        views, reading = self._expected[transfer], self._reading.setdefault(transfer, set())
        found = []
        for place, address, checksum in chunks:
            view = views[place]
            if place in reading:
                raise ProtocolError("it brings a chunk twice")
            if address not in self._memory or address + view.nbytes > self._memory.stop:
                raise ProtocolError("it brings a chunk that is not in its memory")
            found.append(Chunk(place, view, address_of(view), address, checksum))
        reading.update(chunk.place for chunk in found)
        for part in _parts(found):
            self._transport.read(Read(self._metadata, part, partial(self._ended, transfer)))

    def _ended(self, transfer: int, whole: dict[int, bool], why: str) -> None:
        """Runs on the reading thread."""
        self._transport.loop.call(partial(self._read, transfer, whole, why))

    def _read(self, transfer: int, whole: dict[int, bool], why: str) -> None:
        reading = self._reading[transfer]
        reading.difference_update(whole)
        if transfer in self._stopped:
            if not reading:
                self._forget_stopped(transfer)
            return
        if why:
            self._calls.broken(why, False)
            return
        self._calls.taken(transfer, list(whole))
        for place, ok in whole.items():
            self._calls.arrived(transfer, place, ok)

    def _forget_stopped(self, transfer: int) -> None:
        self._stopped.discard(transfer)
        del self._reading[transfer]
        self._calls.stopped(transfer)
        self._let_go_if_closed()

    def stop(self, transfer: int) -> bool:
        """What is being read goes on."""
        self._expected.pop(transfer, None)
        if self._reading.get(transfer):
            self._stopped.add(transfer)
            return False
        self._reading.pop(transfer, None)
        return True

    def forget(self, transfer: int) -> None:
        """All of it was read."""
        self._expected.pop(transfer, None)
        self._reading.pop(transfer, None)

    def close(self) -> None:
        """Read nothing more; forget the producer when nothing is being read from it."""
        if not self._closed:
            self._closed = True
            self._let_go_if_closed()

    def _let_go_if_closed(self) -> None:
        if self._closed and not self._reading:
            self._transport.forget(self._metadata)

    def check(self) -> None:
        """Raise AssertionError if something is read that was neither expected nor stopped."""
        known = self._expected.keys() | self._stopped
        assert {t for t, places in self._reading.items() if places} <= known, "read for nobody"

    def __repr__(self) -> str:
        count = sum(map(len, self._reading.values()))
        return f"<NixlReceiver {count} chunks of {len(self._expected)} transfers are read>"


class NixlTransport:
    """An agent of NIXL that knows this engine's host memory."""

    name = b"nixl"

    def __init__(
        self, loop: Loop, memory: memoryview, agent: Any, start_thread: StartThread
    ) -> None:
        """``memory`` is all of host memory, ours from now on.

        Raises ConfigError if NIXL does not take it.
        """
        self.loop = loop
        self._memory = memory
        address = address_of(memory)
        try:
            self._registered = agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM")
            metadata = agent.get_agent_metadata()
        except Exception as e:
            raise ConfigError(
                f"transport is nixl, which does not take host memory: {e}", key="transport"
            ) from e
        self._offer = _OFFER.pack(address, memory.nbytes) + metadata
        self._agent = agent
        self._users: dict[bytes, int] = {}
        """Sessions that read from a producer's agent."""
        self._reader = Reader(agent)
        self._thread: threading.Thread = start_thread(self._run, "kvtiers-p2p-nixl")

    def _run(self) -> None:
        self._reader.run()
        try:
            self._agent.deregister_memory(self._registered)
        except Exception as e:
            _log.warning("p2p: NIXL does not let go of host memory: %s", e)
        else:
            self._memory.release()  # until now nobody could unmap it

    def send_to(self, calls: Sent) -> NixlSender:
        """It has no connection of its own."""
        return NixlSender(self.loop, calls, self._offer)

    def receive_from(self, host: str, offer: bytes, calls: Delivered) -> NixlReceiver:
        """The producer's memory and agent. Raises ProtocolError."""
        if len(offer) <= _OFFER.size:
            raise ProtocolError("its offer of NIXL is none")
        address, nbytes = _OFFER.unpack_from(offer)
        metadata = offer[_OFFER.size :]
        self._users[metadata] = self._users.get(metadata, 0) + 1
        return NixlReceiver(self, range(address, address + nbytes), metadata, calls)

    def read(self, read: Read) -> None:
        """Have it read."""
        self._reader.queue.put(read)

    def forget(self, metadata: bytes) -> None:
        """A session reads no more from this agent."""
        self._users[metadata] -= 1
        if not self._users[metadata]:
            del self._users[metadata]
            self._reader.queue.put(Forget(metadata))

    def close(self) -> None:
        """End the reading thread, after what it reads, and give host memory back."""
        self._reader.queue.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("p2p: NIXL still reads into host memory at shutdown")

    def check(self) -> None:
        """Raise AssertionError if nobody reads from a producer that is known."""
        assert all(count > 0 for count in self._users.values()), "a producer has no reader"

    def __repr__(self) -> str:
        return f"<NixlTransport {len(self._users)} producers, {self._reader!r}>"


_CLOSE_S = 3.0


def _parts(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Runs of about ``_READ_BYTES``, at least a chunk each."""
    parts: list[list[Chunk]] = []
    size = _READ_BYTES
    for chunk in chunks:
        if size >= _READ_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(chunk)
        size += chunk.view.nbytes
    return parts
