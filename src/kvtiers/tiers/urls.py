"""URLs of tiers, as tools take them: ``fs:///PATH?layout=files&capacity=256MiB``."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvtiers.errors import ConfigError
from kvtiers.options import nearest
from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.files_place import FilesPlace
from kvtiers.tiers.fs.log_place import LogPlace
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.places import Complain, Place


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of ``fs``."""

    lies_at: Callable[[str], bool]
    """Whether a folder holds chunks of it. Never raises."""
    open: Callable[[FsURL, Complain], Place]


LAYOUTS: Mapping[str, Layout] = {
    "files": Layout(FilesPlace.lies_at, FilesPlace),
    "log": Layout(LogPlace.lies_at, LogPlace),
}
"""Layouts of ``fs``; the first is that of an empty folder."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGTP]?)(i?)B?", re.IGNORECASE)
_MAX_BYTES = (1 << 63) - 1


def open_place(url: str, complain: Complain, *, make: bool = False) -> Place:
    """The place that ``url`` names. ``make``: it need not exist, a store may make it.

    Raises ConfigError, one sentence, for a URL that is not understood or a folder that is absent.
    """
    parsed = parse_url(url)
    if os.path.lexists(parsed.path) or not make:
        _refuse_no_folder(url, parsed.path)
    if not make:
        _refuse_strange_folder(url, parsed.path)
    return LAYOUTS[layout_of(url, parsed)].open(parsed, complain)


def _refuse_no_folder(url: str, path: str) -> None:
    try:
        with os.scandir(path):
            return
    except FileNotFoundError:
        what = "there is no such folder"
    except NotADirectoryError:
        what = "it is a file, not a folder"
    except OSError as e:
        what = f"the folder cannot be read: {e.strerror}"
    raise ConfigError(f"{url}: {what}; name the root_dir of an fs tier")


def _refuse_strange_folder(url: str, path: str) -> None:
    """A path with a slip of the pen must not look like a tier that is clean."""
    visible = [name for name in os.listdir(path) if not name.startswith(".")]
    if visible and not any(names.is_namespace(name) or name == names.LOG for name in visible):
        raise ConfigError(
            f"{url}: the folder holds nothing of kvtiers, but {min(visible)!a}; name the root_dir "
            "of an fs tier"
        )


def layout_of(url: str, parsed: FsURL) -> str:
    """The layout that the URL names, or else that of what lies there. Raises ConfigError."""
    path = parsed.path
    found = [name for name, layout in LAYOUTS.items() if layout.lies_at(path)]
    if parsed.layout is not None:
        if found and parsed.layout not in found:
            raise ConfigError(f"{url} is of layout {found[0]}: leave out layout={parsed.layout}")
        return parsed.layout
    if len(found) > 1:
        known = " or ".join(f"?layout={name}" for name in found)
        raise ConfigError(
            f"{url} holds chunks of layouts {' and '.join(found)}, so that no engine can work "
            f"there: add {known}, and bring each over with kvtiers migrate to a folder of its own"
        )
    return found[0] if found else next(iter(LAYOUTS))


def parse_url(url: str) -> FsURL:
    """Read a URL. Raises ConfigError with the nearest valid word where there is one."""
    if not _SCHEME.match(url):
        remedy = f"write fs://{quote(os.path.abspath(url))}" if url.startswith(("/", ".")) else ""
        raise ConfigError(
            f"{url!a} is no URL of a tier: {remedy or 'write one like fs:///var/cache/kvtiers'}"
        )
    try:
        split = urlsplit(url)
    except ValueError as e:
        raise ConfigError(f"{url!a} is no URL: {e}") from None
    if split.scheme != "fs":
        raise ConfigError(f"{url!a}: there are no tools for {split.scheme}:// yet, only for fs://")
    if split.netloc:
        raise ConfigError(
            f"{url!a} names the host {split.netloc!a}: write fs:/// and an absolute path"
        )
    path = unquote(split.path)
    if not path.strip("/") or "\0" in path or split.fragment:
        raise ConfigError(f"{url!a} names no folder: write one like fs:///var/cache/kvtiers")
    return FsURL(os.path.abspath(path), **_parameters(url, split.query))


def _parameters(url: str, query: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError(f"{url!a}: write parameters like ?layout=files&capacity=1GiB") from None
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key not in _PARAMETERS:
            near = nearest(key, _PARAMETERS)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(_PARAMETERS)}"
            raise ConfigError(f"{url!a}: unknown parameter {key!a}, {hint}")
        field, read = _PARAMETERS[key]
        if field in found:
            raise ConfigError(f"{url!a}: {key} is given twice")
        found[field] = read(key, value)
    return found


def _one_of(*words: str) -> Callable[[str, str], str]:
    def read(key: str, value: str) -> str:
        if value not in words:
            near = nearest(value, words)
            hint = f"did you mean {near}?" if near else f"give {' or '.join(words)}"
            raise ConfigError(f"{key} is {value!a}: {hint}")
        return value

    return read


def parse_size(key: str, text: str) -> int:
    """Bytes of ``4096``, ``256MiB`` or ``1.5 GB``. Raises ConfigError naming ``key``."""
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number, unit, binary = match.groups()
        scale = (1024 if binary else 1000) ** " KMGTP".index(unit.upper() or " ")
        size = int(number) * scale if number.isdigit() else int(float(number) * scale)
        if size <= _MAX_BYTES and not (binary and not unit):
            return size
    raise ConfigError(f"{key} is {text!a}: give bytes, or a size like 256MiB or 1.5GB")


def _parse_capacity(key: str, text: str) -> int:
    size = parse_size(key, text)
    if not size:
        raise ConfigError(f"{key} is {text!a}: give more than 0 bytes, or leave it out")
    return size


_PARAMETERS: Mapping[str, tuple[str, Callable[[str, str], object]]] = {
    "layout": ("layout", _one_of(*LAYOUTS)),
    "capacity": ("capacity_bytes", _parse_capacity),
    "direct_io": ("direct_io", _one_of("auto", "on", "off")),
}
