"""Folders in which a tool tries a disk: gone afterwards, or with the next tool after a kill."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator

from kvtiers.tiers.fs.names import TRIAL


@contextlib.contextmanager
def trial_folder(root: str) -> Iterator[str]:
    """A folder in ``root``, locked (flock) while it is in use. Raises OSError."""
    folder = tempfile.mkdtemp(prefix=TRIAL, dir=root)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def left_behind(root: str) -> list[str]:
    """Folders of tools that died in ``root``."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        named = [e for e in entries if e.name.startswith(TRIAL)]
        return [e.path for e in named if e.is_dir(follow_symlinks=False) and _is_dead(e.path)]
    return []


def _is_dead(folder: str) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove(folders: list[str]) -> None:
    """Delete what was left behind, as far as that is allowed."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
