import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvtiers.engines.vllm import checkpoint as module
from kvtiers.engines.vllm.checkpoint import (
    SAMPLE_BYTES,
    config_digest,
    find_checkpoint,
    model_digest,
    plain,
)
from kvtiers.errors import Kind, KVTiersError

CONFIG = {
    "_name_or_path": "/somewhere",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "rope_theta": 10_000.0,
    "transformers_version": "5.0",
}


def tensors(n: int = 3, size: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"layers.{i}.weight": rng.standard_normal(size).astype(np.float32) for i in range(n)}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), folder / "model.safetensors")
    return folder


def flip(path, offset: int) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 1]))


def test_a_copy_under_another_name_is_the_same_model(checkpoint, tmp_path) -> None:
    copy = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(checkpoint, copy)
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    assert model_digest(copy) == model_digest(checkpoint)
    assert len(model_digest(checkpoint)) == 64


def test_a_snapshot_of_links_is_the_same_model(checkpoint, tmp_path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in checkpoint.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert model_digest(snapshot) == model_digest(checkpoint)


class TestWeights:
    @pytest.mark.parametrize("where", ["first", "middle", "last"])
    def test_a_changed_byte(self, checkpoint, where) -> None:
        before = model_digest(checkpoint)
        path = checkpoint / "model.safetensors"
        size = path.stat().st_size
        flip(path, {"first": size - 3 * 256, "middle": size - 384, "last": size - 1}[where])
        assert model_digest(checkpoint) != before

    def test_a_changed_size(self, checkpoint) -> None:
        before = model_digest(checkpoint)
        with open(checkpoint / "model.safetensors", "ab") as f:
            f.write(b"\0")
        assert model_digest(checkpoint) != before

    def test_a_changed_header(self, checkpoint) -> None:
        before = model_digest(checkpoint)
        renamed = {f"x{name}": value for name, value in tensors().items()}
        save_file(renamed, checkpoint / "model.safetensors")
        assert model_digest(checkpoint) != before

    def test_one_more_file(self, checkpoint) -> None:
        before = model_digest(checkpoint)
        save_file(tensors(1), checkpoint / "more.safetensors")
        assert model_digest(checkpoint) != before

    def test_the_same_file_twice_is_not_once(self, checkpoint) -> None:
        before = model_digest(checkpoint)
        shutil.copy(checkpoint / "model.safetensors", checkpoint / "model2.safetensors")
        assert model_digest(checkpoint) != before

    def test_every_tensor_has_a_sample(self, checkpoint, monkeypatch) -> None:
        """One changed number in a tensor of 1 MiB, away from the evenly spread samples."""
        count, size = 40, 1 << 18
        monkeypatch.setattr(module, "SAMPLES", 2 * count)
        path = checkpoint / "model.safetensors"
        save_file({f"t{i:02}": np.zeros(size, np.float32) for i in range(count)}, path)
        before = model_digest(checkpoint)
        start = path.stat().st_size - count * size * 4
        for tensor in (1, 17, 38):
            middle = start + tensor * size * 4 + size * 2
            flip(path, middle)
            assert model_digest(checkpoint) != before
            flip(path, middle)
        assert model_digest(checkpoint) == before

    def test_more_tensors_than_samples(self, checkpoint, monkeypatch) -> None:
        monkeypatch.setattr(module, "SAMPLES", 16)
        path = checkpoint / "model.safetensors"
        save_file(tensors(100, 4096), path)
        before = model_digest(checkpoint)
        flip(path, path.stat().st_size - 1)
        assert model_digest(checkpoint) != before

    def test_a_huge_file_is_not_read_in_full(self, checkpoint) -> None:
        path = checkpoint / "model.safetensors"
        os.truncate(path, 1 << 40)
        before = model_digest(checkpoint)
        flip(path, (1 << 40) - SAMPLE_BYTES // 2)
        assert model_digest(checkpoint) != before

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
    def test_other_kinds_of_weights(self, checkpoint, name) -> None:
        (checkpoint / "model.safetensors").unlink()
        path = checkpoint / name
        path.write_bytes(bytes(10_000))
        before = model_digest(checkpoint)
        flip(path, 5_000)
        changed = model_digest(checkpoint)
        path.write_bytes(bytes(10_001))
        assert len({before, changed, model_digest(checkpoint)}) == 3

    def test_what_is_not_loaded_does_not_count(self, checkpoint) -> None:
        before = model_digest(checkpoint)
        for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.json", "README.md"):
            (checkpoint / name).write_bytes(b"{}")
        assert model_digest(checkpoint) == before
        assert model_digest(checkpoint, "npcache") != before

    def test_leftovers_of_training_are_no_weights(self, tmp_path) -> None:
        (tmp_path / "training_args.bin").write_bytes(b"x")
        with pytest.raises(KVTiersError, match=r"holds no weights \(\*\.safetensors") as caught:
            model_digest(tmp_path)
        assert caught.value.kind is Kind.VANISHED

    @pytest.mark.parametrize("content", [b"", b"\xff" * 20, (4).to_bytes(8, "little") + b"nope"])
    def test_a_damaged_header_is_no_reason_to_fail(self, checkpoint, content) -> None:
        before = model_digest(checkpoint)
        (checkpoint / "model.safetensors").write_bytes(content)
        assert model_digest(checkpoint) != before

    def test_a_single_file(self, checkpoint) -> None:
        path = checkpoint / "model.safetensors"
        before = model_digest(path)
        flip(path, path.stat().st_size - 1)
        assert model_digest(path) != before


class TestConfigs:
    @pytest.mark.parametrize(
        "change",
        [
            {"rope_theta": 500_000.0},
            {"architectures": ["QwenForCausalLM"]},
            {"quantization_config": {"quant_method": "fp8"}},
        ],
    )
    def test_what_changes_bytes_changes_the_digest(self, checkpoint, change) -> None:
        before = model_digest(checkpoint)
        (checkpoint / "config.json").write_text(json.dumps({**CONFIG, **change}))
        assert model_digest(checkpoint) != before

    def test_what_does_not_change_bytes_does_not(self, checkpoint) -> None:
        before = model_digest(checkpoint)
        same = {**CONFIG, "_name_or_path": "x", "transformers_version": "4", "torch_dtype": "auto"}
        text = json.dumps(dict(reversed(same.items())), indent=4)
        (checkpoint / "config.json").write_text(text)
        assert model_digest(checkpoint) == before

    @pytest.mark.parametrize(
        "name", ["params.json", "hf_quant_config.json", "model.safetensors.index.json"]
    )
    def test_files_beside_it_count(self, checkpoint, name) -> None:
        before = model_digest(checkpoint)
        (checkpoint / name).write_text('{"a": 1}')
        one = model_digest(checkpoint)
        (checkpoint / name).write_text('{"a": 2}')
        assert len({before, one, model_digest(checkpoint)}) == 3

    def test_the_models_own_code_counts_where_it_runs(self, checkpoint) -> None:
        before = model_digest(checkpoint)
        (checkpoint / "modeling_x.py").write_text("a = 1")
        assert model_digest(checkpoint) == before
        mapped = {**CONFIG, "auto_map": {"AutoModel": "modeling_x.X"}}
        (checkpoint / "config.json").write_text(json.dumps(mapped))
        one = model_digest(checkpoint)
        (checkpoint / "modeling_x.py").write_text("a = 2")
        assert model_digest(checkpoint) != one

    def test_a_broken_config_is_named(self, checkpoint) -> None:
        (checkpoint / "config.json").write_text("{")
        with pytest.raises(KVTiersError, match=r"config\.json is not valid JSON") as caught:
            model_digest(checkpoint)
        assert caught.value.kind is Kind.CORRUPT

    def test_dtype_of_nested_models_is_dropped_but_not_that_of_quantization(self) -> None:
        base = {"text_config": {"dtype": "a"}, "quantization_config": {"dtype": "a"}}
        assert config_digest(base) == config_digest({**base, "text_config": {"dtype": "b"}})
        assert config_digest(base) != config_digest({**base, "quantization_config": {"dtype": "b"}})


def test_plain_knows_the_values_configs_hold() -> None:
    config = SimpleNamespace(to_dict=lambda: {"a": (1, 2.5), "inf": float("inf")})
    assert plain({"c": config, 3: {"y", "x"}, "n": None, "b": True}) == {
        "c": {"a": [1, 2.5], "inf": "inf"},
        "3": ["x", "y"],
        "n": None,
        "b": True,
    }


class TestFind:
    def test_a_local_folder_or_file(self, checkpoint) -> None:
        assert find_checkpoint(str(checkpoint), None, None) == checkpoint
        file = checkpoint / "model.safetensors"
        assert find_checkpoint(str(file), None, None) == file

    def test_a_snapshot_in_the_local_cache(self, tmp_path) -> None:
        repository = tmp_path / "models--me--tiny"
        snapshot = repository / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        (snapshot / "config.json").write_text("{}")
        found = find_checkpoint("me/tiny", None, str(tmp_path))
        assert found == snapshot
        assert find_checkpoint("me/tiny", "a" * 40, str(tmp_path)) == snapshot
        assert find_checkpoint("me/tiny", "v2", str(tmp_path)) is None

    @pytest.mark.parametrize("model", ["me/absent", "not/a/repository:Q4", "x" * 5000])
    def test_absent(self, model, tmp_path) -> None:
        assert find_checkpoint(model, None, str(tmp_path)) is None
