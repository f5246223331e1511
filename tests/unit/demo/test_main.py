import errno
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kvtiers.cli import main
from kvtiers.demo import main as demo
from kvtiers.demo.main import conclude
from kvtiers.demo.plan import Mode
from kvtiers.errors import Kind, KVTiersError

GEOMETRY = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8}


def test_without_a_model_the_demo_fails_with_the_remedy(tmp_path, capsys):
    assert main(["demo", "--model", str(tmp_path / "none"), "--output", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("RESULT failed --model ")
    assert last.endswith("run make model first")


@pytest.fixture
def failing(tmp_path, monkeypatch, capsys):
    """``failing(error)``: the demo's exit status and last line when ``error`` meets it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GEOMETRY))

    def start(error, output=tmp_path / "results"):
        def fail(mode, history, stage):
            raise error

        monkeypatch.setattr(demo, "run_pass", fail)
        status = main(["demo", "--model", str(model), "--output", str(output)])
        return status, (capsys.readouterr().out.splitlines() or [""])[-1]

    return start


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("No module named 'matplotlib'"), "ModuleNotFoundError: No module"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("first line\nsecond line"), "RuntimeError: first line; the traceback"),
        (AssertionError(), "AssertionError: it says no more; the traceback"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_whatever_goes_wrong_is_a_result_and_its_traceback_is_kept(
    failing, tmp_path, error, sentence
):
    status, last = failing(error)
    log = tmp_path / "results" / "logs" / "demo.log"
    assert status == 1
    assert last.startswith("RESULT failed ")
    assert sentence in last
    assert last.endswith(f"the traceback is in {log}")
    assert "in _run_passes" in log.read_text()
    assert list((tmp_path / "results").glob(".disk-*")) == []


def test_a_server_that_does_not_start_is_a_result(failing):
    error = KVTiersError("the server ended with status 3; see its log:\n  ERROR", kind=Kind.IO)
    assert failing(error) == (1, "RESULT failed the server ended with status 3; see its log")


def test_an_output_that_cannot_be_written_is_a_result(failing, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    status, last = failing(None, output=tmp_path / "file")
    assert status == 1
    assert last.startswith("RESULT failed NotADirectoryError: ")
    assert last.endswith("the traceback is above")


def test_a_model_that_is_no_model_is_a_result(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    assert main(["demo", "--model", str(tmp_path), "--output", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("RESULT failed JSONDecodeError: ")


def test_ctrl_c_is_not_a_result(failing):
    assert failing(KeyboardInterrupt()) == (130, "")


def test_good_records_end_with_ok_and_leave_the_results(samples, tmp_path, capsys):
    assert conclude(samples.good_records(), tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("RESULT ok ")
    assert json.loads((tmp_path / "demo.json").read_text())["result"] == "ok"
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_bad_records_end_with_failed_and_leave_the_results_too(samples, tmp_path, capsys):
    records = samples.change(
        samples.good_records(), Mode.DISK, lambda turn: replace(turn, answer="?")
    )
    assert conclude(records, tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("RESULT failed host + disk: 8 of 8")
    assert json.loads((tmp_path / "demo.json").read_text())["result"] == "failed"


def test_an_unknown_tier_to_break_is_refused(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["demo", "--break", "device"])
    assert raised.value.code == 2
    assert "'host', 'disk'" in capsys.readouterr().err


def test_the_command_line_starts_without_heavy_imports():
    script = (
        "import sys; from kvtiers.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    output = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert output.splitlines()[-1] == "[]"
