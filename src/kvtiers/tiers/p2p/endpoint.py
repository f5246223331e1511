"""An engine's end of the ``p2p`` tier: the I/O thread, what it owns, and the ways in.

Every method may be called on any thread and returns at once; only ``close`` waits, within its
deadline.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from kvtiers.errors import ConfigError, Kind
from kvtiers.events import MissReason
from kvtiers.tiers.base import Peers
from kvtiers.tiers.lanes import StartThread
from kvtiers.tiers.options import bad_option, require
from kvtiers.tiers.p2p.guests import Guests
from kvtiers.tiers.p2p.line import Lines, listening
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.names import Names
from kvtiers.tiers.p2p.nixl import NixlTransport, new_agent
from kvtiers.tiers.p2p.notes import (
    Answered,
    Ask,
    Failure,
    Load,
    Loaded,
    Local,
    Moved,
    Over,
    ToServing,
    ToTier,
)
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.parent import Parent
from kvtiers.tiers.p2p.peer import Peer, Standing
from kvtiers.tiers.p2p.protocol import Code, Verdict
from kvtiers.tiers.p2p.roles import Source
from kvtiers.tiers.p2p.security import Doorkeeper, bind_address, security_of
from kvtiers.tiers.p2p.serving import Server, ServingThread
from kvtiers.tiers.p2p.tcp import TcpTransport
from kvtiers.tiers.p2p.tcp_sender import Patience
from kvtiers.tiers.p2p.transport import Transport
from kvtiers.tiers.p2p.us import Identity, Us

_log = logging.getLogger("kvtiers")

_TOO_MANY = Failure(Kind.IO, "more peers are asked than max_peers")


class _ToIO:
    """What serving says to peers, taken to the I/O thread."""

    def __init__(self, loop: Loop, guests: Guests) -> None:
        self._loop = loop
        self._guests = guests

    def answer(self, session: int, question: int, verdicts: dict[int, Verdict], last: bool) -> None:
        self._loop.call(partial(self._guests.answer, session, question, verdicts, last))

    def push(self, session: int, transfer: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        self._loop.call(partial(self._guests.push, session, transfer, chunks))

    def done(self, session: int, transfer: int, failed: dict[int, Code]) -> None:
        self._loop.call(partial(self._guests.done, session, transfer, failed))


class Endpoint:
    """Sockets, sessions and threads of one engine."""

    def __init__(
        self,
        options: P2POptions,
        identity: Identity,
        post: Callable[[ToTier], None],
        clock: Callable[[], float],
        *,
        memory: memoryview | None,
        names: Names,
        start_thread: StartThread,
    ) -> None:
        """``options`` are ``placed``; ``memory`` is all of host memory, for NIXL.

        Raises ConfigError naming the option, with nothing left.
        """
        address = bind_address(options)
        security = security_of(options)
        self._options = options
        self._post = post
        self._start_thread = start_thread
        self._clock = clock
        self._peers: OrderedDict[tuple[str, int], Peer] = OrderedDict()
        self._serving: ServingThread | None = None
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = Loop(clock)
        self._doorkeeper = None
        try:
            if security is not None:
                self._doorkeeper = Doorkeeper(self._context, self._loop, security)
            router = listening(self._context, address, options.port or 0, security)
            transports = self._transports(address, memory)
        except ConfigError:
            self._context.destroy(0)
            self._loop.close()
            raise
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rsplit(":", 1)[1].rstrip("\0"))
        """Where peers are answered; another than the option if that is 0."""
        self._us = Us(identity, options, self._loop, transports)
        self._guests = Guests(self._us, router, self._serve)
        plain = options.plaintext_data
        self._lines = Lines(self._context, self._loop, names, security, plain)
        self._thread = start_thread(self._loop.run, "kvtiers-p2p-io")

    def _transports(self, address: str, memory: memoryview | None) -> tuple[Transport, ...]:
        options = self._options
        try:
            patience = Patience(options.stall_deadline_s, options.longest_load_s)
            tcp = TcpTransport(self._loop, address, options.data_port, patience)
        except OSError as e:
            complaint = f"is {options.data_port}, which cannot be bound: {e.strerror}"
            raise bad_option("data_port", complaint) from e
        if options.transport == "tcp":
            return (tcp,)
        try:
            require(
                memory is not None, "transport", "is nixl, which needs host memory: this is a bug"
            )
            assert memory is not None
            agent = new_agent(options.backends, options.num_threads)
            longest_s = options.longest_load_s
            return NixlTransport(self._loop, memory, agent, self._start_thread, longest_s), tcp
        except ConfigError:
            tcp.close()
            raise

    # -- serving ---------------------------------------------------------------------------------

    def serve(self, parent: Parent) -> None:
        """Answer peers from these chunks; before it, every chunk is absent for them."""
        server = Server(parent, _ToIO(self._loop, self._guests), self._options)
        self._serving = ServingThread(server, parent.listen, self._clock, self._start_thread)

    def local(self, request: str, begins: bool) -> None:
        """A ``remote_decoder`` request began here, or will store nothing more."""
        if self._serving is not None:
            self._serving.post(Local(request, begins))

    def _serve(self, note: ToServing) -> None:
        if self._serving is not None:
            self._serving.post(note)

    # -- asking ----------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Find out which chunks a peer has; ``Answered`` notes come for all of them."""
        self._loop.call(partial(self._ask, ask))

    def load(self, load: Load) -> None:
        """Bring chunks; ``Loaded`` notes come for all of them."""
        self._loop.call(partial(self._load, load))

    def over(self, over: Over) -> None:
        """A request is over: its peer need not keep anything for it."""
        self._loop.call(partial(self._over, over))

    def _ask(self, ask: Ask) -> None:
        peer = self._peer(ask.source)
        if peer is None:
            self._post(Answered(ask.number, dict.fromkeys(ask.keys, False), MissReason.FAILED))
        else:
            peer.ask(ask)

    def _load(self, load: Load) -> None:
        peer = self._peer(load.source)
        if peer is None:
            self._post(Loaded(load.job, (), dict.fromkeys(load.keys, _TOO_MANY), 0))
        else:
            peer.load(load)

    def _over(self, over: Over) -> None:
        peer = self._peers.get((over.source.host, over.source.port))
        if peer is not None:
            peer.over(over)

    def _peer(self, source: Source) -> Peer | None:
        """The peer of that address; None if there are too many."""
        name = (source.host, source.port)
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= self._options.max_peers:
                unused = [n for n, p in self._peers.items() if p.unused]
                if not unused:
                    return None
                # Anybody can name peers that are not there: they may not keep others out.
                del self._peers[next((n for n in unused if self._peers[n].idle), unused[0])]
            peer = self._peers[name] = Peer(*name, self._us, self._lines, self._post)
        self._peers.move_to_end(name)
        return peer

    # -- for people ------------------------------------------------------------------------------

    @property
    def gave(self) -> Moved:
        """What went out to peers since the start."""
        return self._guests.gave

    def peers(self) -> Peers:
        """How many there are, by what there is to do with them."""
        known = list(self._peers.values())  # in one go: the I/O thread goes on
        count = Counter(peer.standing for peer in known)
        return Peers(
            count[Standing.CONNECTED],
            count[Standing.DIALLING],
            count[Standing.LEFT_ALONE],
            count[Standing.IDLE],
            served=self._guests.count,
        )

    # -- life ------------------------------------------------------------------------------------

    def close(self, deadline_s: float) -> bool:
        """Say goodbye, let go of all memory; whether that was done in time. Twice is fine."""
        if self._closed:
            return True
        self._closed = True
        until = self._clock() + deadline_s
        self._loop.call(self._end)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _log.warning("p2p: the I/O thread does not end")
            return False
        if self._serving is not None:
            return self._serving.stop(max(0.1, until - self._clock()))
        return True

    def _end(self) -> None:
        try:
            for peer in self._peers.values():
                peer.stop()
            self._guests.close()
            for transport in self._us.transports:
                transport.close()
            if self._doorkeeper is not None:
                self._doorkeeper.close()
        finally:
            self._loop.stop()
            self._context.term()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant. Caller guarantees: it is at rest."""
        assert len(self._peers) <= self._options.max_peers, "more peers than max_peers"
        for peer in list(self._peers.values()):
            peer.check()
        self._guests.check()

    def __repr__(self) -> str:
        return f"<Endpoint port {self.port}: {len(self._peers)} peers, {self._guests!r}>"
