"""What the scheduler tells of new prompts, for statistics."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtiers.engines.vllm import scheduler as module
from kvtiers.engines.vllm.pace import Pace
from kvtiers.engines.vllm.scheduler import KVTiersScheduler


class Core:
    def __init__(self) -> None:
        self.prompts: list[list[str]] = []
        self.answers: list[list[str]] = []
        self.paces: list[tuple[int, float]] = []

    def prompted(self, keys: list[str]) -> None:
        self.prompts.append(keys)

    def generated(self, keys: list[str]) -> None:
        self.answers.append(keys)

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.paces.append((tokens, seconds))


def step(*new: str, tokens: int, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        finished_req_ids=finished,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        num_scheduled_tokens={"r": tokens},
        total_num_scheduled_tokens=tokens,
    )


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    ticks = iter([10.0, 10.5])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(ticks))
    made: Any = KVTiersScheduler.__new__(KVTiersScheduler)
    made.manager = SimpleNamespace(core=Core())
    made._pace = Pace()
    groups = [SimpleNamespace(offload_keys=["a", "b"]), SimpleNamespace(offload_keys=["c"])]
    request = SimpleNamespace(num_prompt_tokens=40)
    made._req_status = {"r": SimpleNamespace(group_states=groups, req=request)}
    configs = [SimpleNamespace(tokens_per_chunk=32), SimpleNamespace(tokens_per_chunk=64)]
    made.config = SimpleNamespace(kv_group_configs=configs)
    return made


def test_all_chunks_of_a_prompt_are_told_when_it_begins_to_run(scheduler: Any) -> None:
    scheduler._note_prompts(step("r", "another connector's", tokens=256))
    scheduler._note_prompts(step(tokens=1, finished=("r", "another connector's")))
    core = scheduler.manager.core
    assert core.prompts == [["a", "b", "c"]]
    assert core.answers == [["b", "c"]], "what no whole part of the prompt fills"
    assert core.paces == [(256, 0.5)]
