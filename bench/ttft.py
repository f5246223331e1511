"""Time to first token from host memory and from disk, beside a device hit of the same length.

    python -m bench.ttft --model DIR [--rounds 9] [--tokens 2000] [--threads N] [--root DIR]
                         [--layout files|log]

A real vLLM on the CPU, engine and worker in this process, one request at a time. A round asks for
the same prompt three times, in an order that turns: with its blocks in the device's prefix cache;
with that cache reset, from host memory; with host memory reset as well, from the ``fs`` tier. It
stops with an error unless tokens and counts of cached tokens are equal. The clock runs from
``add_request`` to the first token. Between requests the engine rests. The model has all cores but
one, as vLLM advises for CPUs: a team of threads that spins for a core another thread has would be
measured instead. Prints::

    MODE ttft.disk O_DIRECT|buffered, cold files
    NOTE ttft <threads of the model, cached tokens and bytes of an answer>
    TIME ttft.<device|host|disk|log> <ms>
    RATIO ttft.<host|disk|log> <over the device hit of the same round: median of the rounds>
"""

import argparse
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.collector import no_collector
from bench.lines import median_of, remark

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
HOST_BYTES = 1 << 28
DISK_BYTES = 1 << 30
_PART_BYTES = 4 << 20
MODEL = ".models/SmolLM2-135M-Instruct"
PLACES = ("device", "host", "disk")
LAYOUTS = {"files": "disk", "log": "log"}
"""And how the figure of each is called."""
REST_S = 30.0
LANES = 16
"""Lanes of the tier that may read; its defaults."""
ENGINE_PAUSE_S = 0.001
"""vLLM's engine process pauses this long after a step that ran no model while a request waits, or
something is in flight (``EngineCoreProc._process_engine_step``), so that other threads get the
interpreter lock. An engine in the caller's process has no such loop: the one here does the same."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    tokens: int = 2000
    rounds: int = 9


TINY = Size(tokens=300, rounds=2)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prompt got."""

    seconds: float
    """Until the first token."""
    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed."""
    taken: float
    """When it first held blocks of the device, on ``time.perf_counter``."""


class Engine:
    """A running engine with one tier."""

    def __init__(self, model: str, tier: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=model,
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=True,
            num_gpu_blocks_override=64,
            max_model_len=4096,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            kv_transfer_config=_offloading(tier),
        )
        self.root = str(tier.get("root_dir", ""))
        self._engine = self.llm.llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self.vocabulary: int = self._engine.model_config.get_vocab_size()
        self._asked = 0

    def ask(self, prompt: Sequence[int], max_tokens: int = 4, **roles: Any) -> Answer:
        """Run one prompt to its end; ``roles`` are its ``kv_transfer_params``."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        params.extra_args = {"kv_transfer_params": roles} if roles else None
        self._asked += 1
        outputs: list[Any] = []
        began = time.perf_counter()
        first = taken = 0.0
        self._engine.add_request(str(self._asked), {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
            if self.usage and not taken:
                taken = time.perf_counter()
            if outputs and not first:
                first = time.perf_counter() - began
            elif not outputs:
                time.sleep(ENGINE_PAUSE_S)
        tokens = tuple(outputs[-1].outputs[0].token_ids)
        return Answer(first, tokens, outputs[-1].num_cached_tokens, taken)

    def free(self) -> None:
        """Step until no block of the device is held any more."""
        self._step_while(lambda: self.usage > 0)

    def rest(self) -> None:
        """Step until nothing is in flight."""
        self._step_while(self._scheduler.connector.has_pending_push_work)

    def _step_while(self, busy: Callable[[], bool]) -> None:
        until = time.monotonic() + REST_S
        while busy():
            if time.monotonic() > until:
                raise SystemExit(f"the engine does not come to rest: {self.manager!r}")
            self._engine.step()
            time.sleep(ENGINE_PAUSE_S)

    def leave_only(self, place: str) -> None:
        """Let the next prompt find its chunks no nearer than ``place``."""
        if place != "device" and not self.llm.reset_prefix_cache(reset_connector=place == "disk"):
            raise SystemExit("the device's prefix cache could not be reset")

    @property
    def usage(self) -> float:
        """The share of the device's blocks that requests hold."""
        return float(self._scheduler.kv_cache_manager.usage)

    @property
    def manager(self) -> Any:
        """Our manager."""
        return self._scheduler.connector.connector_scheduler.manager

    @property
    def direct(self) -> bool:
        """Whether the tier goes past the page cache."""
        return bool(self.store.direct)

    @property
    def store(self) -> Any:
        """That of the tier."""
        return self.manager.core.tiers[0].tier.store


def _on_disk(root: str, layout: str) -> dict[str, Any]:
    return {"type": "fs", "root_dir": root, "layout": layout, "capacity_bytes": DISK_BYTES}


def _offloading(tier: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "KVTiersConnector",
        "kv_connector_module_path": "kvtiers.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [tier],
        },
    }


def set_environment(threads: int) -> None:
    """Must be called before vLLM or torch is imported."""
    for name, value in (ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}).items():
        os.environ.setdefault(name, value)


