"""A file is whole or absent; what a kill left of one goes with the next, and nothing else does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.tiers import whole
from kvtiers.tiers.whole import whole_file

SRC = Path(whole.__file__).parents[2]
KILLED = """
import os, signal, sys
from kvtiers.tiers.whole import whole_file
with whole_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_what_a_kill_left_goes_with_the_next_file(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "a"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        timeout=100,
    )
    assert ran.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    with whole_file(str(tmp_path / "b")) as file:
        file.write(b"whole")
    assert names(tmp_path) == ["b"]


def test_what_is_being_written_stays_and_so_does_what_is_no_such_file(tmp_path):
    others = [".kvtiers-quota", ".kvtiers-part", "x.kvtiers-part-"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / f"{whole._PREFIX}folder").mkdir()
    (tmp_path / f"{whole._PREFIX}link").symlink_to(tmp_path / others[0])
    before = names(tmp_path)
    with whole_file(str(tmp_path / "a")) as one:
        one.write(b"1")
        with whole_file(str(tmp_path / "b")) as other:
            other.write(b"2")
        assert not (tmp_path / "a").exists()
    assert names(tmp_path) == sorted([*before, "a", "b"])
    assert (tmp_path / "a").read_bytes() == b"1"


def test_one_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real, made = whole.tempfile.mkstemp, []

    def swept_once(**where):
        fd, path = real(**where)
        made.append(path)
        if len(made) == 1:
            os.unlink(path)
        return fd, path

    monkeypatch.setattr(whole.tempfile, "mkstemp", swept_once)
    with whole_file(str(tmp_path / "a")) as file:
        file.write(b"1")
    assert len(made) == 2
    assert names(tmp_path) == ["a"]


def test_where_locks_do_not_work_nothing_is_swept(tmp_path, monkeypatch):
    (tmp_path / f"{whole._PREFIX}x").touch()

    def refuse(fd, how):
        raise OSError(37, "no locks available")

    monkeypatch.setattr(whole.fcntl, "flock", refuse)
    with whole_file(str(tmp_path / "a")) as file:
        file.write(b"1")
    assert names(tmp_path) == [f"{whole._PREFIX}x", "a"]


def test_a_body_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(str(tmp_path / "a")):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"
