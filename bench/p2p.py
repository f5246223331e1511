"""Chunks of a peer beside the bare transport: a loop over sockets, and a transfer of NIXL's own.

    python -m bench.p2p [--rounds 15] [--tiny]

Two processes on loopback, one connection each way of moving. Ours: the producer has the chunks in
host memory; the consumer's tier is given one job for all of them; timed is from the job to its
outcome, so that the request, both threads, the checksum on either side and the outcome count. The
bare loop: the same chunks in the same order, each sent with a header of as many bytes as ours by
``sendmsg``, and received by ``recv_into`` to where it belongs. The bare transfer: one READ of all
chunks between two agents configured as ours are, the producer's looked after meanwhile. Sides take
turns. Prints::

    LIMIT p2p.tcp.<size> <the loop's time over ours>
    LIMIT p2p.nixl.<size> <the bare transfer's time over ours>
    TIME p2p.handshake <ms until a peer that was not known has answered a question of one chunk>
    TIME p2p.ask_absent <ms of the step that asks for 1,000 absent chunks, of a lookup after it is
        answered, and from the question to the answer>
    RATE ... <GB/s of ours and of the bare one>
"""

import argparse
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench.lines import median_of, remark
from kvtiers.chunks import ChunkLayout, GroupLayout, Key, Lookup, RequestContext, make_key
from kvtiers.core.exclusive import ExclusiveManager
from kvtiers.core.serving import ManagerParent
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import load_policy
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.base import Job, JobKind, JobOutcome
from kvtiers.tiers.p2p.build import build
from kvtiers.tiers.p2p.nixl import new_agent
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.us import Identity
from kvtiers.tiers.views import ChunkViews

_HEADER_BYTES = 32
_TCP = P2POptions(host="127.0.0.1", port=0, max_pinned_fraction=1.0, load_deadline_s=60.0)
_NIXL = replace(_TCP, transport="nixl", plaintext_data=True)
_SPAWN = multiprocessing.get_context("spawn")
PATIENCE_S = 60.0


def keys(count: int, name: str = "chunk") -> tuple[Key, ...]:
    """Of one prefix."""
    return tuple(make_key(f"{name}-{n}".encode().ljust(32, b"."), 0) for n in range(count))


@dataclass(frozen=True)
class Size:
    """What is moved."""

    chunk_bytes: int
    chunks: int
    options: P2POptions = _TCP

    @property
    def layout(self) -> ChunkLayout:
        """One group."""
        return ChunkLayout((GroupLayout(0, self.chunk_bytes, 16),))


class Engine:
    """Host memory, a manager and a ``p2p`` tier."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.memory = bytearray(size.chunks * size.chunk_bytes)
        self.memory[::4096] = b"x" * len(self.memory[::4096])  # its pages are there
        who = Identity("bench", size.layout, "bench")
        whole = memoryview(self.memory)
        self.tier = build("1:p2p", size.options, who, time.monotonic, memory=whole)
        self.manager = ExclusiveManager(
            lock=threading.RLock(),
            index=HostIndex(size.chunks, load_policy("lru", capacity=size.chunks)),
            layout=size.layout,
            view=self.view,
            tiers=(self.tier,),
            sink=lambda event: None,
        )
        most = self.manager.capacity
        parent = ManagerParent(
            self.manager, size.layout, self.view, time.monotonic, time.sleep, most
        )
        self.tier.serve(parent)

    def view(self, slot: int, nbytes: int, writable: bool) -> memoryview:
        """A slot."""
        start = slot * self.size.chunk_bytes
        return memoryview(self.memory)[start : start + nbytes]

    def store_all(self) -> None:
        """Fill host memory."""
        request = self.manager.on_new_request(RequestContext("store"))
        plan = self.manager.store(keys(self.size.chunks), request)
        self.manager.complete_store(plan.keys)
        self.manager.on_request_finished(request)


def _serve(pipe: Any, size: Size) -> None:
    """The producer of both kinds, in a process of its own."""
    engine = Engine(size)
    engine.store_all()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, agent = listener.getsockname()[1], None
        if size.options.transport == "nixl":
            agent = bare_agent(engine.memory)
            address = agent.get_agent_metadata(), address_of(memoryview(engine.memory))
        pipe.send((engine.tier.port, address))
        while agent is not None:
            pipe.recv()
            while not pipe.poll(0.0001):
                agent.get_new_notifs()
            pipe.recv()
        connection, _ = listener.accept()
        with connection:
            while pipe.recv():
                send_bare(connection, engine.memory, size)
    engine.tier.shutdown(1.0)


def bare_agent(memory: bytearray) -> Any:
    """An agent of NIXL's own that knows ``memory``."""
    agent = new_agent(("UCX",), 0)
    agent.register_memory([(address_of(memoryview(memory)), len(memory), 0, "")], "DRAM")
    return agent


