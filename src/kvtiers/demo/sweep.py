"""Requests/s for pools of conversations that fit the device, fit the host, fit neither."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtiers.demo.client import ChatClient
from kvtiers.demo.history import Request, build_conversation
from kvtiers.demo.passes import Stage, vllm_server, warm_up
from kvtiers.demo.plan import SERVED_NAME, Mode, ModelGeometry, ServerPlan, connector
from kvtiers.demo.plot import plot_sweep
from kvtiers.errors import Kind, KVTiersError

DEVICE_BLOCKS = 40
HOST_CHUNKS = 112
DOCUMENT_CHARS = 3300
"""About 800 tokens: 6 or 7 chunks a conversation."""
MAX_TOKENS = 4
REPLAY_S = 30.0
"""A pool is replayed once, or for so many seconds."""

_MODES = (Mode.NONE, Mode.HOST, Mode.DISK)


@dataclass(frozen=True, slots=True)
class Pool:
    """Conversations that are visited in turn."""

    name: str
    conversations: int


POOLS = (Pool("fits the device", 4), Pool("fits the host", 10), Pool("fits neither", 30))


@dataclass(frozen=True, slots=True)
class Rate:
    """What one configuration did with one pool."""

    mode: Mode
    pool: str
    conversations: int
    requests: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Requests/s."""
        return self.requests / self.seconds


def run_sweep(stage: Stage, output: Path) -> int:
    """Measure every configuration with every pool; writes ``sweep.json`` and ``sweep.png``."""
    rates: list[Rate] = []
    for mode in _MODES:
        print(f"{mode.title}: starting the server", flush=True)
        plan = sweep_plan(mode, stage.geometry, stage.tier)
        with vllm_server(plan, stage, f"sweep-{mode.value}") as server:
            client = ChatClient(server.port, SERVED_NAME)
            warm_up(client)
            for pool, visits in zip(POOLS, pool_visits(), strict=True):
                rate = _measure(client, mode, pool, visits)
                rates.append(rate)
                print(f"  {pool.name}: {rate.per_second:.2f} requests/s", flush=True)
    _write(rates, output)
    print(f"RESULT ok {len(rates)} rates were measured")
    return 0


def sweep_plan(mode: Mode, geometry: ModelGeometry, tier: Mapping[str, Any]) -> ServerPlan:
    """The server of the configuration ``mode``: the same device and host sizes in all."""
    if mode is Mode.NONE:
        return ServerPlan(DEVICE_BLOCKS)
    below = tier if mode is Mode.DISK else None
    return ServerPlan(DEVICE_BLOCKS, connector(HOST_CHUNKS * geometry.chunk_bytes, below))


def pool_visits() -> tuple[tuple[tuple[Request, ...], tuple[Request, ...]], ...]:
    """Per pool its first and its second visits; no two pools share a conversation."""
    visits = []
    number = 0
    for pool in POOLS:
        chats = [
            build_conversation(number + i, turns=2, document_chars=DOCUMENT_CHARS)
            for i in range(pool.conversations)
        ]
        visits.append((tuple(c[0] for c in chats), tuple(c[1] for c in chats)))
        number += pool.conversations
    return tuple(visits)


def _measure(
    client: ChatClient,
    mode: Mode,
    pool: Pool,
    visits: tuple[Sequence[Request], Sequence[Request]],
) -> Rate:
    first, second = visits
    for request in first:
        client.ask(request.messages, MAX_TOKENS)
    started = time.monotonic()
    done = 0
    for request in second:
        client.ask(request.messages, MAX_TOKENS)
        done += 1
        if time.monotonic() - started > REPLAY_S:
            break
    return Rate(mode, pool.name, pool.conversations, done, time.monotonic() - started)


def _write(rates: Sequence[Rate], output: Path) -> None:
    if len(rates) != len(_MODES) * len(POOLS):
        raise KVTiersError("the sweep is incomplete: run it again", kind=Kind.IO, operation="demo")
    rows = [{**asdict(r), "mode": r.mode.value, "requests_per_s": r.per_second} for r in rates]
    (output / "sweep.json").write_text(json.dumps(rows, indent=1) + "\n")
    by_mode = {m: [r.per_second for r in rates if r.mode is m] for m in _MODES}
    labels = [f"{p.name}\n({p.conversations} conversations)" for p in POOLS]
    plot_sweep(output / "sweep.png", labels, by_mode)
    print(f"All numbers: {output / 'sweep.json'}   picture: {output / 'sweep.png'}")
