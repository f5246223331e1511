"""The file behind a region: its name, its lock, its header, and what dead engines left.

How ranks that start together agree, and how nothing is left behind, without a creator, a counter
or a process id:

* A region is a file ``kvtiers-<name>.region``: a header of ``HEADER_BYTES``, then the slots.
* Whoever has it open holds a shared ``flock``; the kernel lets go of it however a process dies. So
  a file that can be locked exclusively is a dead engine's, and ``sweep`` removes it.
* A file gets its name by ``link`` when its header is whole and its lock is held. The first link
  wins, the others join. No rank ever waits for another one's header, or finds half of one because
  its writer was killed; that is why there is no second lock for writing it.
* A file may lose its name between being opened and being locked; who finds that starts again.
* Only who holds the exclusive lock removes a dead file, so a name is never taken from a live one.
"""

import errno
import fcntl
import json
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import ConfigError, Kind, KVTiersError, map_errors

DIRECTORY = "/dev/shm"
HEADER_BYTES = 64 * 1024
FORMAT_VERSION = 2

_MAGIC = b"KVTREGN\0"
_PREFIX = struct.Struct("<8sII")
"""Magic, format version, bytes of JSON that follow."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_FILE = re.compile(r"kvtiers-[A-Za-z0-9_.-]+\.region(\.\w+\.new)?")
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Header:
    """What the processes that share a region agree on. ``record`` holds JSON values."""

    num_slots: int
    slot_bytes: int
    record: Mapping[str, Any]
    slab_slots: int = 1
    """A chunk may take several slots in a row, of as many at most."""

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return HEADER_BYTES + self.num_slots * self.slot_bytes

    def encode(self) -> bytes:
        """The header as it stands in the file. Raises KVTiersError if it cannot stand there."""
        slots = (
            self.num_slots if self.slab_slots > 0 and not self.num_slots % self.slab_slots else 0
        )
        if slots < 1 or self.slot_bytes < 1 or self.slot_bytes % PAGE_BYTES:
            raise KVTiersError(
                f"{self.num_slots} slots of {self.slot_bytes} bytes, {self.slab_slots} to a slab, "
                "cannot be a region: this is a bug in kvtiers, please report it",
                kind=Kind.BROKEN,
                operation="attach",
            )
        text = json.dumps(self.fields()).encode()
        if _PREFIX.size + len(text) > HEADER_BYTES:
            raise ConfigError(
                f"the description of the KV cache takes {len(text)} bytes, more than the "
                f"{HEADER_BYTES - _PREFIX.size} that a region has for it"
            )
        return _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(text)) + text

    def fields(self) -> dict[str, Any]:
        """The header as JSON values."""
        return {
            "num_slots": self.num_slots,
            "slot_bytes": self.slot_bytes,
            "slab_slots": self.slab_slots,
            "record": dict(self.record),
        }


def region_path(name: str, directory: str = DIRECTORY) -> str:
    """The file of region ``name``. Raises ConfigError for a name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f'region name "{name}" cannot be a file name: use 1 to 200 letters, digits, "_-."'
        )
    return os.path.join(directory, f"kvtiers-{name}.region")


def join_or_create(path: str, header: Header) -> int:
    """A descriptor of the region at ``path``, locked as live; made of ``header`` if absent."""
    content = header.encode()
    while True:
        fd = open_live(path)
        if fd is None:
            fd = _create(path, content, header.file_bytes)
        if fd is not None:
            return fd


def open_live(path: str) -> int | None:
    """A descriptor of ``path``, locked as live; None if absent. A dead engine's is removed."""
    while True:
        with map_errors("open", path):
            try:
                fd = os.open(path, _OPEN)
            except FileNotFoundError:
                return None
            with closing_on_error(fd):
                if _lock_if_dead(fd):
                    if not _is_ours(fd):
                        raise _foreign(path)
                    unlink_if_same(fd, path)
                else:
                    fcntl.flock(fd, fcntl.LOCK_SH)
                    if os.fstat(fd).st_nlink > 0:
                        return fd
            os.close(fd)