class BareSockets:
    """The loop, for the consumer."""

    def __init__(self, pipe: Any, port: int, memory: bytearray, size: Size) -> None:
        self._pipe, self._memory, self._size = pipe, memory, size
        self._connection = socket.create_connection(("127.0.0.1", port))

    def move(self) -> None:
        """All chunks, once."""
        self._pipe.send(True)
        receive_bare(self._connection, self._memory, self._size)

    def close(self) -> None:
        """End it."""
        self._pipe.send(False)
        self._connection.close()


class BareTransfer:
    """NIXL's own, for the consumer."""

    def __init__(self, pipe: Any, where: tuple[bytes, int], memory: bytearray, size: Size) -> None:
        metadata, self._theirs = where
        self._ours, self._size = address_of(memoryview(memory)), size
        self._pipe, self._agent = pipe, bare_agent(memory)
        self._name = self._agent.add_remote_agent(metadata)

    def move(self) -> None:
        """All chunks, once. The producer looks after its agent meanwhile."""
        self._pipe.send(True)
        self._read()
        self._pipe.send(False)

    def _read(self) -> None:
        lists = [
            self._agent.get_xfer_descs(
                [
                    (start + n * self._size.chunk_bytes, self._size.chunk_bytes, 0)
                    for n in range(self._size.chunks)
                ],
                "DRAM",
            )
            for start in (self._ours, self._theirs)
        ]
        handle = self._agent.initialize_xfer("READ", *lists, self._name)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"the bare transfer ended as {state}")
        self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Nothing: the processes end."""


def send_bare(connection: socket.socket, memory: bytearray, size: Size) -> None:
    """Each chunk behind a header."""
    header, whole = memoryview(bytes(_HEADER_BYTES)), memoryview(memory)
    for n in range(size.chunks):
        left = [header, whole[n * size.chunk_bytes : (n + 1) * size.chunk_bytes]]
        while left:
            sent = connection.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if left:
                left[0] = left[0][sent:]


def receive_bare(connection: socket.socket, memory: bytearray, size: Size) -> None:
    """Each chunk to its place."""
    header, whole = memoryview(bytearray(_HEADER_BYTES)), memoryview(memory)
    for n in range(size.chunks):
        for view in (header, whole[n * size.chunk_bytes : (n + 1) * size.chunk_bytes]):
            left = view
            while left.nbytes:
                left = left[connection.recv_into(left) :]


@contextmanager
def producer(size: Size) -> Iterator[tuple[Any, int, Any]]:
    """A process; the pipe to it, its port, and where its bare side is."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, size), daemon=True)
    process.start()
    try:
        yield (ours, *ours.recv())
    finally:
        process.kill()
        process.join()


def context(port: int, name: str) -> RequestContext:
    """A request that names the producer."""
    where = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": port}
    return RequestContext(name, {"remote_kv_source": where})


