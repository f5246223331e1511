import pytest

from kvtiers.demo.history import build_history
from kvtiers.demo.passes import split_at_restart, spoil_files
from kvtiers.errors import KVTiersError


def test_restart_comes_between_turns_in_the_middle():
    history = build_history(turns=6)
    before, after = split_at_restart(history)
    assert before + after == history
    assert {r.turn for r in before} == {0, 1, 2}
    assert {r.turn for r in after} == {3, 4, 5}


def test_every_payload_is_spoiled_and_small_files_are_left(tmp_path):
    chunk = bytes(range(256)) * 512
    for name in ("a/b/one.bin", "two.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chunk)
    (tmp_path / "manifest.json").write_text("{}")
    assert spoil_files(tmp_path) == 2
    for name in ("a/b/one.bin", "two.bin"):
        spoiled = (tmp_path / name).read_bytes()
        assert len(spoiled) == len(chunk)
        # The head stays, so that only a look at the payload can find the damage.
        assert spoiled[:4096] == chunk[:4096]
        assert sum(a != b for a, b in zip(spoiled, chunk, strict=True)) == 64
    assert (tmp_path / "manifest.json").read_text() == "{}"


def test_nothing_to_spoil_is_an_error(tmp_path):
    with pytest.raises(KVTiersError, match="no stored chunk to break"):
        spoil_files(tmp_path)
