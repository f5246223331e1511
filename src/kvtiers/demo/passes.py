"""Replaying the history against real servers, one request at a time."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.demo.client import ChatClient
from kvtiers.demo.history import Message, Request
from kvtiers.demo.metrics import TokenCounts, parse_counts
from kvtiers.demo.plan import (
    SERVED_NAME,
    Break,
    Mode,
    ModelGeometry,
    ServerPlan,
    server_arguments,
    server_environment,
    server_plan,
)
from kvtiers.demo.progress import Progress
from kvtiers.demo.records import PassRecord, TurnRecord
from kvtiers.demo.server import Server, free_port
from kvtiers.errors import Kind, KVTiersError

MAX_TOKENS = 20
START_STEPS = 12
"""What a start of the server is worth on the progress bar, in turns."""
# Shorter than a block, so that it is neither cached nor stored.
_WARM_UP = (Message("user", "Say hello."),)
_READING_S = 1.0
"""Between an answer and the next request, where a tier is written to meanwhile. A person reads for
longer; without it the next prompt drives out of a small host memory what a slow tier did not take
yet, which then is computed again."""
_COUNTERS_S = 5.0
_COUNTERS_POLL_S = 0.05
_PAYLOAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Stage:
    """What all passes share."""

    model: Path
    geometry: ModelGeometry
    logs: Path
    disk_root: Path
    """Where files may be made, and those of the disk tier are."""
    tier: Mapping[str, Any]
    """What stands behind host memory: an entry of ``secondary_tiers``."""
    progress: Progress
    broken: Break | None = None


def run_pass(mode: Mode, history: Sequence[Request], stage: Stage) -> PassRecord:
    """Replay ``history`` in ``mode``. Raises KVTiersError if the server fails."""
    plan = server_plan(mode, stage.geometry, stage.tier, stage.broken)
    halves = split_at_restart(history) if mode is Mode.DISK else (tuple(history),)
    turns: list[TurnRecord] = []
    starts: list[float] = []
    for half, requests in enumerate(halves):
        if half > 0 and stage.broken is Break.DISK:
            spoil_files(stage.disk_root)
        name = f"{mode.value}-{half + 1}"
        stage.progress.show(f"{mode.title}: starting the server")
        started = time.monotonic()
        with vllm_server(plan, stage, name) as server:
            starts.append(time.monotonic() - started)
            stage.progress.advance(START_STEPS)
            turns += _replay(server, mode, requests, stage.progress, restarted=half > 0)
    return PassRecord(mode, tuple(turns), tuple(starts))


def split_at_restart(history: Sequence[Request]) -> tuple[tuple[Request, ...], ...]:
    """Cut ``history`` in two between turns, in the middle."""
    middle = (1 + max(r.turn for r in history)) // 2
    return (
        tuple(r for r in history if r.turn < middle),
        tuple(r for r in history if r.turn >= middle),
    )


def restarts(mode: Mode) -> int:
    """How often the pass ``mode`` starts a server."""
    return 2 if mode is Mode.DISK else 1


def vllm_server(plan: ServerPlan, stage: Stage, name: str) -> Server:
    """A vLLM server for ``plan``, not started; its log is named ``name``."""
    port = free_port()
    arguments = server_arguments(plan, stage.model, port)
    return Server(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        port=port,
        log=stage.logs / f"{name}.log",
        environment=server_environment(os.environ, len(os.sched_getaffinity(0))),
    )


def spoil_files(root: Path) -> int:
    """Overwrite bytes in the middle of every payload file below ``root``; says how many.

    Raises KVTiersError if there is none: then nothing would be tested.
    """
    spoiled = 0
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        size = path.stat().st_size
        if size < _PAYLOAD_BYTES:
            continue
        with path.open("r+b") as file:
            file.seek(size // 2)
            piece = file.read(64)
            file.seek(size // 2)
            file.write(bytes(byte ^ 0xFF for byte in piece))
        spoiled += 1
    if spoiled == 0:
        raise KVTiersError(
            f"{root} holds no stored chunk to break", kind=Kind.VANISHED, operation="demo"
        )
    return spoiled


def _replay(
    server: Server,
    mode: Mode,
    requests: Sequence[Request],
    progress: Progress,
    *,
    restarted: bool,
) -> list[TurnRecord]:
    client = ChatClient(server.port, SERVED_NAME)
    before = warm_up(client)
    first_turn = requests[0].turn
    turns = []
    for request in requests:
        progress.show(
            f"{mode.title}: conversation {request.conversation + 1}, turn {request.turn + 1}"
        )
        answer = client.ask(request.messages, MAX_TOKENS)
        after = settled_counts(client, before, answer.prompt_tokens)
        turns.append(
            TurnRecord(
                conversation=request.conversation,
                turn=request.turn,
                ttft_s=answer.ttft_s,
                total_s=answer.total_s,
                tokens=after - before,
                answer=answer.text,
                first_after_restart=restarted and request.turn == first_turn,
            )
        )
        before = after
        progress.advance()
        if mode is Mode.DISK:
            time.sleep(_READING_S)
    return turns


def warm_up(client: ChatClient) -> TokenCounts:
    """Let the first request of a server be nobody's; returns the counts after it."""
    answer = client.ask(_WARM_UP, max_tokens=2)
    return settled_counts(client, TokenCounts(), answer.prompt_tokens)


def settled_counts(
    client: ChatClient, before: TokenCounts, prompt_tokens: int, within_s: float = _COUNTERS_S
) -> TokenCounts:
    """The counts once they include a prompt of ``prompt_tokens`` after ``before``.

    The server counts a request a moment after its last token has been sent.
    """
    deadline = time.monotonic() + within_s
    while True:
        counts = parse_counts(client.scrape())
        if counts.prompt >= before.prompt + prompt_tokens:
            return counts
        if time.monotonic() > deadline:
            raise KVTiersError(
                f"the server's metrics count {counts.prompt - before.prompt} prompt tokens for a "
                f"prompt of {prompt_tokens}",
                kind=Kind.TIMEOUT,
                operation="demo",
            )
        time.sleep(_COUNTERS_POLL_S)
