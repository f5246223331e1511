"""Take the picture of the page anew, of a real model: ``python -m tests.ui.screenshot FILE``."""

import random
import sys
import tempfile
from pathlib import Path

from PIL import Image

from kvtiers.demo.plan import LARGE_HOST_CHUNKS, SMALL_HOST_CHUNKS, read_geometry
from kvtiers.demo.server import free_port
from tests.ui.browser import chromium
from tests.vllm.offloading import disk, offload
from tests.vllm.serving import serving

MODEL = Path(".models/SmolLM2-135M-Instruct")
TURN = 384
"""Tokens by which two conversations grow, in turns; the device and host memory hold one of them."""
TURNS = 6
_COLOURS = 64
"""A page has few: a third of the bytes."""
OPTIONS = ("--max-model-len", "2688", "--block-size", "128", "--num-gpu-blocks-override", "22")


def main() -> int:
    """Serve, ask, look, write."""
    chunk = read_geometry(MODEL).chunk_bytes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        below = [disk(folder / "kv", capacity_bytes=LARGE_HOST_CHUNKS * chunk)]
        transfer = offload(SMALL_HOST_CHUNKS * chunk, secondary_tiers=below, observe={"port": port})
        words = [random.Random(seed).choices(range(1000, 40000), k=TURN * TURNS) for seed in (1, 2)]
        with (
            serving(MODEL, transfer, folder / "log", *OPTIONS) as server,
            chromium(folder) as browser,
            browser() as page,
        ):
            page.size(1400)
            page.prefer("light")
            page.open(f"http://127.0.0.1:{port}/")
            for turn in range(1, TURNS + 1):
                for conversation in words:
                    server.ask(conversation[: TURN * turn], max_tokens=8)
            page.wait("document.querySelectorAll('.request').length >= 2")
            page.js("document.querySelector('.request').click()")
            page.wait("document.querySelector('.life .bar div')")
            picture = Path(sys.argv[1])
            page.picture(picture)
            Image.open(picture).quantize(_COLOURS).save(picture, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
