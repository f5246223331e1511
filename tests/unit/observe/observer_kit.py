"""A manager over real memory and a real folder, with an observer before it, and raw requests."""

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtiers.chunks import Key, Lookup, RequestContext
from kvtiers.config import ObserveConfig, parse_config
from kvtiers.core.ledger import Request
from kvtiers.events import PRIMARY, LookupsSettled, MissReason, Run
from kvtiers.host.region import Region
from kvtiers.observe.assemble import Observed, recorder_of, start_observer
from kvtiers.observe.gauges import Gauges
from kvtiers.observe.server import Observer
from kvtiers.wiring import Wired, wire
from tests.unit.cli.cli_kit import CHUNK, NAMESPACE
from tests.unit.tiers.tier_kit import LAYOUT

SPAN = 16
"""Tokens of a chunk."""


class World:
    """What an engine has, without the engine."""

    def __init__(self, wired: Wired, region: Region, observer: Observer, gauges: Gauges) -> None:
        self.manager = wired.manager
        self.region = region
        self.observer = observer
        self.gauges = gauges

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.observer.port}"

    def begin(self, name: str, keys: Sequence[Key], tokens: int | None = None) -> Request:
        """A request that knows where its chunks lie."""
        ends = {key: SPAN * (i + 1) for i, key in enumerate(keys)}
        context = RequestContext(name, None, end_of=ends.get, tokens=tokens, arrived_at=1.0)
        return self.manager.on_new_request(context)

    def ask(self, name: str, keys: Sequence[Key], tokens: int | None = None) -> None:
        """A request as an engine makes it: ask until all is known, load, finish."""
        self.manager.poll(time.monotonic())
        request = self.begin(name, keys, tokens)
        while True:
            verdicts = []
            for key in keys:
                verdicts.append(self.manager.lookup(key, request))
                if verdicts[-1] is Lookup.MISS:
                    break
            if set(verdicts) <= {Lookup.HIT, Lookup.MISS}:
                break
            self.step()
        hits = keys[: verdicts.count(Lookup.HIT)]
        if hits:
            self.manager.load(hits, request)
            self.manager.complete_load(request)
        self.manager.on_request_finished(request)
        self.step()

    def step(self) -> None:
        self.manager.end_step(time.monotonic())
        for tier in self.manager.tiers:
            tier.drain_jobs(10.0)
        self.manager.poll(time.monotonic())
        self.gauges.refresh(self.manager.use, time.monotonic())


@contextmanager
def world(
    folder: Path, root: Path | None = None, observe: dict[str, Any] | None = None, **extra: Any
) -> Iterator[World]:
    """Of 16 slots; a tier over ``root`` if it is given."""
    region = Region.attach("observed", {}, 16, CHUNK, str(folder))
    tiers = [{"type": "fs", "root_dir": str(root), "capacity_bytes": 1 << 30}] if root else []
    settings = {"cpu_bytes_to_use": 16 * CHUNK, "secondary_tiers": tiers, **extra}
    config = parse_config({**settings, "observe": observe or {"port": 0}})
    assert isinstance(config.observe, ObserveConfig)
    recorder = recorder_of(config.observe)
    assert recorder is not None
    wired = wire(config, region, LAYOUT, NAMESPACE, listen=[recorder])
    gauges = Gauges(wired.metrics, wired.manager.tiers, CHUNK)
    observed = Observed(
        model="m",
        namespace=NAMESPACE,
        layout=LAYOUT,
        replica=0,
        manager=wired.manager,
        metrics=wired.metrics,
        gauges=gauges,
        inert=lambda: False,
    )
    observer = start_observer(config.observe, observed, recorder)
    assert observer is not None
    try:
        yield World(wired, region, observer, gauges)
    finally:
        observer.close()
        wired.manager.shutdown(5.0, time.monotonic)
        region.close()


def event(name: str = "r", *runs: Run, **fields: Any) -> LookupsSettled:
    """What is said of a request with these runs."""
    found: dict[str, int] = {}
    missed: dict[tuple[str, MissReason], int] = {}
    for run in runs:
        if run.source is not None:
            found[run.source] = found.get(run.source, 0) + run.chunks
        for miss in run.misses:
            missed[miss] = missed.get(miss, 0) + run.chunks
    return LookupsSettled(
        **{
            "request_id": name,
            "asked": sum(run.chunks for run in runs),
            "found": found,
            "missed": missed,
            "loaded": {tier: SPAN * chunks for tier, chunks in found.items()},
            "waited_s": 0.0,
            "took_s": {},
            "runs": runs,
            **fields,
        }
    )


def hits(first: int, count: int, source: str = PRIMARY, group: int = 0) -> Run:
    return Run(group, first, count, source, ())


def misses(first: int, count: int, *why: tuple[str, MissReason], group: int = 0) -> Run:
    return Run(group, first, count, None, why or ((PRIMARY, MissReason.ABSENT),))


def raw(port: int, request: bytes, *, timeout: float = 20.0) -> bytes:
    """All that is answered to these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(request)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    while some := connection.recv(1 << 16):
        found += some
    return found


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
    """Status, and the document or the bytes of the body."""
    lines = {"Host": f"127.0.0.1:{port}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return parsed(raw(port, f"{head}\r\n".encode()))


def parsed(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    return status, json.loads(body) if b"application/json" in head and body else body
