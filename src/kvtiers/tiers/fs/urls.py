"""URLs of ``fs``: ``fs:///PATH?layout=files&capacity=256MiB``."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvtiers.errors import ConfigError
from kvtiers.tiers.fs import names
from kvtiers.tiers.fs.files_place import FilesPlace
from kvtiers.tiers.fs.log_place import LogPlace
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.parameters import Parameters, SplitURL, one_of, parse_capacity
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

_PARAMETERS: Parameters = {
    "layout": ("layout", one_of(*LAYOUTS)),
    "capacity": ("capacity_bytes", parse_capacity),
    "direct_io": ("direct_io", one_of("auto", "on", "off")),
}


def parse_fs(url: SplitURL) -> FsURL:
    """What a URL says. Raises ConfigError."""
    if url.host:
        raise ConfigError(
            f"{url.shown} names the host {url.host!a}: write fs:/// and an absolute path"
        )
    if not url.path.strip("/") or "\0" in url.path or url.fragment:
        raise ConfigError(f"{url.shown} names no folder: write one like fs:///var/cache/kvtiers")
    return FsURL(os.path.abspath(url.path), **url.parameters(_PARAMETERS))


def below_fs(url: FsURL, name: str) -> FsURL:
    """A folder of its own below that of a URL."""
    return replace(url, path=os.path.join(url.path, name))


def open_fs(parsed: FsURL, complain: Complain, make: bool) -> Place:
    """The place. ``make``: it need not exist. Raises ConfigError."""
    url = f"fs://{parsed.path}"
    if os.path.lexists(parsed.path) or not make:
        _refuse_no_folder(url, parsed.path)
    if not make:
        _refuse_strange_folder(url, parsed.path)
    return LAYOUTS[layout_of(parsed)].open(parsed, complain)


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


def layout_of(parsed: FsURL) -> str:
    """The layout that a URL names, or else that of what lies there. Raises ConfigError."""
    url, path = f"fs://{parsed.path}", parsed.path
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
