"""How much memory a process may still take: what the machine has, and what its containers allow.

Pages of a tmpfs are charged to the control group (cgroup) that first touches them, as those of a
process are, and cannot be reclaimed. The kernel answers an allocation above the limit of a group
not with an error but by killing one of its processes: so the limit is asked first.

Files: proc_meminfo(5), proc_pid_cgroup(5), proc_pid_mountinfo(5); for version 2 the kernel's
``Documentation/admin-guide/cgroup-v2.rst``, for version 1 ``cgroup-v1/memory.rst`` there.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from kvtiers.errors import Kind, KVTiersError, map_errors

Read = Callable[[str], str]
"""The text of a file. Raises OSError if it cannot be had."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one control group above this process still leaves it."""

    path: str
    """The file that sets the limit."""
    left: int
    """Bytes, those of reclaimable page cache included."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files of one version of cgroups are called."""

    limit: str
    usage: str
    reclaimable: tuple[str, str]
    """Lines of ``memory.stat``, whole subtree: page cache that gives way. No tmpfs in them."""


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


def read_text(path: str) -> str:
    """The text of the file ``path``."""
    with open(path) as file:
        return file.read()


def available_memory(read: Read = read_text) -> int:
    """Bytes this machine can still give without swapping (``MemAvailable``)."""
    path = "/proc/meminfo"
    with map_errors("read", path):
        lines = read(path).splitlines()
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KVTiersError(f"{path} does not say MemAvailable", kind=Kind.UNSUPPORTED)


def container_limits(read: Read = read_text) -> list[Limit]:
    """Every limit that a control group of this process sets; none where there are no groups."""
    return list(_limits(read))


def _limits(read: Read) -> Iterator[Limit]:
    try:
        memberships = read("/proc/self/cgroup").splitlines()
        mounts = [line.split() for line in read("/proc/self/mountinfo").splitlines()]
    except OSError:
        return
    for membership in memberships:
        number, controllers, group = membership.split(":", 2)
        if number == "0" and controllers == "":
            files, kind, option = _V2, "cgroup2", ""
        elif "memory" in controllers.split(","):
            files, kind, option = _V1, "cgroup", "memory"
        else:
            continue
        for root, point in _mounted(mounts, kind, option):
            for folder in _folders(group, root, point):
                limit = _limit(read, folder, files)
                if limit is not None:
                    yield limit


def _mounted(mounts: list[list[str]], kind: str, option: str) -> Iterator[tuple[str, str]]:
    """The group that each mount of a hierarchy shows, and where it is mounted."""
    for fields in mounts:
        # ... root, mount point, options, any number of tags, "-", type, source, super options
        after = fields.index("-")
        if fields[after + 1] == kind and option in ["", *fields[after + 3].split(",")]:
            yield fields[3], fields[4]


def _folders(group: str, root: str, point: str) -> Iterator[str]:
    """Folders of the groups from that of this process up to the highest one that is mounted.

    Where ``group`` does not lie under ``root`` the mount was made in another cgroup namespace,
    and shows this container's own group at its top.
    """
    path = PurePosixPath(group)
    is_shown = path.is_relative_to(root) and ".." not in path.parts
    below = path.relative_to(root) if is_shown else PurePosixPath()
    folder = PurePosixPath(point) / below
    for _ in range(len(below.parts) + 1):
        yield str(folder)
        folder = folder.parent


def _limit(read: Read, folder: str, files: _Files) -> Limit | None:
    """The limit that the group at ``folder`` sets, if it sets one."""
    path = os.path.join(folder, files.limit)
    try:
        limit = read(path).strip()
        usage = int(read(os.path.join(folder, files.usage)))
    except OSError:  # the root group has no such files
        return None
    if limit == "max":
        return None
    stat: dict[str, str] = {}
    with suppress(OSError):
        stat = dict(line.split() for line in read(os.path.join(folder, "memory.stat")).splitlines())
    cache = sum(int(stat.get(name, 0)) for name in files.reclaimable)
    return Limit(path, max(0, int(limit) - usage + min(cache, usage)))
