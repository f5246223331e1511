"""A folder that cannot hold host memory is refused by the name of its key."""

import errno
import os
import tempfile

import pytest

from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.host.region import Region, check_capacity, sweep


def refusal(call) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.context == {"key": "region_directory"}
    return str(caught.value)


@pytest.mark.parametrize("call", [sweep, lambda d: check_capacity(8192, 4096, d)])
def test_an_absent_folder(tmp_path, call):
    message = refusal(lambda: call(str(tmp_path / "absent")))
    assert f"region_directory {tmp_path}/absent (No such file or directory)" in message
    assert "mount a tmpfs there, or name a folder in one that kvtiers may write to" in message


def test_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "(Not a directory)" in refusal(lambda: sweep(str(file)))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch, code):
    def forbidden(**kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkstemp", forbidden)
    message = refusal(lambda: Region.attach("r", {}, 1, 4096, str(tmp_path)))
    assert f"region_directory {tmp_path} ({os.strerror(code)})" in message


def test_a_device_that_fails_is_no_matter_of_configuration(tmp_path, monkeypatch):
    def failing(**kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tempfile, "mkstemp", failing)
    with pytest.raises(KVTiersError, match=r"create .* failed: Input/output error") as caught:
        Region.attach("r", {}, 1, 4096, str(tmp_path))
    assert not isinstance(caught.value, ConfigError)
