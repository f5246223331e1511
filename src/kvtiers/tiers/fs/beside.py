"""Folders under a root that are none of its layout: counted for whoever looks for room.

None of it is ours to judge: what cannot be listed is left out, and what goes on for long is cut.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

from kvtiers.tiers.fs import names
from kvtiers.tiers.places import Complain, Part

_MOST = 100_000
"""Names that are looked at in one folder of strangers."""


def folders_beside(
    root: str, is_ours: Callable[[str], bool], complain: Complain
) -> Iterator[tuple[Part, int]]:
    """Part and bytes of each file in folders of ``root`` whose names are not ours.

    Links are not followed. ``complain`` hears of what is so large that only a part is counted.
    """
    for folder in _strangers(root, is_ours):
        tried = os.path.basename(folder).startswith(names.TRIAL)
        part = Part.TRIAL if tried else Part.FOREIGN
        for number, nbytes in enumerate(_sizes_below(folder)):
            if number >= _MOST and not tried:
                complain(f"{folder} holds more than {_MOST} names: the rest of it is not counted")
                break
            if nbytes is not None:
                yield part, nbytes


def bytes_below(folder: str) -> int:
    """The lengths of all files in ``folder``, as far as they can be seen."""
    return sum(nbytes or 0 for nbytes in _sizes_below(folder))


def _strangers(root: str, is_ours: Callable[[str], bool]) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        folders = [e for e in entries if e.is_dir(follow_symlinks=False)]
        return sorted(e.path for e in folders if not is_ours(e.name))
    return []


def _sizes_below(folder: str) -> Iterator[int | None]:
    """For each name its bytes; None if it is a folder's."""
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    yield None
                else:
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.stat(follow_symlinks=False).st_size
