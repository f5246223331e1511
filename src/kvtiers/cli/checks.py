"""What ``doctor`` looks at of a tier: each check gives a verdict on what was measured."""

import math
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import quote

from kvtiers.chunks import PAGE_BYTES
from kvtiers.cli.diskchecks import check_bound, check_file_system, check_making, check_speed
from kvtiers.cli.logchecks import check_owner, check_segments
from kvtiers.cli.machinechecks import ROOM_LEFT
from kvtiers.cli.output import Advance, size
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.config import WHERE
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.tiers.fs.capacity import key_of
from kvtiers.tiers.fs.direct import DirectFiles
from kvtiers.tiers.fs.folders import nearest_folder
from kvtiers.tiers.fs.quota import Eviction
from kvtiers.tiers.fs.starting import refuse_start
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.fs.urls import LAYOUTS, layout_of
from kvtiers.tiers.parameters import with_capacity
from kvtiers.tiers.places import Part, Place

_SMALL_CHUNK = 256 << 10
"""Below it a file per chunk costs more than its bytes: bench.md has figures."""
_LOOKED_AT = 64
_PRIVATE = 0o077


@dataclass(frozen=True, slots=True)
class IntendedTier:
    """What a tier is to be, besides what lies there."""

    share: float | None = None
    """The ``capacity_fraction`` of its configuration, if it states one."""
    chunk: int | None = None
    """Bytes of a chunk, as the call says it; None: as large as those that are stored."""

    @property
    def stated(self) -> str:
        """The key of the configuration that the capacity comes from."""
        return key_of(self.share)


def check_start(url: FsURL, eviction: Eviction | None) -> Check:
    """Whether an engine opens a root that is there, by what it checks itself.

    ``eviction``: None if it is not known.
    """
    try:
        layout = url.layout or layout_of(url)
        refuse_start(url.path, layout, eviction)
    except ConfigError as e:
        return Check("start", Grade.FAIL, "an engine refuses to start", str(e))
    return Check("start", Grade.OK, f"an engine of layout {layout} opens it")


def check_place(place: Place, intended: IntendedTier, advance: Advance) -> Iterator[Check]:
    """The root of a tier: may it be used, is there room, is its disk fit for such chunks."""
    root, direct_io = place.options["root_dir"], place.options["direct_io"]
    yield check_file_system(root, place.layout)
    yield from check_folder(root)
    yield check_direct(root, direct_io)
    ours = sum(u.bytes for u in place.usage() if u.part is not Part.FOREIGN)
    capacity, chunk = place.capacity(), intended.chunk or largest_chunk(place)
    disk = os.statvfs(root)
    free = disk.f_bavail * disk.f_frsize
    yield check_disk(place.url, free, ours, capacity, intended.share)
    if capacity is not None:
        known = next((f.namespace for f in place.namespaces() if f.namespace), None)
        yield check_bound(root, place.layout, capacity, intended.share, chunk, known)
    if intended.chunk:
        yield check_speed(root, place.layout, direct_io, intended.chunk, advance)
    else:
        yield check_chunk(chunk, place.layout)
    if place.layout == "log":
        yield check_owner(place.owner())
        yield check_segments(place.segments(), chunk, capacity)
    elif chunk and disk.f_files:
        yield check_inodes(disk.f_favail, free, chunk, capacity, intended.stated)


def check_absent(url: FsURL, intended: IntendedTier, advance: Advance) -> Iterator[Check]:
    """A root that an engine would make: whether it can, and whether there is room.

    What is tried is tried in the folder in which it would be made, and gone afterwards.
    """
    root, layout, capacity = url.path, url.layout or next(iter(LAYOUTS)), url.capacity_bytes
    above = nearest_folder(root)
    storage = check_file_system(above, layout)
    yield storage
    if storage.grade is Grade.FAIL:
        return
    making = check_making(root, above)
    yield making
    disk = os.statvfs(above)
    free, said = disk.f_bavail * disk.f_frsize, f"fs://{quote(root)}"
    if url.layout is not None:
        said += f"?layout={layout}"
    yield check_disk(said, free, 0, capacity, intended.share)
    if capacity is not None:
        yield check_bound(root, layout, capacity, intended.share, intended.chunk)
    if making.grade is Grade.FAIL:
        return
    yield check_direct(above, url.direct_io)
    if intended.chunk:
        yield check_speed(above, layout, url.direct_io, intended.chunk, advance)