@contextmanager
def running(model: str, tier: dict[str, Any]) -> Iterator[Engine]:
    """An engine, gone afterwards."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    engine = Engine(model, tier)
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()


def measure(model: str, root: str, size: Size, layout: str = "files") -> None:
    """Print every figure."""
    with running(model, _on_disk(root, layout)) as engine:
        prompt = random.Random(0).choices(range(3, engine.vocabulary), k=size.tokens)
        engine.ask(prompt)
        engine.rest()
        expected = engine.ask(prompt)  # a device hit: what is computed first rounds otherwise
        for place in PLACES:
            _ask(engine, place, prompt, expected)  # warms up
        rounds = []
        with no_collector():
            for n in range(size.rounds):
                turn = n % len(PLACES)
                order = PLACES[turn:] + PLACES[:turn]
                rounds.append({p: _ask(engine, p, prompt, expected).seconds for p in order})
        report(rounds, engine, expected.cached, layout)


def _ask(engine: Engine, place: str, prompt: Sequence[int], expected: Answer) -> Answer:
    engine.rest()
    engine.leave_only(place)
    if place == "disk" and not engine.direct:
        make_cold(engine.root)
    answer = engine.ask(prompt)
    if (answer.tokens, answer.cached) != (expected.tokens, expected.cached):
        raise SystemExit(f"from {place}: {answer}, on the device: {expected}")
    return answer


def make_cold(root: str) -> None:
    """Take the files under ``root`` out of the page cache."""
    for file in Path(root).rglob("*.kv[cs]"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bare_read_seconds(engine: Engine, stored: int) -> float:
    """How long it takes to read so many bytes from those files, with as many threads."""
    parts = list(_parts(engine.root, stored))
    memory = [mmap.mmap(-1, nbytes) for _, _, nbytes in parts]
    if not engine.direct:
        make_cold(engine.root)

    def read(part: tuple[Path, int, int], into: mmap.mmap) -> None:
        file, offset, _ = part
        fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if engine.direct else 0))
        os.preadv(fd, [into], offset)
        os.close(fd)

    for each in memory:
        each[:] = bytes(len(each))  # so that no page has to be made while it reads
    with ThreadPoolExecutor(LANES) as lanes:
        list(lanes.map(lambda n: None, range(LANES)))  # the threads are there
        began = time.perf_counter()
        list(lanes.map(read, parts, memory))
        return time.perf_counter() - began


def _parts(root: str, nbytes: int) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, length) of what holds the first ``nbytes``, 4 MiB at most each."""
    for file in sorted(Path(root).rglob("*.kv[cs]")):
        end = min(nbytes, file.stat().st_size)
        nbytes -= end
        for offset in range(0, end, _PART_BYTES):
            yield file, offset, min(_PART_BYTES, end - offset)


def report(rounds: Sequence[dict[str, float]], engine: Engine, cached: int, layout: str) -> None:
    """Print the lines."""
    import torch

    names = {"device": "device", "host": "host", "disk": LAYOUTS[layout]}
    remark("MODE", f"ttft.{names['disk']}", "O_DIRECT" if engine.direct else "buffered, cold files")
    stored = sum(entry.bytes for entry in engine.store.scan())
    bare = statistics.median(bare_read_seconds(engine, stored) for _ in rounds) * 1e3
    remark(
        "NOTE",
        "ttft",
        f"{torch.get_num_threads()} threads; {cached} cached tokens in every answer; their chunks "
        f"have {stored / 1e6:.1f} MB, which a bare loop on as many lanes reads in {bare:.1f} ms",
    )
    for place in PLACES:
        took = statistics.median(r[place] for r in rounds)
        remark("TIME", f"ttft.{names[place]}", f"{took * 1e3:.2f} ms")
    for place in PLACES[1:] if layout == "files" else ["disk"]:  # host memory is the same
        median_of("RATIO", f"ttft.{names[place]}", [r[place] / r["device"] for r in rounds])


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=MODEL, help="folder of a checkpoint")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument(
        "--root", type=os.path.abspath, default=tempfile.gettempdir(), help="where to make a folder"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="files")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtiers-bench-", dir=given.root) as root:
        size = TINY if given.tiny else Size(given.tokens, given.rounds)
        set_environment(given.threads)
        measure(str(Path(given.model).resolve()), root, size, given.layout)


if __name__ == "__main__":
    main()
