"""Our hashes against those that vLLM itself computes."""

import random

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvtiers.hashing import ALGORITHMS, DEFAULT_SEED, block_hashes, none_hash, request_extra_keys

TOKENS = [random.Random(7).randrange(1 << 18) for _ in range(2100)]


def vllm_hashes(algorithm, tokens, tokens_per_hash, **request) -> list[bytes]:
    """What a request gets inside the engine."""
    hasher = kv_cache_utils.get_request_block_hasher(
        tokens_per_hash, get_hash_fn_by_name(algorithm)
    )
    made = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=hasher,
        **request,
    )
    return list(made.block_hashes)


@pytest.fixture
def seeded(monkeypatch):
    """Give vLLM a seed through its environment variable, and its module state back afterwards."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)

    def seed(algorithm: str, value: str | None) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if value is not None:
            monkeypatch.setenv("PYTHONHASHSEED", value)
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))

    return seed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_text_with_a_seed(algorithm, seeded) -> None:
    seeded(algorithm, "42")
    assert none_hash(algorithm, "42") == kv_cache_utils.NONE_HASH
    expected = vllm_hashes(algorithm, TOKENS, 16)
    assert len(expected) == len(TOKENS) // 16
    assert block_hashes(TOKENS, 16, algorithm, "42") == expected


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_text_without_a_seed(algorithm, seeded) -> None:
    seeded(algorithm, None)
    assert kv_cache_utils.DEFAULT_NONE_HASH_SEED == DEFAULT_SEED
    for tokens_per_hash in (1, 16, 1024):
        expected = vllm_hashes(algorithm, TOKENS, tokens_per_hash)
        assert block_hashes(TOKENS, tokens_per_hash, algorithm) == expected


@pytest.mark.parametrize("salt", [None, "s1"])
@pytest.mark.parametrize("lora", [None, ("ad", "/p/ad")])
def test_salt_and_adapter(lora, salt, seeded) -> None:
    seeded("sha256_cbor", None)
    adapter = LoRARequest(lora[0], 1, lora[1]) if lora else None
    expected = vllm_hashes("sha256_cbor", TOKENS, 128, lora_request=adapter, cache_salt=salt)
    extra = request_extra_keys(lora, salt)
    assert block_hashes(TOKENS, 128, "sha256_cbor", extra_keys=extra) == expected
