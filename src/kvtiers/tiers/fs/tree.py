"""Walks over all that lies under a root: to count it, and to find what may leave."""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from kvtiers.tiers.fs import names
from kvtiers.tiers.places import Report


class Candidate(NamedTuple):
    """A file that may leave; ordered by when it is to leave."""

    stamp: float
    """Its time in seconds (see ``stamps``); 0 for one that nobody finds any more."""
    name: str
    """Relative to the root."""
    size: int


class Measure(NamedTuple):
    """What a walk found."""

    bytes: int
    unlisted: OSError | None
    """Why a folder of ours could not be listed, if one could not: there is more than ``bytes``."""


def measure(root: str, namespaces: Iterable[str] | None = None) -> Measure:
    """Bytes of all files of ours under ``root``, or in some namespaces.

    Folders that may not be listed are left out; if one is ours, ``unlisted`` says which. Other
    errors are raised.

    A file that is renamed meanwhile may be counted twice and is never missed: they go from
    ``tmp`` to the chunks and from the chunks to ``quarantine``, and are visited in that order.
    """
    total, unlisted = 0, list[OSError]()
    if namespaces is None:
        total = _size(os.path.join(root, names.QUOTA), unlisted)
        namespaces = names.namespaces(root)
    for namespace in namespaces:
        folder = os.path.join(root, namespace)
        entries = _all_entries(folder, unlisted)
        below = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
        for place in sorted(below, key=_visit):
            total += sum(_size(path, unlisted) for path in _files(place, unlisted))
        direct = (e.path for e in _all_entries(folder, unlisted) if not _is_folder(e))
        total += sum(_size(path, unlisted) for path in direct)
    return Measure(total, unlisted[0] if unlisted else None)


def measure_for(report: Report, root: str, namespaces: Iterable[str] | None = None) -> int:
    """The bytes that ``measure`` finds; a folder that it leaves out is said in ``report``."""
    found = measure(root, namespaces)
    if found.unlisted is not None:
        report.problems.append(
            f"{found.unlisted.filename} cannot be listed ({found.unlisted.strerror}), so that what "
            "it holds neither counts nor leaves: call as the user who may list it"
        )
    return found.bytes


def _note(unlisted: list[OSError], error: OSError) -> None:
    """Raise ``error`` unless it says: gone meanwhile, no folder, or not for us to see."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error
    if _is_ours(str(error.filename)):
        unlisted.append(error)


def _is_ours(path: str) -> bool:
    """Whether ``path`` is a folder of this user; True if that cannot be told."""
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def files_below(root: str, folders: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each file that lies in ``root`` itself or anywhere in these folders of it, and its bytes."""
    direct = (entry.path for entry in _entries(root) if not _is_folder(entry))
    below = (p for name in folders for p in _files(os.path.join(root, name), []))
    for path in (*direct, *below):
        yield path, _size(path, [])


def _visit(path: str) -> tuple[int, str]:
    name = os.path.basename(path)
    return {names.TEMP: 0, names.QUARANTINE: 2}.get(name, 1), name


def candidates(root: str, namespaces: Iterable[str] | None = None) -> Iterator[list[Candidate]]:
    """What may leave, folder by folder. What cannot be listed is left out."""
    with contextlib.suppress(OSError):
        for namespace in names.namespaces(root) if namespaces is None else namespaces:
            yield quarantined(root, namespace)
            for fan in sorted(e.name for e in _entries(os.path.join(root, namespace))):
                if names.is_fan(fan):
                    yield _chunks(root, f"{namespace}/{fan}")


def quarantined(root: str, namespace: str) -> list[Candidate]:
    """The damaged chunks that were put aside."""
    return _chunks(root, f"{namespace}/{names.QUARANTINE}")


def _chunks(root: str, folder: str) -> list[Candidate]:
    """All that is named as a chunk, wherever it should lie: it counts, so it has to leave."""
    path, found = os.path.join(root, folder), []
    if os.path.islink(path):
        return []  # where it leads is not ours
    for entry in _entries(path):
        if names.is_leaving(entry.name) or names.chunk_key(entry.name) is not None:
            with contextlib.suppress(OSError):
                if not _is_folder(entry):
                    info = entry.stat(follow_symlinks=False)
                    is_there = names.key_at(os.path.basename(folder), entry.name) is not None
                    stamp = info.st_mtime if is_there else 0.0
                    found.append(Candidate(stamp, f"{folder}/{entry.name}", info.st_size))
    return found


def _files(folder: str, unlisted: list[OSError]) -> Iterator[str]:
    for where, _, file_names in os.walk(folder, onerror=partial(_note, unlisted)):
        for name in file_names:
            yield os.path.join(where, name)


def _size(path: str, unlisted: list[OSError]) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
    except PermissionError as e:  # its folder may be listed, and not entered
        _note(unlisted, PermissionError(e.errno, e.strerror, os.path.dirname(path)))
        return 0


def _all_entries(folder: str, unlisted: list[OSError]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as e:
        _note(unlisted, e)
        return []


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        return _all_entries(folder, [])
    except OSError:  # looked at again when the walk comes back
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
