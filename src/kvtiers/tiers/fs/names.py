"""Where things lie under the root: ``<namespace>/<2 hex>/<digest hex>-g<group>.kvc``."""

import os
import re
from collections.abc import Callable, Iterable, Iterator

from kvtiers.chunks import Key, key_digest, key_group, make_key

SUFFIX = ".kvc"
MANIFEST = "manifest.json"
TEMP = "tmp"
QUARANTINE = "quarantine"
LOG = "log"
"""Beside the namespaces: the segments of layout ``log``."""
QUOTA = ".kvtiers-quota"
"""The account of what lies under the root."""
TRIAL = ".kvtiers-bench-"
"""So begin folders under the root in which a tool tries the disk: no capacity counts them."""

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


def key_at(folder: str, file_name: str) -> Key | None:
    """The chunk whose file is ``folder/file_name`` of a namespace; None if it is no chunk's.

    One in another folder than its name says is nobody's: no engine looks for it there.
    """
    key = chunk_key(file_name)
    if key is None or chunk_path(key) != f"{folder}/{file_name}":
        return None
    return key


def leaving(path: str) -> str | None:
    """What the file of a chunk is called while it leaves; None if it is no chunk's."""
    folder, name = os.path.split(path)
    if key_at(os.path.basename(folder), name) is None:
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


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # gone meanwhile, no folder, or another user's


def chunk_files(
    folder: str, listed: Callable[[str], Iterable[os.DirEntry[str]]] = _entries
) -> Iterator[tuple[Key, os.DirEntry[str]]]:
    """The chunks under a namespace's folder; ``listed`` gives what lies in one."""
    for fan in listed(folder):
        if is_fan(fan.name) and fan.is_dir(follow_symlinks=False):
            for entry in listed(fan.path):
                key = key_at(fan.name, entry.name)
                if key is not None:
                    yield key, entry
