"""``kvtiers keys new``."""

import os

from kvtiers.tiers.p2p.security import read_keys
from tests.unit.cli.cli_kit import good, kvtiers


def test_a_new_pair_is_private_and_its_public_key_is_shown(tmp_path):
    file = tmp_path / "p2p.key"
    ran = good(kvtiers("keys", "new", file))
    pair = read_keys(str(file))
    assert pair.public.decode() in ran.out.splitlines()
    assert pair.secret.decode() not in ran.out
    assert os.stat(file).st_mode & 0o777 == 0o600


def test_a_pair_is_never_replaced(tmp_path):
    file = tmp_path / "p2p.key"
    good(kvtiers("keys", "new", file))
    before = file.read_text()
    ran = kvtiers("keys", "new", file)
    assert ran.status == 2
    assert "exists: name a new file" in ran.err
    assert file.read_text() == before


def test_a_folder_that_is_not_there_is_said(tmp_path):
    ran = kvtiers("keys", "new", tmp_path / "no" / "p2p.key")
    assert ran.status == 2
    assert "is in no folder: make it first" in ran.err
