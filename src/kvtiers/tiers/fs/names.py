"""Where things lie under the root: ``<namespace>/<2 hex>/<digest hex>-g<group>.kvc``."""

import os
import re
from collections.abc import Iterator

from kvtiers.chunks import Key, key_digest, key_group, make_key

SUFFIX = ".kvc"
MANIFEST = "manifest.json"
TEMP = "tmp"
QUARANTINE = "quarantine"
LOG = "log"
"""Beside the namespaces: the segments of layout ``log``."""
QUOTA = ".kvtiers-quota"
"""The account of what lies under the root."""

_LEAVING = "leaving-"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_CHUNK = re.compile(r"((?:[0-9a-f]{2})*)-g([0-9]{1,10})\.kvc")
_FOLDER = re.compile(r"[0-9a-f]{2}")


def chunk_path(key: Key) -> str:
    """Path of a chunk relative to its namespace's folder."""
    digest = key_digest(key).hex()
    return f"{digest[:2] or '00'}/{digest}-g{key_group(key)}{SUFFIX}"


def chunk_key(file_name: str) -> Key | None:
    """The key that a file name stands for; None if it is no chunk."""
    match = _CHUNK.fullmatch(file_name)
    if match is None or int(match[2]) >= 1 << 32:
        return None
    return make_key(bytes.fromhex(match[1]), int(match[2]))


def leaving(path: str) -> str | None:
    """What the file of a chunk is called while it leaves; None if it is not named as a chunk."""
    folder, name = os.path.split(path)
    if chunk_key(name) is None or os.path.basename(folder) == QUARANTINE:
        return None
    return os.path.join(folder, _LEAVING + name)


def is_leaving(file_name: str) -> bool:
    """Whether somebody died while he deleted this file, or is about to."""
    return (
        file_name.startswith(_LEAVING) and chunk_key(file_name.removeprefix(_LEAVING)) is not None
    )


def is_namespace(name: str) -> bool:
    """Whether a folder of this name is a namespace."""
    return _NAMESPACE.fullmatch(name) is not None


def is_fan(name: str) -> bool:
    """Whether a folder of this name holds chunks of a namespace."""
    return _FOLDER.fullmatch(name) is not None


def namespaces(root: str) -> list[str]:
    """Folder names of the namespaces under ``root``. Raises OSError."""
    with os.scandir(root) as entries:
        return [e.name for e in entries if is_namespace(e.name) and e.is_dir(follow_symlinks=False)]


def chunk_files(folder: str) -> Iterator[tuple[Key, os.DirEntry[str]]]:
    """The chunks under a namespace's folder. What vanishes meanwhile is left out."""
    for fan in _entries(folder):
        if is_fan(fan.name):
            for entry in _entries(fan.path):
                key = chunk_key(entry.name)
                if key is not None:
                    yield key, entry


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # gone meanwhile, no folder, or another user's
