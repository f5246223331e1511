"""Peers that are not alike: of another tensor-parallel size, of another model.

Ranks add up in another order, so that between sizes tokens and logprobs are compared, in float32.
"""

import logging

import pytest

from kvtiers.demo.server import free_port
from tests.vllm import checkpoints
from tests.vllm.conftest import running
from tests.vllm.offloading import settle
from tests.vllm.serving import serving
from tests.vllm.test_p2p import CACHED, TOKENS, at, p2p

FLOAT32 = ("--dtype", "float32")


@pytest.mark.timeout(400)
def test_one_rank_and_two_bring_each_other_chunks_and_another_model_is_refused(
    checkpoint, prompt, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ports, model = (free_port(), free_port()), checkpoint("llama")
    first, second = prompt(TOKENS, 1), prompt(TOKENS, 2)
    options = (*FLOAT32, "--tensor-parallel-size", "2")
    with serving(model, p2p(ports[0]), tmp_path / "log", *options) as two:
        theirs, _ = two.ask(first)
        with running(model, dtype="float32", kv_transfer_config=p2p(ports[1])) as one:
            (answer,) = one.ask(first, **at(ports[0]))
            assert one.cached == [CACHED]
            assert answer.tokens == theirs
            settle(one)
            one.forget_device(connector=True)
            (computed,) = one.ask(first)
            assert one.cached == [0]
            assert answer.distance(computed) < 1e-4
            (ours,) = one.ask(second)
            settle(one)
            source = at(ports[1])["extra_args"]
            assert two.ask(second, **source) == (ours.tokens, CACHED)
        other = checkpoints.build("llama", tmp_path / "other", seed=1)
        with running(other, dtype="float32", kv_transfer_config=p2p()) as stranger:
            (alone,) = stranger.ask(first)
            settle(stranger)
            stranger.forget_device(connector=True)
            monkeypatch.setattr(logging.getLogger("kvtiers"), "propagate", True)
            assert stranger.ask(first, **at(ports[0])) == [alone]
            assert stranger.cached == [0]
            assert "another model" in caplog.text
