"""On what it was measured."""

import os
import platform
import re
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any


def describe(folder: str) -> dict[str, Any]:
    """The machine, its software, how busy it was, and the file system of ``folder``."""
    total, free = (_memory(name) for name in ("MemTotal", "MemAvailable"))
    return {
        "cpu": _first("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": total,
        "memory_available_gib": free,
        "kernel": platform.release(),
        "file_system": file_system(folder),
        "python": platform.python_version(),
        "vllm": _version("vllm"),
        "torch": _version("torch"),
        "kvtiers": _version("kvtiers"),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def file_system(folder: str) -> str:
    """``type on device`` of the mount that holds ``folder``."""
    path, best = str(Path(folder).resolve()), ("", "unknown")
    for line in _lines("/proc/mounts"):
        device, mount, kind = line.split()[:3]
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = mount, f"{kind} on {device}"
    return best[1]


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


def _first(file: str, pattern: str) -> str | None:
    found = (re.match(pattern, line) for line in _lines(file))
    return next((m[1] for m in found if m), None)


def _memory(name: str) -> float | None:
    kib = _first("/proc/meminfo", rf"{name}:\s*(\d+) kB")
    return round(int(kib) / 2**20, 1) if kib else None


def _version(module: str) -> str | None:
    """Of the distribution that ``module`` comes from: vLLM's for the CPU has a name of its own."""
    found = packages_distributions().get(module)
    return version(found[0]) if found else None
