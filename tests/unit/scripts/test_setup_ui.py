"""What the pictures' tests need is found, fetched, or asked for in one sentence."""

import subprocess

import pytest

from scripts import setup_ui


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with nothing on it; calls of apt-get and dpkg-deb are kept, and bring nothing."""
    calls = []

    def run(command, **options):
        calls.append(command)
        return subprocess.CompletedProcess(command, 100, "", "E: no network")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup_ui, "TOOLS", tmp_path / "tools")
    monkeypatch.setattr(setup_ui.subprocess, "run", run)
    return calls


def put(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_what_is_there_is_taken(bare, tmp_path, capsys):
    put(tmp_path, "chromium-browser")
    put(tmp_path / "tools" / "usr" / "bin", "prometheus")
    assert setup_ui.main() == 0
    assert bare == []
    assert "chromium-browser" in capsys.readouterr().out


def test_without_apt_a_person_is_told(bare, capsys):
    assert setup_ui.main() == 1
    assert capsys.readouterr().err.startswith("setup-ui: there is no Chromium on the PATH: install")
    assert bare == []


def test_without_root_a_person_is_told(bare, tmp_path, monkeypatch, capsys):
    put(tmp_path, "apt-get")
    monkeypatch.setattr(setup_ui.os, "geteuid", lambda: 1000)
    assert setup_ui.main() == 1
    assert "as root: apt-get install chromium" in capsys.readouterr().err
    assert bare == []


def test_old_lists_are_fetched_once(bare, tmp_path, monkeypatch, capsys):
    put(tmp_path, "apt-get")
    monkeypatch.setattr(setup_ui.os, "geteuid", lambda: 0)
    assert setup_ui.main() == 1
    assert [command[2] for command in bare] == ["install", "update", "install"]
    error = capsys.readouterr().err
    assert "E: no network" in error
    assert "apt-get install --yes --no-install-recommends chromium failed" in error
