"""A real engine that answers prompts of which some come back, and much that befalls it.

It shares a folder with a peer, in this process: what that stored first is the hot list. Below the
folder is a server that is down.
"""

import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtiers.demo.server import free_port
from tests.unit.cli.cli_kit import good, kvtiers
from tests.vllm import checkpoints
from tests.vllm.conftest import Engine as InProcess
from tests.vllm.conftest import running as engine
from tests.vllm.offloading import (
    CHUNK_BYTES,
    PEER_LOOKUP_S,
    disk,
    files_of,
    offload,
    peering,
    settle,
)
from tests.vllm.serving import Server, serving

_CHUNK = CHUNK_BYTES["llama"]
TOKENS, CHUNKS = 1000, 7
"""Of a prompt. The device has room for one of them."""
HOST_BYTES, DISK_BYTES = (4 * CHUNKS + 4) * _CHUNK, 12 * CHUNKS * (_CHUNK + 8192)
"""Four prompts, and twelve."""
TIERS = ("0:primary", "1:fs", "2:kv", "3:p2p")
"""What metrics call host memory, the folder, the server that is down, and the peer."""
BACK = (0, 0, 1, 4)
"""In each round a new prompt is asked for, and those that are so many rounds old: it is computed,
then on the device; the others are in host memory, and on the disk alone, for between them seven
others were asked for."""
_FORGOTTEN = 2
"""Rounds after which what was not asked for meanwhile has left host memory."""
_FIRST = 54
"""Seed of the first new prompt. The metrics follow few chunks, by their keys, to see how far apart
they are used: two of this one's."""
_HOT, _RARE = 1_000_000, 1_000_001
"""Seeds of prompts that are in no round: of the one that is hot, and of the first of the others."""
_WRITTEN_S = 60
_MAX_TOKENS, _BLOCKS = 1536, 13
"""Of a request, and of the device."""


class Engine:
    """The server, what it is asked, and its peer."""

    def __init__(
        self, server: Server, peer: InProcess, root: Path, ports: Mapping[str, int]
    ) -> None:
        """``root`` is their folder; ``ports``: where the page is, and where both answer peers."""
        self.port = server.port
        self.observer = f"http://127.0.0.1:{ports['observer']}/"
        """Address of the page."""
        self._server, self._peer = server, peer
        self._root = root
        self._ports = ports
        self._newest = itertools.count(_FIRST)
        self._rare = itertools.count(_RARE)

    def rounds(self, count: int) -> None:
        """Ask; all is answered when this returns."""
        for newest, back in itertools.product(itertools.islice(self._newest, count), BACK):
            self._server.ask(_prompt(newest - back), max_tokens=2)

    def exchange(self) -> None:
        """A prompt comes from the peer, and one goes there."""
        theirs, ours = (_prompt(next(self._rare)) for _ in range(2))
        self._peer.ask(theirs, max_tokens=2)
        settle(self._peer)
        self._server.ask(theirs, max_tokens=2, kv_transfer_params=self._only_of("peer"))
        self._server.ask(ours, max_tokens=2)
        roles = {"kv_transfer_params": self._only_of("own")}
        self._peer.ask(ours, max_tokens=2, extra_args=roles)
        settle(self._peer)

    def damage(self) -> None:
        """The files of a prompt are cut short before it is asked for again."""
        prompt = _prompt(next(self._rare))
        there = files_of(self._root)
        self._server.ask(prompt, max_tokens=2)
        for file in _appeared(self._root, there):
            os.truncate(file, _CHUNK // 2)
        self.rounds(_FORGOTTEN)
        self._server.ask(prompt, max_tokens=2)

    def _only_of(self, whom: str) -> dict[str, Any]:
        """For a request that is to be loaded from an engine, and not from the folder."""
        port = self._ports[whom]
        source = {"kv_request_id": "x", "remote_host": "127.0.0.1", "remote_port": port}
        return {"remote_kv_source": source, "kv_load_tiers": [{"medium": "CPU"}]}


@contextmanager
def running(folder: Path) -> Iterator[Engine]:
    """One with all that it and its peer write in ``folder``."""
    model = checkpoints.build("llama", folder / "model")
    root, hot = folder / "kv", folder / "hot.json"
    shared = disk(root, capacity_bytes=DISK_BYTES, enable_kv_events=True)
    down = {"type": "kv", "url": f"redis://127.0.0.1:{free_port()}", "breaker_failures": 1}
    ports = {name: free_port() for name in ("observer", "own", "peer")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"ipc://{folder}/events"}
    theirs = _transfer(shared, peering(ports["peer"]))
    ours = _transfer(
        *(shared, down, peering(ports["own"])),
        observe={"port": ports["observer"]},
        warm_manifest=str(hot),
        self_describing_kv_events=True,
    )
    options = ("--max-model-len", f"{_MAX_TOKENS}", "--num-gpu-blocks-override", f"{_BLOCKS}")
    options += ("--kv-events-config", json.dumps(events))
    size = {"max_model_len": _MAX_TOKENS, "num_gpu_blocks_override": _BLOCKS}
    with engine(model, kv_transfer_config=theirs, **size) as peer:
        peer.ask(_prompt(_HOT), max_tokens=2)
        settle(peer)
        good(kvtiers("warm", f"fs://{root}", "--from-recent", CHUNKS, "-o", hot))
        with serving(model, ours, folder / "log", *options) as server:
            yield Engine(server, peer, root, ports)


def _transfer(*tiers: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return offload(
        HOST_BYTES, secondary_tiers=list(tiers), lookup_deadline_s=PEER_LOOKUP_S, **extra
    )


def _prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, checkpoints.VOCAB), k=TOKENS)


def _appeared(root: Path, before: list[Path]) -> list[Path]:
    """Chunks of a prompt, once they are on the disk beside those of ``before``."""
    end = time.monotonic() + _WRITTEN_S
    while len(new := [file for file in files_of(root) if file not in before]) < CHUNKS:
        assert time.monotonic() < end, f"only {len(new)} chunks of a prompt are on the disk"
        time.sleep(0.05)
    return new
