from pathlib import Path

import pytest

from tests.unit.cli.cli_kit import OTHER, TOKENS, Tier, write_json


@pytest.fixture(params=["files", "log"])
def layout(request: pytest.FixtureRequest) -> str:
    """How chunks lie: whatever has the same meaning for both is tried with both."""
    return str(request.param)


@pytest.fixture
def tier(tmp_path: Path, layout: str) -> Tier:
    """Two namespaces: four chunks of a prompt, and the first two of it for another model."""
    made = Tier(tmp_path / "kv", layout).fill()
    return made.fill(made.prompt[:2], OTHER, used_at=1_600_000_000.0)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A file with the tokens of the prompt, and a rest that fills no chunk."""
    return write_json(tmp_path / "prompt.json", [*TOKENS, 1, 2])