def read_header(fd: int, path: str) -> Header:
    """The header of an open region. Raises ConfigError if it is none of ours, or not whole."""
    with map_errors("read", path):
        status = os.fstat(fd)
        start = os.pread(fd, HEADER_BYTES, 0)
    if not _is_ours(fd) or len(start) < _PREFIX.size:
        raise _foreign(path)
    _magic, version, length = _PREFIX.unpack_from(start)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format {version}, this kvtiers knows {FORMAT_VERSION}: run the scheduler "
            "and all workers with the same version of kvtiers"
        )
    try:
        header = Header(**json.loads(start[_PREFIX.size : _PREFIX.size + length]))
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{path} has a damaged header ({e}): remove it") from e
    if status.st_size != header.file_bytes:
        raise ConfigError(
            f"{path} has {status.st_size} bytes instead of {header.file_bytes}: remove it"
        )
    return header


def allocate(fd: int, path: str) -> None:
    """Have all memory of the file now: later, a lack of it would kill the process (SIGBUS).

    Raises ConfigError, with the file removed, if there is not enough.
    """
    status = os.fstat(fd)
    if status.st_blocks * 512 >= status.st_size:
        return
    try:
        os.posix_fallocate(fd, 0, status.st_size)
    except OSError as e:
        with map_errors("allocate", path):
            unlink_if_same(fd, path)
            if e.errno != errno.ENOSPC:
                raise
        directory = os.path.dirname(path)
        raise too_large(status.st_size, free_space(directory), directory) from e


def unlink_if_same(fd: int, path: str) -> bool:
    """Remove ``path`` if it still is the open file ``fd``; whether it was."""
    try:
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def sweep(directory: str = DIRECTORY) -> list[str]:
    """Remove what dead engines of this user left in ``directory``; returns the paths removed.

    Raises ConfigError if it cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            paths = sorted(
                entry.path
                for entry in entries
                if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            )
    except OSError as e:
        raise _unusable(directory, e) from e
    return [path for path in paths if _remove_if_dead(path)]


def free_space(directory: str) -> int:
    """Bytes that can still be allocated in the file system of ``directory``."""
    try:
        found = os.statvfs(directory)
    except OSError as e:
        raise _unusable(directory, e) from e
    return found.f_bavail * found.f_frsize


def too_large(needed: int, free: int, directory: str) -> ConfigError:
    """The error for a region that does not fit its file system."""
    return ConfigError(
        f"cpu_bytes_to_use needs {needed} bytes, but {directory} has {free} bytes free: lower it, "
        f"or enlarge {directory} (in a container: --shm-size, or an emptyDir in memory)",
        key="cpu_bytes_to_use",
    )


@contextmanager
def closing_on_error(fd: int) -> Iterator[None]:
    """Close ``fd`` if the body raises."""
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _create(path: str, content: bytes, size: int) -> int | None:
    """A descriptor of the new region ``path``, locked as live; None if another was faster."""
    folder, file = os.path.split(path)
    with map_errors("create", path):
        try:
            fd, draft = tempfile.mkstemp(prefix=f"{file}.", suffix=".new", dir=folder)  # mode 0600
        except OSError as e:
            if e.errno in _FORBIDDEN:
                raise _unusable(folder, e) from e
            raise
        with closing_on_error(fd):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                os.pwrite(fd, content, 0)
                os.ftruncate(fd, size)
                os.link(draft, path)
            except (FileExistsError, FileNotFoundError):  # another's is there, or ours was swept
                is_made = False
            else:
                is_made = True
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft)
        if is_made:
            return fd
        os.close(fd)
    return None


def _is_ours(fd: int) -> bool:
    return os.fstat(fd).st_uid == os.geteuid() and os.pread(fd, len(_MAGIC), 0) == _MAGIC


def _unusable(directory: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"host memory cannot be had from region_directory {directory} ({error.strerror}): "
        "mount a tmpfs there, or name a folder in one that kvtiers may write to",
        key="region_directory",
    )


def _foreign(path: str) -> ConfigError:
    return ConfigError(f"{path} is not a kvtiers region of this user: remove it or take a new name")


def _lock_if_dead(fd: int) -> bool:
    """Lock the file exclusively if nobody uses it; whether that was so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_dead(path: str) -> bool:
    # A file that went away, or that cannot be opened, is not ours to sweep.
    with suppress(OSError):
        fd = os.open(path, _OPEN)
        try:
            # A draft is empty if its writer was killed at once.
            is_ours = _is_ours(fd) or (path.endswith(".new") and os.fstat(fd).st_size == 0)
            return is_ours and _lock_if_dead(fd) and unlink_if_same(fd, path)
        finally:
            os.close(fd)
    return False
