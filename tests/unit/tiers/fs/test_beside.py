"""Folders of strangers are counted, not followed out of the root, not for ever, and never fail."""

import os

import pytest

from kvtiers.tiers.fs import beside, names
from kvtiers.tiers.fs.beside import bytes_below, folders_beside
from kvtiers.tiers.places import Part


def found(root, complain=pytest.fail):
    return sorted(
        (part.value, size) for part, size in folders_beside(str(root), names.is_namespace, complain)
    )


def test_what_lies_deep_counts_and_what_is_ours_or_no_folder_does_not(tmp_path):
    for name in ("a/b/c", "0" * 32, f"{names.TRIAL}1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(bytes(len(name)))
    (tmp_path / "file").write_bytes(b"12")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    link = len(os.fsencode(tmp_path))
    trial = len(names.TRIAL) + 1
    assert found(tmp_path) == sorted(
        [(Part.FOREIGN.value, 5), (Part.FOREIGN.value, link), (Part.TRIAL.value, trial)]
    )
    assert bytes_below(str(tmp_path / "a")) == 5 + link


def test_a_folder_without_end_is_cut_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "_MOST", 10)
    for name in ("large", "small", f"{names.TRIAL}1"):
        (tmp_path / name).mkdir()
        for number in range(3 if name == "small" else 30):
            (tmp_path / name / str(number)).touch()
    said = []
    sizes = found(tmp_path, said.append)
    assert sizes == [("foreign", 0)] * (10 + 3) + [("trial", 0)] * 30
    large = tmp_path / "large"
    assert said == [f"{large} holds more than 10 names: the rest of it is not counted"]


def test_what_cannot_be_listed_is_left_out(tmp_path, monkeypatch):
    real = os.scandir

    def refuse(path):
        if os.path.basename(path) == "secret":
            raise PermissionError(13, "told to refuse", path)
        return real(path)

    for name in ("a/secret", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b" / "file").write_bytes(b"123")
    monkeypatch.setattr(beside.os, "scandir", refuse)
    assert found(tmp_path) == [("foreign", 3)]
    assert bytes_below(str(tmp_path / "a" / "secret")) == 0
    assert found(tmp_path / "absent") == []
