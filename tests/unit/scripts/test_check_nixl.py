import importlib.util
from pathlib import Path

from kvtiers.testing import laws_of

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "check_nixl.py"


def test_a_dry_run_finds_nothing_wrong(monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # so that what the script sets is taken back
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("AWS_REGION", "")
    spec = importlib.util.spec_from_file_location("check_nixl", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "FAMILIES", script.FAMILIES[1:2])
    assert script.main(["--transport", "obstore"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (family,) = script.FAMILIES
    assert lines == [f"{family.__name__} {number}: OK" for number in laws_of(family)]
