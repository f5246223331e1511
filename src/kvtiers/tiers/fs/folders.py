"""Opening a root and a namespace in it: made private, checked, refused in plain words.

Raises ConfigError about ``root_dir``; OSError is left to the caller to word.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable

from kvtiers.chunks import Namespace
from kvtiers.errors import ConfigError
from kvtiers.tiers.fs import names
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
        raise _no_folder(path)


def _no_folder(path: str) -> OSError:
    return NotADirectoryError(errno.ENOTDIR, f"{path} is no folder", path)


def refuse_no_folder(path: str) -> None:
    """Raise NotADirectoryError if ``path`` is there, and neither a folder nor a link to one."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise _no_folder(path)


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
    refuse_strangers(root, make=True)


def refuse_strangers(root: str, *, make: bool = False) -> None:
    """Raise ConfigError if ``root`` is no folder, or one that is not ours to use."""
    try:
        if make:
            make_folder(root, durable=True)
        refuse_no_folder(root)
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


def unusable(root: str, error: OSError) -> Exception:
    """The ConfigError for a root that cannot be worked in."""
    if isinstance(error, TimeoutError):
        return bad_option(
            "root_dir",
            f"is {root}, where {error.filename} is locked: {error.strerror}, so it hangs or was "
            "stopped; end it, and start again",
        )
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
    found = _manifest_in(folder)
    if found is None:
        write_durably(temp(), path, expected)
        return
    if found != expected:
        raise _disagrees(folder)
    sync_folder(folder)  # it may be another engine's, written just now


def refuse_namespace(folder: str) -> None:
    """Raise ConfigError where :func:`open_manifest` would of whatever engine ``folder`` is for.

    Nothing is written. Raises OSError.
    """
    found = _manifest_in(folder)
    if found is not None and not _is_of(folder, found):
        raise _disagrees(folder)


def _manifest_in(folder: str) -> bytes | None:
    """None if it is to be written. Raises ConfigError if others use ``folder``, OSError."""
    with contextlib.suppress(FileNotFoundError):
        return read_manifest(os.path.join(folder, names.MANIFEST))
    stranger = _stranger(folder)
    if stranger is not None:
        raise bad_option(
            "root_dir",
            f"holds {folder}, which has no {names.MANIFEST} that says what it is, but "
            f"{stranger}: move that folder away",
        )
    return None


def _disagrees(folder: str) -> ConfigError:
    return bad_option(
        "root_dir",
        f"holds {os.path.join(folder, names.MANIFEST)}, which disagrees with the model and "
        f"configuration of this engine: move the folder {folder} away",
    )


def has_our_manifest(folder: str) -> bool:
    """Whether ``folder`` is a namespace that kvtiers made: its name is the manifest's digest."""
    try:
        return _is_of(folder, read_manifest(os.path.join(folder, names.MANIFEST)))
    except OSError:
        return False


def _is_of(folder: str, manifest: bytes) -> bool:
    return hashlib.sha256(manifest).hexdigest()[:32] == os.path.basename(folder)


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
