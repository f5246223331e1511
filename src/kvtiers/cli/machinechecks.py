"""What ``doctor`` looks at of the machine: packages, memory, what the kernel allows."""

import resource
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from kvtiers.chunks import PAGE_BYTES
from kvtiers.cli.output import size
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.host.limits import available_memory, container_limits
from kvtiers.host.region import check_capacity
from kvtiers.host.regionfile import free_space

_NEEDED_PYTHON = (3, 11)
_NEEDED_XXHASH = (3, 4)
_FEW_FILES = 1024
ROOM_LEFT = 0.9
"""Of what is free: memory or a disk that is full to the last byte serves nobody else."""


def check_versions() -> Iterator[Check]:
    """Python and the packages that are needed."""
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _NEEDED_PYTHON:
        yield Check("python", Grade.FAIL, python, "install Python 3.11 or later")
    else:
        yield Check("python", Grade.OK, python)
    try:
        found = version("xxhash")
    except PackageNotFoundError:
        yield Check("xxhash", Grade.FAIL, "not installed", "pip install xxhash")
        return
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < _NEEDED_XXHASH:
        yield Check("xxhash", Grade.FAIL, found, "install xxhash 3.4 or later")
    else:
        yield Check("xxhash", Grade.OK, found)


def check_memory(cpu_bytes: int | None, chunk: int | None, directory: str) -> Iterator[Check]:
    """Memory of the machine and its control groups, and the folder that host memory lies in."""
    try:
        machine, shared = available_memory(), free_space(directory)
    except KVTiersError as e:
        yield Check("memory", Grade.FAIL, str(e), "set region_directory to a tmpfs")
        return
    groups = [limit.left for limit in container_limits()]
    left = min([machine, shared, *groups])
    said = f"{size(machine)} available, {size(shared)} in {directory}"
    if groups and min(groups) < machine:
        said += f", {size(min(groups))} left by control groups"
    if cpu_bytes is None:
        yield Check("memory", Grade.OK, said)
        return
    try:
        check_capacity(cpu_bytes, chunk or PAGE_BYTES, directory)
    except ConfigError as e:
        yield Check("memory", Grade.FAIL, said, str(e))
        return
    wants = f"{said}; cpu_bytes_to_use is {size(cpu_bytes)}"
    if cpu_bytes > left * ROOM_LEFT:
        yield Check("memory", Grade.WARN, wants, "lower cpu_bytes_to_use: the engine needs some")
    else:
        yield Check("memory", Grade.OK, wants)


def check_limits(cpu_bytes: int | None) -> Iterator[Check]:
    """What the kernel allows a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _less(soft, _FEW_FILES):
        yield Check("open files", Grade.WARN, f"{soft} allowed", f"ulimit -n {_FEW_FILES} or more")
    else:
        yield Check("open files", Grade.OK, f"{_limit(soft)} allowed, at most {_limit(hard)}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"{size(locked) if locked != resource.RLIM_INFINITY else 'any amount'} may be locked"
    if cpu_bytes is not None and _less(locked, cpu_bytes):
        remedy = "ulimit -l unlimited, if a driver refuses to pin host memory"
        yield Check("locked memory", Grade.WARN, said, remedy)
    else:
        yield Check("locked memory", Grade.OK, said)


def _less(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else str(value)
