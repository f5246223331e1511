"""Which layout a root is of: settled by its first owner, and refused to those of another."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import quote

from kvtiers.tiers.fs import locks, names
from kvtiers.tiers.fs.folders import FILE_MODE, make_folder, unusable
from kvtiers.tiers.options import bad_option


def settle_on_layout(
    root: str,
    wanted: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Bind ``root`` to layout ``wanted``: a first trace of it is left, whoever sees to the bound.

    Raises ConfigError if ``root`` has, or had, an owner of another layout. Each layout counts its
    own bytes and nobody else's, so that one root can hold one of them. What counts are an owner's
    traces, not chunks: one that lives may have stored none yet. The first trace is left in the turn
    that finds none, so that of two first owners one is refused.
    """
    try:
        with _alone_at(root, clock, sleep):
            found = _layouts_of(root)
            if not found:
                _FIRST_TRACES[wanted](root)
    except OSError as e:
        raise unusable(root, e) from e
    _refuse_other_layouts(root, wanted, found)


def refuse_layout(root: str, wanted: str) -> None:
    """Raise ConfigError where :func:`settle_on_layout` would; nothing is left. OSError."""
    _refuse_other_layouts(root, wanted, _layouts_of(root))


def _layouts_of(root: str) -> list[str]:
    return [layout for layout, lies_at in _TRACES.items() if lies_at(root)]


def _refuse_other_layouts(root: str, wanted: str, found: Sequence[str]) -> None:
    if len(found) > 1:
        places = " and ".join(f"'fs://{quote(root)}?layout={layout}'" for layout in found)
        raise bad_option(
            "root_dir",
            f"is {root}, where both layouts were used, so that no engine can work there: name "
            f"another folder, or bring {places} over by kvtiers migrate, each to a folder of its "
            "own",
        )
    if found and found[0] != wanted:
        raise bad_option(
            "root_dir",
            f'is {root}, which is of layout {found[0]}: set layout to "{found[0]}", name another '
            f"folder, or bring its chunks over with kvtiers migrate 'fs://{quote(root)}"
            f"?layout={found[0]}' NEW",
        )


@contextlib.contextmanager
def _alone_at(
    root: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[None]:
    """Nobody else settles on a layout for ``root`` meanwhile, where folders can be locked."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            locks.lock(fd, root, "another engine has been starting there", clock, sleep)
        except OSError as e:
            if e.errno not in locks.NO_FOLDER_LOCKS:
                raise
        yield
    finally:
        locks.unlock(fd)
        os.close(fd)


def _has_files(root: str) -> bool:
    """Whether engines of layout ``files`` keep, or kept, their books or chunks in ``root``."""
    if os.path.lexists(os.path.join(root, names.QUOTA)):
        return True
    for namespace in names.namespaces(root):  # without an account where there are no locks
        for entry in os.listdir(os.path.join(root, namespace)):
            if entry == names.TEMP or names.is_fan(entry):
                return True
    return False


def _has_log(root: str) -> bool:
    return os.path.lexists(os.path.join(root, names.LOG))


def _leave_account(root: str) -> None:
    """An empty one, as whoever locks it first makes it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    os.close(os.open(os.path.join(root, names.QUOTA), flags, FILE_MODE))


def _leave_log(root: str) -> None:
    make_folder(os.path.join(root, names.LOG), durable=True)


_TRACES: Mapping[str, Callable[[str], bool]] = {"files": _has_files, "log": _has_log}
_FIRST_TRACES: Mapping[str, Callable[[str], None]] = {"files": _leave_account, "log": _leave_log}
