import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup.py"


@pytest.fixture
def setup_script():
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_extras_and_the_torch_family_are_left_out(setup_script):
    requires = [
        "regex",
        "torch==2.13.0",
        'torchaudio; platform_machine != "s390x"',
        'torchvision; platform_machine != "riscv64"',
        "torchcodec>=0.14",
        'numba==0.61; python_version < "3.13"',
        'fastsafetensors>=0.1; extra == "fastsafetensors"',
        'librosa; extra == "audio" and python_version > "3.9"',
        "torch-like==1",
    ]
    assert setup_script.runtime_requirements(requires) == [
        "regex",
        'numba==0.61; python_version < "3.13"',
        "torch-like==1",
    ]


def test_torch_is_pinned_to_the_build_without_cuda(setup_script):
    assert setup_script.TORCH.endswith("+cpu")


def test_stamp_depends_on_the_place_and_on_the_requirements(setup_script, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("a")
    monkeypatch.setattr(setup_script, "ROOT", tmp_path)
    first = setup_script.input_hash()
    assert setup_script.input_hash() == first
    (tmp_path / "pyproject.toml").write_text("b")
    assert setup_script.input_hash() != first
    (tmp_path / "pyproject.toml").write_text("a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pyproject.toml").write_text("a")
    monkeypatch.setattr(setup_script, "ROOT", elsewhere)
    assert setup_script.input_hash() != first