def check_folder(root: str) -> Iterator[Check]:
    """Who may do what with the root."""
    info = os.stat(root)
    said = f"{root} is user {info.st_uid}'s, mode {stat.S_IMODE(info.st_mode):04o}"
    may = os.access(root, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
    if not may:
        remedy = "make it writable for the user that runs the engine, or run doctor as that user"
        yield Check("permissions", Grade.FAIL, f"{said}, and not for user {os.geteuid()}", remedy)
    elif stat.S_IMODE(info.st_mode) & _PRIVATE:
        remedy = "chmod 700: who can read KV caches can learn of the prompts"
        yield Check("permissions", Grade.WARN, said, remedy)
    else:
        yield Check("permissions", Grade.OK, said)


def check_direct(root: str, wanted: str) -> Check:
    """Whether O_DIRECT works, by writing and reading one page."""
    if wanted == "off":
        return Check("direct I/O", Grade.OK, "direct_io is off")
    try:
        works = _direct_works(root)
    except OSError as e:
        return Check(
            "direct I/O", Grade.FAIL, f"a file cannot be written: {e.strerror}", "see above"
        )
    if works:
        return Check("direct I/O", Grade.OK, "works past the page cache")
    if wanted == "on":
        return Check("direct I/O", Grade.FAIL, "refused by the file system", 'use "auto"')
    return Check("direct I/O", Grade.WARN, "refused by the file system: buffered", "another disk")


def _direct_works(root: str) -> bool:
    folder = tempfile.mkdtemp(prefix=".kvtiers-doctor-", dir=root)
    try:
        files, path = DirectFiles("auto", fsync=False), os.path.join(folder, "page")
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        files.write(path, page)
        files.read(path, page)
        return files.direct
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_disk(
    url: str, free: int, ours: int, capacity: int | None, share: float | None = None
) -> Check:
    """Whether what may be stored at ``url`` fits: free space, and what is there already.

    ``share``: the ``capacity_fraction`` that ``capacity`` was made of. It is of the size of the
    disk, so a disk that others fill ends before it; that costs chunks and nothing else.
    """
    said = f"{size(free)} free, {size(ours)} taken by kvtiers"
    if capacity is None:
        remedy = (
            f"say it to have it compared, as in {with_capacity(url)}; with eviction external "
            "something else evicts"
        )
        return Check("disk space", Grade.WARN, f"{said}; no capacity is known", remedy)
    said = f"{said}; capacity is {size(capacity)}"
    if share is not None:
        said = f"{said}, {share:g} of the disk"
    room = free + ours
    if capacity > room and share is not None:
        fitting = math.floor(share * room / capacity * ROOM_LEFT * 100) / 100
        remedy = (
            "others fill the disk before the bound is reached, and then the oldest chunks leave "
            "for new ones: make room, or "
        )
        if fitting:
            return Check(
                "disk space", Grade.WARN, said, f"{remedy}lower capacity_fraction to {fitting:g}"
            )
        return Check("disk space", Grade.WARN, said, f"{remedy}take another disk")
    if capacity > room:
        remedy = f"lower capacity_bytes to {size(int(room * ROOM_LEFT))}, or make room"
        return Check("disk space", Grade.FAIL, said, remedy)
    if capacity > room * ROOM_LEFT:
        return Check("disk space", Grade.WARN, said, "it leaves hardly any room for others")
    return Check("disk space", Grade.OK, said)


def check_chunk(chunk: int | None, layout: str) -> Check:
    """Whether a file per chunk is worth it."""
    if chunk is None:
        return Check("chunk size", Grade.OK, "not known: nothing is stored, --chunk-bytes says it")
    said = f"{size(chunk)} a chunk, layout {layout}"
    if layout == "files" and chunk < _SMALL_CHUNK:
        remedy = "use layout=log, or raise blocks_per_chunk: small files are slow"
        return Check("chunk size", Grade.WARN, said, remedy)
    return Check("chunk size", Grade.OK, said)


def check_inodes(
    free_files: int, free: int, chunk: int, capacity: int | None, stated: str = "capacity_bytes"
) -> Check:
    """Whether the file system has as many files as chunks fit.

    ``stated``: the key of the configuration that the capacity comes from.
    """
    files = (free if capacity is None else min(free, capacity)) // (chunk + PAGE_BYTES)
    said = f"{free_files} files left, room for {files} chunks"
    if free_files < files:
        return Check("inodes", Grade.WARN, said, f"raise blocks_per_chunk, or lower {stated}")
    return Check("inodes", Grade.OK, said)


def largest_chunk(place: Place) -> int | None:
    """Of some that are stored; None if none are."""
    sizes: list[int] = []
    with suppress(KVTiersError):
        for found in place.namespaces():
            sizes += [e.bytes for e in islice(place.entries(found.id), _LOOKED_AT)]
    return max(sizes, default=None)


def settings_of(document: Any) -> Mapping[str, Any]:
    """``kv_connector_extra_config`` of what a user wrote: that itself, or what holds it.

    Raises ConfigError if it is neither.
    """
    if isinstance(document, Mapping):
        if "kv_connector" in document and WHERE not in document:
            raise ConfigError(
                f"{WHERE} is missing: --kv-transfer-config without it has no cpu_bytes_to_use and "
                "no tiers, so write it beside kv_connector"
            )
        inner = document.get(WHERE, document)
        if isinstance(inner, Mapping):
            return inner
    raise ConfigError(
        f"--config holds no configuration: give what --kv-transfer-config or {WHERE} is"
    )
