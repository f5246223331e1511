"""Damaged files, put aside for whoever wants to know what happened; the last few are kept."""

import contextlib
import os
import stat

from kvtiers.tiers.fs import folders, names, tree
from kvtiers.tiers.fs.tree import Candidate

_MAX_KEPT = 4
"""Per namespace."""


def put_aside(namespace_folder: str, path: str) -> int:
    """Move the damaged file ``path`` away; how many bytes left the disk for it.

    Raises FileNotFoundError if somebody else did, and OSError if it cannot be moved.
    """
    folder = os.path.join(namespace_folder, names.QUARANTINE)
    aside = os.path.join(folder, os.path.basename(path))
    folders.make_folder(folder)
    freed = _size(aside)
    os.replace(path, aside)
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(aside).st_mode):
            os.rmdir(aside)  # somebody's making: it stays if there is anything in it
    root, namespace = os.path.split(namespace_folder)
    for old in overfull(root, namespace):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(root, old.name))
            freed += old.size
    return freed


def overfull(root: str, namespace: str) -> list[Candidate]:
    """What lies there beyond the few that are kept, oldest first."""
    kept = []
    for old in tree.quarantined(root, namespace):
        with contextlib.suppress(OSError):
            kept.append(old._replace(stamp=os.lstat(os.path.join(root, old.name)).st_mtime))
    return sorted(kept)[:-_MAX_KEPT]


def _size(path: str) -> int:
    try:
        info = os.lstat(path)
    except OSError:
        return 0
    return 0 if stat.S_ISDIR(info.st_mode) else info.st_size
