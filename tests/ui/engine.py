"""A real engine that answers prompts of which some come back."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtiers.demo.server import free_port
from tests.vllm import checkpoints
from tests.vllm.offloading import CHUNK_BYTES, disk, offload
from tests.vllm.serving import Server, serving

_CHUNK = CHUNK_BYTES["llama"]
TOKENS, CHUNKS = 1000, 7
"""Of a prompt. The device has room for one of them."""
HOST_BYTES, DISK_BYTES = (4 * CHUNKS + 4) * _CHUNK, 8 * CHUNKS * (_CHUNK + 8192)
"""Four prompts, and eight."""
BACK = (0, 0, 1, 4)
"""In each round a new prompt is asked for, and those that are so many rounds old: it is computed,
then on the device; the others are in host memory, and on the disk alone, for between them seven
others were asked for."""


class Engine:
    """The server, and what it is asked."""

    def __init__(self, server: Server, observer: str) -> None:
        self.port = server.port
        self.observer = observer
        """Address of the page."""
        self._server = server
        self._newest = itertools.count(max(BACK))

    def rounds(self, count: int) -> None:
        """Ask; all is answered when this returns."""
        for newest, back in itertools.product(itertools.islice(self._newest, count), BACK):
            prompt = random.Random(newest - back).choices(range(3, checkpoints.VOCAB), k=TOKENS)
            self._server.ask(prompt, max_tokens=2)


@contextmanager
def running(folder: Path) -> Iterator[Engine]:
    """One with a folder below host memory, in ``folder`` as all it writes."""
    model = checkpoints.build("llama", folder / "model")
    tier = disk(folder / "kv", capacity_bytes=DISK_BYTES)
    port = free_port()
    transfer = offload(HOST_BYTES, secondary_tiers=[tier], observe={"port": port})
    options = ("--max-model-len", "1536", "--num-gpu-blocks-override", "13")
    with serving(model, transfer, folder / "log", *options) as server:
        yield Engine(server, f"http://127.0.0.1:{port}/")
