"""Lookups of models with windows and states bring up what will be read, and nothing else."""

import random
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import ReqContext

from kvtiers.chunks import PAGE_BYTES, GroupLayout, Lookup, key_group
from kvtiers.engines.vllm.events import KVEvents
from kvtiers.engines.vllm.manager import VllmManager
from kvtiers.engines.vllm.scheduler import KVTiersScheduler
from tests.unit.core.core_harness import ScriptedTier, World
from tests.vllm.test_prefix_vllm import (
    MODELS,
    full,
    request_of,
    scheduler_of,
    sliding,
    stored_at_random,
    vllms_answer,
)


class Engine:
    """Our scheduler's lookups over a real manager, with chunks stored in a tier."""

    def __init__(self, groups, tokens, there, slots=64):
        self.groups, self.tokens = groups, tokens
        self.request = request_of(groups, tokens)
        self.request.req_context = ReqContext("r")
        stored = [
            key
            for group, state in zip(groups, self.request.group_states, strict=True)
            for chunk, key in enumerate(state.offload_keys)
            if chunk in there[group.group]
        ]
        self.tier = ScriptedTier(holds=stored)
        layouts = [GroupLayout(g.group, PAGE_BYTES, g.tokens_per_chunk) for g in groups]
        self.world = World(tiers=[self.tier], slots=slots, groups=layouts)
        self.manager = VllmManager(
            self.world.manager,
            clock=lambda: self.world.now,
            stats=None,
            events=KVEvents(False, describe=False),
            sink=self.world.events.append,
            on_shutdown=lambda: None,
        )
        self.recorded = []
        self.scheduler = scheduler_of(groups, None, cls=KVTiersScheduler)
        self.scheduler.manager = self.manager
        self.scheduler._events_tracker = SimpleNamespace(
            record_lookup=lambda request, config, index, key: self.recorded.append(key)
        )
        self.manager.on_new_request(self.request.req_context)

    def ask(self):
        """One step: the answer, after which the tier does what it was asked for."""
        found = self.scheduler._lookup_complete_chunks(self.request)
        self.world.step()
        self.promoted = [key for job in self.tier.jobs for key in job.keys]
        self.tier.finish_all()
        self.world.step()
        assert not self.manager.inert
        self.manager.check()
        return found

    def read(self, tokens):
        """Keys of the chunks that ``tokens`` tokens take."""
        return {key for _, _, key in self.scheduler._chunks_read(self.request, tokens)}


@pytest.mark.parametrize("model", MODELS)
def test_what_comes_up_is_what_vllm_reads(model):
    groups, dice, loaded = MODELS[model], random.Random(model), 0
    for _ in range(300):
        tokens = dice.randint(1, 400)
        there = stored_at_random(groups, tokens, dice)
        engine = Engine(groups, tokens, there, slots=500)
        expected = vllms_answer(groups, tokens, there)
        assert engine.ask() == (None if expected else 0)
        assert set(engine.promoted) == engine.read(expected)
        assert engine.ask() == expected
        assert engine.promoted == []
        whole = {k for k in engine.read(expected) if full_attention(groups, k)}
        assert set(engine.recorded) == whole
        loaded += expected > 0
    assert loaded > 30


def full_attention(groups, key):
    return groups[key_group(key)].attention.value == "full"


def test_full_attention_behind_a_hole_in_a_window_stays_below():
    groups = [full(0, 16), sliding(1, 16, 32)]
    there = {0: set(range(20)), 1: {2, 3, 4, 17}}
    engine = Engine(groups, 330, there)
    assert engine.ask() is None
    assert len(engine.promoted) == 5 + 2  # up to token 80, with the window that ends there
    assert engine.ask() == 80


def test_what_has_no_room_is_left_out_of_the_plan():
    groups = [full(0, 16), sliding(1, 16, 32)]
    engine = Engine(groups, 330, {0: set(range(20)), 1: set(range(20))}, slots=8)
    answers = [engine.ask() for _ in range(4)]
    assert answers[-1] == 0  # eight chunks of full attention, and no window to end them with
    assert engine.manager.core.use.pinned == 0 or engine.ask() == 0


def test_a_tier_that_still_looks_is_waited_for_and_nothing_moves():
    groups = [full(0, 16), sliding(1, 16, 32)]
    engine = Engine(groups, 330, {0: set(range(20)), 1: set(range(20))})
    tail = engine.request.group_states[1].offload_keys[19]
    engine.tier.verdicts[tail] = Lookup.RETRY
    assert engine.ask() is None
    assert engine.promoted == []
    del engine.tier.verdicts[tail]
    assert engine.ask() is None
    assert len(engine.promoted) == 20 + 2
    assert engine.ask() == 320


def test_a_chunk_that_fails_to_come_shortens_the_prefix():
    groups = [full(0, 16), sliding(1, 16, 32)]
    engine = Engine(groups, 330, {0: set(range(20)), 1: set(range(20))})
    lost = engine.request.group_states[0].offload_keys[10]
    assert engine.scheduler._lookup_complete_chunks(engine.request) is None
    engine.world.step()
    for job in list(engine.tier.jobs):
        engine.tier.finish(job, fail=[k for k in job.keys if k == lost])
    engine.world.step()
    assert engine.ask() is None  # the window that ends before the lost chunk
    assert engine.ask() == 160


def test_a_fault_of_ours_leaves_vllms_answer(caplog):
    groups = [full(0, 16), sliding(1, 16, 32)]
    engine = Engine(groups, 330, {0: set(range(20)), 1: set(range(20))})
    engine.scheduler._chunks_read = None
    assert engine.scheduler._lookup_complete_chunks(engine.request) == 0
    assert engine.manager.inert
    assert "switched off" in caplog.text
