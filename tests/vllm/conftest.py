"""Real vLLM engines on the CPU, in this process: fast to start, and open to metrics and patches."""

import contextlib
import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

DEFAULTS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 128,
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}
"""Options of ``vllm.LLM``. A block has 128 tokens (MLA 16, recurrent hybrids 256)."""


@dataclass(frozen=True)
class Answer:
    """What one prompt got. Two answers are equal when tokens and all top logprobs are."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: str | None

    def distance(self, other: "Answer") -> float:
        """Largest difference of a logprob that both answers give; infinite if they share none."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        gaps = (abs(dict(a)[t] - p) for a, b in pairs for t, p in b if t in dict(a))
        return max(gaps, default=math.inf)


class Engine:
    """A running engine: prompts are token ids, decoding is greedy."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.cached: list[int] = []
        """Cached tokens of each prompt of the last ``ask``."""
        self._numbers = itertools.count()
        self._ended: dict[str, Any] = {}
        """What was begun and has ended, until it is asked for."""

    def ask(self, *prompts: Sequence[int], max_tokens: int = 8, **sampling: Any) -> list[Answer]:
        """Answers in the order of the prompts; they run as one batch."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, **sampling
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        self.cached = [output.num_cached_tokens for output in outputs]
        return [_answer(output.outputs[0]) for output in outputs]

    def begin(
        self, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any
    ) -> Callable[[], Answer]:
        """Send a prompt; it runs with ``steps``. What is returned runs it to its end.

        Others may be begun before it has ended.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, **sampling
        )
        engine, name = self.llm.llm_engine, f"begun{next(self._numbers)}"
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

        def end() -> Answer:
            while name not in self._ended:
                self._step()
            output = self._ended.pop(name)
            self.cached = [output.num_cached_tokens]
            return _answer(output.outputs[0])

        return end

    def _step(self) -> None:
        outputs = self.llm.llm_engine.step()
        self._ended.update({o.request_id: o for o in outputs if o.finished})

    def kv_caches(self) -> list[Any]:
        """The device tensor of each layer, blocks first (one process only)."""
        core = self.llm.llm_engine.engine_core.engine_core
        return list(core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, summed over their labels; histograms as ``name_count``."""
        totals: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            suffix = "_count" if hasattr(metric, "buckets") else ""
            value = metric.count if suffix else getattr(metric, "value", None)
            if value is not None:
                name = metric.name + suffix
                totals[name] = totals.get(name, 0) + value
        return totals

    def forget_device(self, *, connector: bool = False) -> None:
        """Empty the device's prefix cache, and with ``connector`` the tiers' host memory too."""
        assert self.llm.reset_prefix_cache(reset_connector=connector)

    def steps(self, until: Callable[[], bool], deadline_s: float = 30) -> None:
        """Step the idle engine until ``until()`` holds; fails after ``deadline_s``."""
        end = time.monotonic() + deadline_s
        while not until():
            assert time.monotonic() < end, f"not reached within {deadline_s} s of stepping"
            self._step()


def _answer(completion: Any) -> Answer:
    return Answer(
        tokens=tuple(completion.token_ids),
        logprobs=tuple(
            tuple(sorted((token, entry.logprob) for token, entry in step.items()))
            for step in completion.logprobs
        ),
        finish_reason=completion.finish_reason,
    )


@contextmanager
def _one_thread_per_rank(ranks: int) -> Iterator[None]:
    """With more ranks than cores, OpenMP teams spin against each other for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if ranks > 1:
            patch.setenv("OMP_NUM_THREADS", "1")
        yield


@contextmanager
def running(model: Path, **options: Any) -> Iterator[Engine]:
    """An engine on ``model``; ``options`` go to ``vllm.LLM``. Everything is gone afterwards."""
    from vllm import LLM
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    options = {**DEFAULTS, **options}
    before = set(os.listdir("/dev/shm"))
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if ranks > 1:
        options.setdefault("distributed_executor_backend", "mp")
    engine = None
    try:
        with _one_thread_per_rank(ranks):
            engine = Engine(LLM(model=str(model), **options))
        yield engine
    finally:
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()
            del engine.llm
        ensure_kv_transfer_shutdown()
        gc.collect()
        _remove_what_vllm_left(before)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    """What an engine that was refused still had mapped, its traceback for one, goes at the end."""
    before = set(os.listdir("/dev/shm"))
    yield
    _remove_what_vllm_left(before, even_if_used_by=(os.getpid(),))


def _remove_what_vllm_left(before: set[str], even_if_used_by: Sequence[int] = ()) -> None:
    """With several ranks vLLM leaves its own queues and semaphores in shared memory."""
    new = {n for n in set(os.listdir("/dev/shm")) - before if n.startswith(("psm_", "sem.mp-"))}
    if new:
        others = {p for p in Path("/proc").glob("[0-9]*") if int(p.name) not in even_if_used_by}
        used = {inode for process in others for inode in _mapped(process)}
        for name in new:
            file = Path("/dev/shm", name)
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_ino not in used:
                    file.unlink()


def _mapped(process: Path) -> list[int]:
    """Inodes of shared memory; whoever makes a semaphore maps it before it has its name."""
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return []  # it ended meanwhile, or is not ours to look at
    return [int(line.split()[4]) for line in lines if "/dev/shm/" in line]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint("llama")``: the folder of a tiny model, made once a session."""
    from tests.vllm import checkpoints

    root = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: checkpoints.build(kind, root / kind)


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> Callable[..., AbstractContextManager[Engine]]:
    """What starts engines: kind of checkpoint, then options of ``vllm.LLM``."""
    return lambda kind="llama", **options: running(checkpoint(kind), **options)


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """``prompt(1000, seed=3)``: token ids that share no block with those of another seed."""
    import random

    from tests.vllm.checkpoints import VOCAB

    return lambda tokens, seed=0: random.Random(seed).choices(range(3, VOCAB), k=tokens)
