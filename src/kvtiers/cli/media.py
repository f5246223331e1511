"""What a tier is measured on: a disk, a bucket, a server; each says where a trial takes place."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from kvtiers.cli.bare import Bare
from kvtiers.cli.kvtrial import BareValues, server_trial
from kvtiers.cli.measure import LANES, open_bare, trial_options
from kvtiers.cli.objtrial import BareObjects, bucket_trial
from kvtiers.cli.output import size
from kvtiers.errors import ConfigError, map_errors
from kvtiers.tiers.fs import trials
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.fs.urls import layout_of
from kvtiers.tiers.kv import urls as kv
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.obj.client import open_client
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.written import url_of


@dataclass(frozen=True, slots=True)
class Trial:
    """An open one."""

    options: dict[str, Any]
    """Of the tier that is measured."""
    open_bare: Callable[[bool], Bare]
    """Calls of the same shape to the medium alone; whether past the page cache."""


class Medium(Protocol):
    """Where a tier lies, as its URL says."""

    name: str
    layout: str
    lanes: tuple[int, int]
    """Threads of the bare calls, for writing and for reading."""
    kept: str
    """The URL of what ``--keep`` leaves."""

    def refuse(self, total: int, keep: bool) -> None:
        """Raise ConfigError if so many bytes cannot be tried, or not be kept there."""

    def trial(self, chunk: int, count: int, keep: bool) -> AbstractContextManager[Trial]:
        """A place for it, which is gone afterwards. Raises ConfigError, KVTiersError."""

    def footnote(self, direct: bool) -> str:
        """What the last rows are."""


class Disk:
    """Of ``fs``: a hidden folder under the root."""

    name = "disk"
    lanes = LANES

    def __init__(self, url: FsURL) -> None:
        self._url = url
        self.layout = url.layout or layout_of(url)  # it has a folder of its own
        self.kept = f"fs://{quote(url.path)}"

    def refuse(self, total: int, keep: bool) -> None:
        """Three times as much has to fit."""
        where = self._url.path
        while not os.path.isdir(where):
            where = os.path.dirname(where)
        disk = os.statvfs(where)
        free = disk.f_bavail * disk.f_frsize
        if 3 * total > free:
            raise ConfigError(
                f"--total-bytes {size(total)} needs three times as much on the disk, where "
                f"{size(free)} are free: lower it"
            )
        if keep:
            _refuse_to_mix(self._url.path)

    @contextmanager
    def trial(self, chunk: int, count: int, keep: bool) -> Iterator[Trial]:
        """In a root that is made if only that is missing."""
        root = self._url.path
        made = not os.path.lexists(root)
        if made and not os.path.isdir(os.path.dirname(root)):
            raise ConfigError(f"{self.kept}: there is no such folder, and none to make it in")
        with map_errors("bench in", root):
            if made:
                os.mkdir(root, 0o700)
            trials.remove(trials.left_behind(root))
        try:
            with map_errors("bench in", root), trials.trial_folder(root) as folder:
                options = trial_options(folder, self.layout, self._url.direct_io, chunk, count)
                if keep:
                    options["root_dir"] = root
                yield Trial(
                    options, lambda direct: open_bare(folder, self.layout, chunk, count, direct)
                )
        finally:
            if made and not keep:
                with suppress(OSError):  # others may use it by now
                    os.rmdir(root)

    def footnote(self, direct: bool) -> str:
        """Of the disk."""
        how = "past" if direct else "through"
        return f"bare calls of the same shape on as many threads, {how} the page cache"


def _refuse_to_mix(folder: str) -> None:
    """Chunks of no model stay by themselves: an engine would count them, and evict for them."""
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ConfigError(f"--keep: {folder} is no empty folder: name one, or one that is absent")


class Bucket:
    """Of ``obj``: a prefix of its own below the tier's."""

    name = "bucket"
    layout = "objects"

    def __init__(self, options: ObjOptions) -> None:
        self._options = options
        self.lanes = (options.max_requests, options.max_requests)
        self.kept = url_of(options)

    def refuse(self, total: int, keep: bool) -> None:
        """There is room in a bucket."""
        if keep and next(open_client(self._options).objects(), None):
            raise ConfigError(
                f"--keep: something is stored below {self._options.where} already: name a prefix "
                "with nothing below it"
            )

    @contextmanager
    def trial(self, chunk: int, count: int, keep: bool) -> Iterator[Trial]:
        """Below a prefix that no engine and no other tool uses."""
        with bucket_trial(self._options) as (options, client):
            if keep:
                options["url"] = str(self._options.where)
            yield Trial(options, lambda direct: BareObjects(client, chunk))

    def footnote(self, direct: bool) -> str:
        """Of the bucket."""
        return f"one bare request for each chunk, {self.lanes[0]} at a time"


class KeyValueServer:
    """Of ``kv``: a prefix of its own below the tier's."""

    name = "server"
    layout = "values"

    def __init__(self, options: KvOptions) -> None:
        self._options = options
        threads = options.n_write_threads, options.n_read_threads + options.n_write_threads
        self.lanes = threads
        self.kept = kv.url_of(options)

    def refuse(self, total: int, keep: bool) -> None:
        """Whether there is room its memory shows: what it evicts meanwhile is an error."""
        if keep and kv.open_kv(self._options, _unheard, True).has_any():
            raise ConfigError(
                f"--keep: something is stored at {self.kept} already: name a prefix that nobody "
                "uses"
            )

    @contextmanager
    def trial(self, chunk: int, count: int, keep: bool) -> Iterator[Trial]:
        """Under names that no engine and no other tool uses."""
        with server_trial(self._options) as trial:
            yield Trial(
                kv.options_of(self._options) if keep else trial.options,
                lambda direct: BareValues(trial, chunk),
            )

    def footnote(self, direct: bool) -> str:
        """Of the server."""
        wrote, read = self.lanes
        return f"one bare call for each chunk, written {wrote} and read {read} at a time"


def _unheard(sentence: str) -> None:
    """Said when the tier is looked at."""


def medium_of(parsed: FsURL | ObjOptions | KvOptions) -> Medium:
    """The medium of a parsed URL."""
    if isinstance(parsed, KvOptions):
        return KeyValueServer(parsed)
    return Disk(parsed) if isinstance(parsed, FsURL) else Bucket(parsed)
