"""The script for a machine with a GPU, here with host memory in its place."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtiers.device import cuda_copier
from kvtiers.device.copier import Direction

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "check_cuda.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("check_cuda", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_cuda", module)  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_finds_nothing_wrong(tmp_path):
    command = [sys.executable, SCRIPT, "--device", "cpu", "--mib", "1", "--directory", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    first, *verdicts = ended.stdout.splitlines()
    assert first.startswith("host memory, dry run, torch ")
    assert [line.split(":")[0] for line in verdicts] == [
        "OK exact",
        "OK order",
        "OK speed",
        "OK overlap",
    ]
    assert ended.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direction", list(Direction))
def test_a_copy_of_one_block_too_few_is_found(script, monkeypatch, tmp_path, direction):
    copy = cuda_copier._copy

    def forgetful(run, table, given):
        copy(run, table[:, 1:] if given is direction else table, given)

    monkeypatch.setattr(cuda_copier, "_copy", forgetful)
    said = "stored wrongly" if direction is Direction.STORE else "loaded wrongly"
    with pytest.raises(AssertionError, match=said):
        script.exact(script.Bench(torch.device("cpu"), str(tmp_path)))


def test_what_is_wrong_is_counted_and_the_other_checks_go_on(script, monkeypatch, capsys):
    def wrong(bench):
        raise AssertionError("all of it")

    monkeypatch.setattr(script, "exact", wrong)
    for check in ("order", "speed", "overlap"):
        monkeypatch.setattr(script, check, lambda *_: "fine")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert script.main(["--device", "cpu"]) == 1
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert first.startswith("WRONG exact: AssertionError: all of it (")
    assert second.startswith("OK order: fine (")


@pytest.mark.parametrize(("seen", "asked"), [(0, "cuda:0"), (0, "cuda"), (1, "cuda:1")])
def test_without_this_gpu_it_says_so(script, monkeypatch, capsys, seen, asked):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert script.main(["--device", asked]) == 1
    assert f"torch sees {seen} CUDA devices, not {asked}" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--device=meta", "--device=cuda:x", "--mib=0", "--mib=-1"])
def test_what_cannot_be_checked_is_refused(script, capsys, wrong):
    with pytest.raises(SystemExit) as caught:
        script.main(["--device", "cpu", wrong])
    assert caught.value.code == 2
    assert wrong.partition("=")[2] in capsys.readouterr().err


def test_two_checks_on_one_machine_keep_out_of_each_others_memory(script, tmp_path, monkeypatch):
    bench = script.Bench(torch.device("cpu"), str(tmp_path))
    case, other, *_ = (c.geometry for c in script.cases() if c.geometry.blocks_per_chunk > 1)
    monkeypatch.setattr(script.Region, "unlink", lambda _: None)  # as if the other was as early
    monkeypatch.setattr(script.os, "getpid", lambda: 1)
    with bench.region(case):
        monkeypatch.setattr(script.os, "getpid", lambda: 2)
        with bench.region(other) as region:
            region.check()
