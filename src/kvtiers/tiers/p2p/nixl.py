"""Bulk data by NIXL: the consumer reads chunks out of the producer's host memory.

The producer says where a pinned chunk lies and what the XXH3-64 of its bytes is; the consumer reads
it into the slot, sums it, and says that it need not be kept. No engine of ours writes another's
memory; but UCX would let it: over TCP and shared memory whoever is let in can write all memory of
the process, registered or not. What UCX chooses below is UCX's affair, and so is where it listens:
that is neither loopback nor authenticated by us, see decision 0022.

NIXL's own thread would spin for ever, so it is not started. One of ours does its work, as long as
something is being read, here or by others (``reading.py``); the control plane says when that is.
"""

import logging
import os
import struct
import threading
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvtiers.errors import ConfigError
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.lanes import StartThread
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.nixl_receiver import NixlReceiver, Stuck
from kvtiers.tiers.p2p.nixl_sender import NixlSender
from kvtiers.tiers.p2p.reading import Forget, Reader
from kvtiers.tiers.p2p.transport import Delivered, Sent
from kvtiers.tiers.p2p.wire import ProtocolError

_log = logging.getLogger("kvtiers")

_OFFER = struct.Struct("<QQ")
_CLOSE_S = 3.0
_TRUST = (
    "p2p: transport is nixl, by which peers can write this process's memory, too, and UCX listens "
    "on %s (UCX_NET_DEVICES): let nobody else be on that network, or use transport tcp"
)
_MOST_STUCK = 8
"""Reads that do not end keep at most about this part of host memory: one of so many."""


def new_agent(backends: Sequence[str], num_threads: int) -> Any:
    """An agent of NIXL without threads that spin: it gets on only while it is called.

    Raises ConfigError if there is none to be had.
    """
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as e:
        raise ConfigError(
            f"transport is nixl, which is not installed ({e}): pip install nixl, "
            "or use transport tcp",
            key="transport",
        ) from e
    try:
        config = nixl_agent_config(
            enable_prog_thread=False, backends=list(backends), num_threads=num_threads
        )
        agent = nixl_agent(f"kvtiers-{uuid.uuid4()}", config)
    except Exception as e:
        raise ConfigError(f"transport is nixl, which does not start: {e}", key="transport") from e
    missing = [name for name in backends if name not in agent.backends]
    if missing or not backends:
        have = ", ".join(agent.get_plugin_list())
        words = f"backends name {', '.join(missing) or 'none'}: NIXL has {have} here"
        raise ConfigError(words, key="backends")
    return agent


_KEPT: list["NixlTransport"] = []
"""Agents that still read at shutdown, and their memory."""


class NixlTransport:
    """An agent of NIXL that knows this engine's host memory."""

    name = b"nixl"

    def __init__(
        self,
        loop: Loop,
        memory: memoryview,
        agent: Any,
        start_thread: StartThread,
        longest_load_s: float,
    ) -> None:
        """``memory`` is all of host memory, ours from now on.

        After ``longest_load_s`` no consumer waits for a chunk that it was offered.
        Raises ConfigError if NIXL does not take it.
        """
        self._loop = loop
        self._longest_load_s = longest_load_s
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
        _log.warning(_TRUST, os.environ.get("UCX_NET_DEVICES", "all network devices"))
        self._stuck = Stuck(memory.nbytes // _MOST_STUCK)
        self._users: dict[bytes, int] = {}
        """Sessions that read from a producer's agent."""
        self._reader = Reader(agent, loop.clock)
        self._thread: threading.Thread = start_thread(self._run, "kvtiers-p2p-nixl")

    def _run(self) -> None:
        self._reader.run()
        if self._reader.active:
            # To end the agent would be safe here, but a paused peer whose UCX still owes us bytes
            # dies of it when it goes on. So both stay until the process ends.
            _log.warning("p2p: NIXL still reads into host memory: it stays until the process ends")
            _KEPT.append(self)
            return
        try:
            self._agent.deregister_memory(self._registered)
        except Exception as e:
            _log.warning("p2p: NIXL does not let go of host memory: %s", e)
        else:
            self._memory.release()  # until now nobody could unmap it

    @property
    def has_room(self) -> bool:
        """Whether reads that do not end keep less of host memory than they may."""
        return self._stuck.has_room

    def send_to(self, calls: Sent) -> NixlSender:
        """It has no connection of its own."""
        lend = self._reader.queue.put
        return NixlSender(self._loop, calls, self._offer, lend, self._longest_load_s)

    def receive_from(self, host: str, offer: bytes, calls: Delivered) -> NixlReceiver:
        """The producer's memory and agent. Raises ProtocolError."""
        if len(offer) <= _OFFER.size:
            raise ProtocolError("its offer of NIXL is none")
        address, nbytes = _OFFER.unpack_from(offer)
        metadata = offer[_OFFER.size :]
        self._users[metadata] = self._users.get(metadata, 0) + 1
        forget = partial(self._forget, metadata)
        memory = range(address, address + nbytes)
        read = self._reader.queue.put
        return NixlReceiver(self._loop, memory, metadata, calls, read, forget, self._stuck)

    def _forget(self, metadata: bytes) -> None:
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
