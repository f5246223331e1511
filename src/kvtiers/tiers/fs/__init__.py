"""The ``fs`` tier: chunks as files, or in a log, on a local or shared file system."""

import os
from dataclasses import dataclass
from typing import Literal

from kvtiers.tiers.base import ChunkStore, StoreContext
from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.capacity import bound_of_files, check_stated
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.fs.log.opening import bound_of_log
from kvtiers.tiers.options import RunnerOptions, require


@dataclass(frozen=True, kw_only=True)
class FsOptions(RunnerOptions):
    """Options of the ``fs`` tier."""

    root_dir: str
    """Folder of all namespaces, absolute or beginning with ``~``; made if absent. May be shared by
    engines and hosts with layout ``files``; a log has one engine."""
    eviction: Literal["own", "external"] = "own"
    """Who sees to the bound: the engines that share the folder, together; or something else, and
    then no engine ever deletes a chunk. All that share it must say the same."""
    capacity_bytes: int | None = None
    """Bound of all kvtiers files under ``root_dir``, whoever writes them. Required with ``own``,
    unless ``capacity_fraction`` is given. The smallest that a living engine states rules."""
    capacity_fraction: float | None = None
    """The same as a share of the file system that holds ``root_dir``, above 0 and up to 0.95: of
    its size, not of what is free. If others fill it first, the oldest chunks leave for new ones."""
    layout: Literal["files", "log"] = "files"
    """``files``: one file per chunk, for folders that are shared. ``log``: segments with many
    chunks each, for a local disk and one engine: many times as fast with small chunks."""
    direct_io: Literal["auto", "on", "off"] = "auto"
    """Past the page cache where it works; ``on`` refuses a file system where it does not."""
    fsync: bool = False
    """Without it a power cut may lose chunks of the last seconds, or leave damaged ones, which
    are found by their checksum and dropped; never wrong bytes. With it every write waits for the
    device."""
    locality: Literal["LOCAL", "REMOTE"] = "LOCAL"
    """What tier filters and KV events call it: of this node, or of another or shared. vLLM's own
    ``fs`` tier leaves it out unless it is set; here it is ``LOCAL`` then. Some routers drop the
    events of any other locality."""
    enable_kv_events: bool = False
    """Whether chunks stored in it and removed from it appear among the engine's KV events."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.root_dir), "root_dir", "is empty: name a folder")
        require(
            _is_path(self.root_dir), "root_dir", f"is {self.root_dir!a}: no path has such a name"
        )
        require(
            os.path.isabs(os.path.expanduser(self.root_dir)),
            "root_dir",
            f"is {self.root_dir!a}, which is another folder wherever an engine is started: give an "
            "absolute path, or one that begins with ~",
        )
        require(
            self.layout == "files" or self.eviction == "own",
            "eviction",
            'is "external", but a log has one owner, who evicts: leave it out, or use layout files',
        )
        check_stated(self.eviction, self.capacity_bytes, self.capacity_fraction)


def _is_path(name: str) -> bool:
    """Whether the system can be asked for it: no NUL, no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def refuse_bound(context: StoreContext, options: FsOptions) -> None:
    """Raise ConfigError if the store that ``build`` makes would refuse its bound.

    It may be too small for such chunks, or larger than the file system. Nothing is changed.
    """
    if options.eviction == "external":
        return
    root = folders.path_of(options.root_dir)
    bound_of = bound_of_files if options.layout == "files" else bound_of_log
    bound_of(context, root, options.capacity_bytes, options.capacity_fraction)


def build(context: StoreContext, options: FsOptions) -> ChunkStore:
    """The store of a configured ``fs`` tier. Raises ConfigError naming the option."""
    if options.layout == "log":
        return LogStore(
            context,
            options.root_dir,
            capacity_bytes=options.capacity_bytes,
            capacity_fraction=options.capacity_fraction,
            direct_io=options.direct_io,
            fsync=options.fsync,
        )
    return FilesStore(
        context,
        options.root_dir,
        eviction=options.eviction,
        capacity_bytes=options.capacity_bytes,
        capacity_fraction=options.capacity_fraction,
        direct_io=options.direct_io,
        fsync=options.fsync,
    )


__all__ = ["FsOptions", "build", "refuse_bound"]
