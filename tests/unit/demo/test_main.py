import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kvtiers.cli import main
from kvtiers.demo.main import conclude
from kvtiers.demo.plan import Mode


def test_without_a_model_the_demo_fails_with_the_remedy(tmp_path, capsys):
    assert main(["demo", "--model", str(tmp_path / "none"), "--output", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("RESULT failed --model ")
    assert last.endswith("run make model first")


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
