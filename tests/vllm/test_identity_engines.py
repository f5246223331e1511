"""Real engines on one folder: those whose bytes differ never meet, those whose bytes agree do."""

import json
import shutil

import pytest

from tests.vllm import checkpoints
from tests.vllm.conftest import running
from tests.vllm.offloading import disk, files_of, offload, settle

TOKENS = 500
CACHED = 384


@pytest.fixture(scope="module")
def asked(prompt):
    return prompt(TOKENS)


@pytest.fixture(scope="module")
def shared(engine, asked, tmp_path_factory):
    """A folder into which a first engine has put the chunks of ``asked``."""
    root = tmp_path_factory.mktemp("shared")
    with engine(kv_transfer_config=offload(secondary_tiers=[disk(root)])) as e:
        e.ask(asked)
        settle(e)
    (namespace,) = namespaces(root)
    return root, namespace


def namespaces(root):
    """The namespaces on disk, by id, with what their manifests say."""
    return {p.parent.name: json.loads(p.read_bytes()) for p in root.rglob("manifest.json")}


def visit(model, root, asked, extra=None, **options):
    """A fresh engine on ``root``: how many tokens it finds there, and what it stores anew."""
    before = set(files_of(root))
    config = offload(secondary_tiers=[disk(root)], **(extra or {}))
    with running(model, kv_transfer_config=config, **options) as e:
        e.ask(asked)
        (cached,) = e.cached
        settle(e)
    return cached, len(set(files_of(root)) - before)


OTHERS = {
    "rope scaling": {
        "hf_overrides": {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        }
    },
    "dtype": {"dtype": "float32"},
    "kv dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "tokens per block": {"block_size": 64},
    "hash algorithm": {"prefix_caching_hash_algo": "sha256_cbor"},
    "chunk": {"extra": {"blocks_per_chunk": 2}},
    "the user's word": {"extra": {"model_digest": "another model"}},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_an_engine_with_other_bytes_finds_nothing(checkpoint, shared, asked, other):
    root, first = shared
    before = namespaces(root).keys()
    cached, stored = visit(checkpoint("llama"), root, asked, **other)
    assert cached == 0
    assert stored > 0
    (new,) = namespaces(root).keys() - before
    assert new != first


def test_other_weights_of_the_same_shape_find_nothing(shared, asked, tmp_path):
    root, _ = shared
    before = namespaces(root)
    cached, stored = visit(checkpoints.build("llama", tmp_path / "llama", seed=1), root, asked)
    assert (cached, stored) == (0, 3)
    (new,) = namespaces(root).keys() - before.keys()
    assert new not in before


def test_the_same_weights_at_another_path_find_everything(checkpoint, shared, asked, tmp_path):
    root, first = shared
    copy = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(checkpoint("llama"), copy)
    before = namespaces(root)
    assert visit(copy, root, asked) == (CACHED, 0)
    assert namespaces(root) == before
    assert first in before


def test_what_changes_no_bytes_changes_no_namespace(checkpoint, shared, asked):
    root, _ = shared
    before = namespaces(root)
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 64, "seed": 7}
    assert visit(checkpoint("llama"), root, asked, {"eviction_policy": "arc"}, **options) == (
        CACHED,
        0,
    )
    assert namespaces(root) == before
