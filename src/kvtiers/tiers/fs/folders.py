"""Opening a root and a namespace in it: made private, checked, refused in plain words.

Raises ConfigError about ``root_dir``; OSError is left to the caller to word.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import quote

from kvtiers.chunks import Namespace
from kvtiers.tiers.fs import locks, names
from kvtiers.tiers.options import bad_option

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES)
"""A file system without this call, or a folder above the root that may be passed but not read."""
_MAX_MANIFEST = 1 << 20
_HARMLESS = re.compile(r"\..*|lost\+found|.*_[0-9a-f]{12}(_r[0-9]+)?")
"""May lie beside ours: hidden things and the folders of vLLM's own fs tier."""


def make_folder(path: str, *, durable: bool = False) -> None:
    """Make ``path`` and what lacks above it, mode 0700 whatever the umask.

    ``durable``: the entries of new folders are on the device when this returns.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_folder(parent, durable=durable)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
        os.chmod(path, FOLDER_MODE)
        if durable:
            sync_folder(parent)
        return
    if not os.path.isdir(path):
        raise NotADirectoryError(path)


def sync_folder(path: str) -> None:
    """Wait until the entries of ``path`` are on the device, where the file system can tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        if e.errno not in _CANNOT_SYNC:
            raise


def write_durably(temp: str, path: str, data: bytes) -> None:
    """Make ``path``, mode 0600, from ``data`` by way of ``temp``; on the device on return."""
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with open(fd, "wb") as f:
        os.fchmod(fd, FILE_MODE)
        f.write(data)
        f.flush()
        os.fsync(fd)
    os.replace(temp, path)
    sync_folder(os.path.dirname(path))


def path_of(root_dir: str) -> str:
    """The absolute path that a configuration names."""
    return os.path.abspath(os.path.expanduser(root_dir))


def nearest_folder(path: str) -> str:
    """``path``, or the folder above it in which it would be made."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def open_root(root: str) -> None:
    """Make the folder ``root`` if it is absent, and refuse one that is not ours to use."""
    try:
        make_folder(root, durable=True)
        entries = os.listdir(root)
    except NotADirectoryError as e:
        raise bad_option("root_dir", f"is {root}, where a file is in the way: name a folder") from e
    except OSError as e:
        raise unusable(root, e) from e
    namespaces = [e for e in entries if names.is_namespace(e)]
    ours = {*namespaces, names.LOG}
    strangers = [e for e in entries if e not in ours and not _HARMLESS.fullmatch(e)]
    if strangers and not any(has_our_manifest(os.path.join(root, n)) for n in namespaces):
        raise bad_option(
            "root_dir",
            f"is {root}, which holds other things ({min(strangers)}): "
            "name an empty folder or one that kvtiers made",
        )


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
            found = [layout for layout, lies_at in _TRACES.items() if lies_at(root)]
            if not found:
                _FIRST_TRACES[wanted](root)
    except OSError as e:
        raise unusable(root, e) from e
    if len(found) > 1:
        places = " and ".join(f"'fs://{quote(root)}?layout={layout}'" for layout in found)
        raise bad_option(
            "root_dir",
            f"is {root}, where both layouts were used, so that no engine can work there: name "
            f"another folder, or bring {places} over by kvtiers migrate, each to a folder of its "
            "own",
        )
    if found and found != [wanted]:
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


def unusable(root: str, error: OSError) -> Exception:
    """The ConfigError for a root that cannot be worked in."""
    return bad_option(
        "root_dir",
        f"is {root}, where kvtiers cannot write ({error.strerror or error}): "
        "name a folder of its own that it may write to",
    )


def open_manifest(folder: str, namespace: Namespace, temp: Callable[[], str]) -> None:
    """Compare the manifest in ``folder`` with ours; write it if it is new.

    It is on the device on return, so that no chunk outlives it in a power cut. ``temp`` names a
    new file on the same file system.
    """
    path = os.path.join(folder, names.MANIFEST)
    expected = namespace.manifest().encode()
    try:
        found = read_manifest(path)
    except FileNotFoundError:
        stranger = _stranger(folder)
        if stranger is not None:
            raise bad_option(
                "root_dir",
                f"holds {folder}, which has no {names.MANIFEST} that says what it is, but "
                f"{stranger}: move that folder away",
            ) from None
        write_durably(temp(), path, expected)
        return
    if found != expected:
        raise bad_option(
            "root_dir",
            f"holds {path}, which disagrees with the model and configuration of this engine: "
            f"move the folder {folder} away",
        )
    sync_folder(folder)  # it may be another engine's, written just now


def has_our_manifest(folder: str) -> bool:
    """Whether ``folder`` is a namespace that kvtiers made: its name is the manifest's digest."""
    try:
        found = read_manifest(os.path.join(folder, names.MANIFEST))
    except OSError:
        return False
    return hashlib.sha256(found).hexdigest()[:32] == os.path.basename(folder)


def read_manifest(path: str) -> bytes:
    """Its bytes, none if it is no regular file. Does not wait for the writer of a fifo."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, _MAX_MANIFEST) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def _stranger(folder: str) -> str | None:
    """An entry of a namespace's folder that is not named as ours; None if all are.

    Chunks say in their header which namespace they are of, so that a lost manifest can be made
    again for them.
    """
    for name in os.listdir(folder):
        if name in (names.TEMP, names.QUARANTINE, names.MANIFEST):
            continue
        if not names.is_fan(name):
            return name
        with contextlib.suppress(FileNotFoundError):
            for below in os.listdir(os.path.join(folder, name)):
                if names.chunk_key(below) is None:
                    return f"{name}/{below}"
    return None
