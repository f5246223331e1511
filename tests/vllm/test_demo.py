"""The demo against a real server: a tier that is broken on purpose must not go unnoticed."""

from pathlib import Path

import pytest

from kvtiers.demo.history import build_history
from kvtiers.demo.passes import Stage, run_pass
from kvtiers.demo.plan import Break, Mode, disk_tier, read_geometry
from kvtiers.demo.progress import Progress
from kvtiers.demo.records import PassRecord
from kvtiers.demo.verdict import judge

MODEL = Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct"


@pytest.fixture
def stage(tmp_path):
    logs, disk = tmp_path / "logs", tmp_path / "disk"
    logs.mkdir()
    return Stage(MODEL, read_geometry(MODEL), logs, disk, disk_tier(disk), Progress(1), Break.DISK)


def test_spoiled_files_give_no_token_after_the_restart_and_the_verdict_is_failed(stage):
    record = run_pass(Mode.DISK, build_history(turns=2), stage)
    restarted = [t for t in record.turns if t.first_after_restart]
    assert [t.conversation for t in restarted] == [0, 1]
    assert all(t.tokens.disk == 0 for t in restarted)
    assert all(t.answer for t in restarted)
    # Whatever the other passes did, here with the same turns, this one alone fails the demo.
    others = {mode: PassRecord(mode, record.turns) for mode in Mode if mode is not Mode.DISK}
    verdict = judge({**others, Mode.DISK: record})
    assert not verdict.ok
    assert "no token of conversation 1 came from disk after the restart" in str(verdict)
