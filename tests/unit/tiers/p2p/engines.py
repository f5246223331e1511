"""Engines without an engine: a manager, host memory, a ``p2p`` tier, real sockets and threads."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvtiers.chunks import (
    PAGE_BYTES,
    ChunkLayout,
    GroupLayout,
    Key,
    Lookup,
    Namespace,
    RequestContext,
    make_key,
)
from kvtiers.core.exclusive import ExclusiveManager
from kvtiers.core.manager import ManagerOptions
from kvtiers.core.promote import PromoteOptions
from kvtiers.core.serving import ManagerParent
from kvtiers.events import Event
from kvtiers.host.index import HostIndex
from kvtiers.host.policies import load_policy
from kvtiers.tiers.base import SecondaryTierManager
from kvtiers.tiers.p2p.build import build
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.us import Identity

CHUNK_BYTES = 16 * PAGE_BYTES
LAYOUT = ChunkLayout((GroupLayout(0, CHUNK_BYTES, 16),))
NAMESPACE = Namespace({"model": "test"})
QUICK = P2POptions(
    host="127.0.0.1",
    port=0,
    handshake_deadline_s=1.0,
    lookup_deadline_s=1.0,
    load_deadline_s=2.0,
    park_deadline_s=3.0,
    hold_deadline_s=2.0,
    ping_interval_s=0.2,
    silence_deadline_s=1.0,
    stall_deadline_s=1.0,
    breaker_cooldown_s=0.5,
    max_pinned_fraction=0.9,
)
PATIENCE_S = 20.0


def keys(count: int, name: str = "k") -> list[Key]:
    return [make_key(f"{name}-{i}".encode().ljust(32, b"."), 0) for i in range(count)]


def payload(key: Key, size: int = CHUNK_BYTES) -> bytes:
    return (key * (size // len(key) + 1))[:size]


class Engine:
    """Steps only when it is told to; serves whether it steps or not."""

    def __init__(
        self,
        slots: int = 64,
        options: P2POptions = QUICK,
        tiers: Sequence[SecondaryTierManager] = (),
        layout: ChunkLayout = LAYOUT,
        namespace: Namespace = NAMESPACE,
        label: str = "engine",
        **endpoint: object,
    ) -> None:
        self.memory = bytearray(slots * layout.slot_bytes)
        self.layout = layout
        self.events: list[Event] = []
        self.tier = build(
            "1:p2p",
            options.placed(0, {}),
            Identity(namespace.id, layout, label),
            time.monotonic,
            memory=memoryview(self.memory) if options.transport == "nixl" else None,
            **endpoint,
        )
        self.endpoint = self.tier._endpoint
        self.manager = ExclusiveManager(
            lock=threading.RLock(),
            index=HostIndex(slots, load_policy("lru", capacity=slots)),
            layout=layout,
            view=self.view,
            tiers=(self.tier, *tiers),
            sink=self.events.append,
            options=ManagerOptions(promote=PromoteOptions(lookup_deadline_s=30.0)),
        )
        share = max(1, int(self.manager.capacity * options.max_pinned_fraction))
        self.parent = ManagerParent(
            self.manager, layout, self.view, time.monotonic, time.sleep, share
        )
        self.tier.serve(self.parent)
        self._requests = 0

    @property
    def port(self) -> int:
        return self.tier.port

    def view(self, slot: int, nbytes: int, writable: bool) -> memoryview:
        start = slot * self.layout.slot_bytes
        cut = memoryview(self.memory)[start : start + nbytes]
        return cut if writable else cut.toreadonly()

    def request(self, params: dict | None = None, name: str | None = None):
        self._requests += 1
        return self.manager.on_new_request(RequestContext(name or f"r{self._requests}", params))

    def store(self, names: Sequence[Key], request=None) -> None:
        """Bring chunks into host memory as an engine does."""
        handle = request or self.request()
        plan = self.manager.store(list(names), handle)
        assert not plan.declined
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            size = self.layout.chunk_bytes(key)
            self.view(slot, size, True)[:] = payload(key, size)
        self.manager.complete_store(plan.keys)
        if request is None:
            self.manager.on_request_finished(handle)

    def step(self) -> None:
        self.manager.end_step(time.monotonic())

    def pull(self, names: Sequence[Key], request, seconds: float = PATIENCE_S) -> list[Lookup]:
        """Look up until every verdict is HIT or MISS, as an engine does."""
        until = time.monotonic() + seconds
        while True:
            self.manager.poll(time.monotonic())
            verdicts = [self.manager.lookup(key, request) for key in names]
            self.step()
            if not {Lookup.RETRY, Lookup.HIT_PENDING} & set(verdicts):
                return verdicts
            assert time.monotonic() < until, (verdicts, self.tier, self.endpoint)
            time.sleep(0.002)

    def must_have(self, names: Iterable[Key]) -> None:
        for key in names:
            slot = self.manager._index.ready[key]
            size = self.layout.chunk_bytes(key)
            assert bytes(self.view(slot, size, False)) == payload(key, size), "wrong bytes"

    def rest(self) -> None:
        """Wait until nothing is in flight, and check everything."""
        until(lambda: (self.step(), not self.manager.has_pending_work(time.monotonic()))[1])
        until(lambda: not self.parent._pins and not self.parent._asking)
        self.manager.check()
        self.parent.check()
        self.on_io(self.endpoint.check)
        if len(self.endpoint._us.transports) == 1:
            self.memory.append(0)  # raises BufferError if somebody keeps a view
            self.memory.pop()

    def on_io(self, call: Callable[[], object]) -> object:
        """What ``call`` gives on the I/O thread."""
        done, result = threading.Event(), []

        def work() -> None:
            try:
                result.append(call())
            except BaseException as e:
                result.append(e)
            done.set()

        self.endpoint._loop.call(work)
        assert done.wait(PATIENCE_S)
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def close(self) -> None:
        self.manager.shutdown(PATIENCE_S, time.monotonic)
        self.memory.append(0)  # nobody keeps any of it


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


def source(engine_or_port, request: str = "x1", key: str = "remote_kv_source") -> dict:
    port = getattr(engine_or_port, "port", engine_or_port)
    return {key: {"kv_request_id": request, "remote_host": "127.0.0.1", "remote_port": port}}


@contextmanager
def engines(count: int = 2, **kind):
    made = []
    try:
        for number in range(count):
            made.append(Engine(**{"label": f"engine{number}", **kind}))
        yield made
    finally:
        for engine in made:
            engine.close()


def with_options(**changes: object) -> P2POptions:
    return replace(QUICK, **changes)