class Consumer:
    """A tier that is driven by hand: without a scheduler whose steps would be timed, too."""

    def __init__(self, size: Size) -> None:
        self.engine = Engine(size)
        self.tier = self.engine.tier
        self._jobs = 0

    def ask(self, names: Sequence[Key], request: RequestContext) -> tuple[float, float, float]:
        """Seconds of the step, of a lookup of all after it, and until the answer."""
        began = time.perf_counter()
        self.tier.lookup(names, request)
        self.tier.on_schedule_end()
        asked = time.perf_counter()
        while self.tier.has_pending_work():
            if not self.tier._mailbox.wait(PATIENCE_S):
                raise SystemExit(f"no answer comes: {self.tier!r}")
            self.tier._take_notes()
        answered = time.perf_counter()
        self.tier.lookup(names, request)
        return asked - began, time.perf_counter() - answered, answered - began

    def load(self, names: tuple[Key, ...], request: RequestContext) -> float:
        """Seconds from the job to its outcome."""
        size = self.engine.size
        views = ChunkViews(
            lambda n: self.engine.view(n, size.chunk_bytes, True), [size.chunk_bytes] * len(names)
        )
        self._jobs += 1
        slots = tuple(range(len(names)))
        began = time.perf_counter()
        self.tier.submit_load(Job(self._jobs, JobKind.LOAD, names, slots, views, request))
        if not self.tier.drain_jobs(PATIENCE_S):
            raise SystemExit(f"no chunks come: {self.tier!r}")
        seconds = time.perf_counter() - began
        (outcome,) = self.tier.get_finished_jobs()
        if not isinstance(outcome, JobOutcome) or outcome.failed:
            raise SystemExit(f"chunks did not come: {outcome}")
        return seconds


def measure_chunks(name: str, size: Size, rounds: int) -> None:
    """Print ``LIMIT p2p.<name>``."""
    names, pairs = keys(size.chunks), []
    with producer(size) as (pipe, port, where):
        consumer = Consumer(size)
        kind = BareTransfer if size.options.transport == "nixl" else BareSockets
        bare = kind(pipe, where, consumer.engine.memory, size)
        for number in range(rounds + 2):
            request = context(port, f"r{number}")
            consumer.tier.on_new_request(request)
            consumer.ask(names, request)
            if set(consumer.tier.lookup(names, request)) != {Lookup.HIT}:
                raise SystemExit(f"the producer lacks chunks: {consumer.tier!r}")
            ours = consumer.load(names, request)
            consumer.tier.on_request_finished(request)
            began = time.perf_counter()
            bare.move()
            if number >= 2:
                pairs.append((ours, time.perf_counter() - began))
        bare.close()
        consumer.tier.shutdown(1.0)
    median_of("LIMIT", f"p2p.{name}", [theirs / ours for ours, theirs in pairs])
    moved = size.chunks * size.chunk_bytes
    rates = [moved / statistics.median(times) / 1e9 for times in zip(*pairs, strict=True)]
    remark("RATE", f"p2p.{name}", "{:.2f} {:.2f} GB/s: ours, the bare one".format(*rates))


def measure_questions(rounds: int) -> None:
    """Print what it costs to ask."""
    size = Size(4096, 16)
    absent = keys(1000, "absent")
    handshakes, steps = [], []
    with producer(size) as (_, port, _bare):
        for _ in range(rounds):
            consumer = Consumer(size)
            first, second = context(port, "first"), context(port, "second")
            consumer.tier.on_new_request(first)
            handshakes.append(consumer.ask(keys(1), first)[2] * 1e3)
            consumer.tier.on_new_request(second)
            steps.append([seconds * 1e3 for seconds in consumer.ask(absent, second)])
            consumer.tier.shutdown(1.0)
    remark("TIME", "p2p.handshake", f"{statistics.median(handshakes):.2f} ms")
    step, lookup, answer = (statistics.median(times) for times in zip(*steps, strict=True))
    words = "the step that asks, a lookup of all after the answer, until the answer"
    remark("TIME", "p2p.ask_absent", f"{step:.2f} {lookup:.2f} {answer:.2f} ms: {words}")


SIZES = {
    "tcp.256KiB": Size(256 << 10, 512),
    "tcp.2MiB": Size(2 << 20, 64),
    "nixl.256KiB": Size(256 << 10, 512, _NIXL),
    "nixl.2MiB": Size(2 << 20, 64, _NIXL),
}


def measure(rounds: int, tiny: bool = False) -> None:
    """Print every line."""
    for name, size in SIZES.items():
        measure_chunks(name, replace(size, chunks=4) if tiny else size, rounds)
    measure_questions(rounds)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    measure(3 if given.tiny else given.rounds, given.tiny)


if __name__ == "__main__":
    main()
