"""What ``doctor`` looks at of the disk below a tier: its kind, whether it is ours, room, speed."""

import os
import re
import time
from collections.abc import Sequence
from contextlib import closing

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Namespace
from kvtiers.cli.measure import measure_bare, measure_tier, open_bare, trial_options
from kvtiers.cli.output import Advance, rate, size
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.fs import FsOptions, refuse_bound
from kvtiers.tiers.fs.capacity import key_of
from kvtiers.tiers.fs.trials import trial_folder
from kvtiers.tiers.jobs import MAX_SLICE_BYTES
from kvtiers.tiers.options import parse

_MOUNTS = "/proc/self/mountinfo"
_ESCAPED = re.compile(r"\\([0-7]{3})")
_NO_DISK = re.compile(
    r"proc|sysfs|cgroup2?|devpts|debugfs|tracefs|securityfs|configfs|pstore|bpf|mqueue|hugetlbfs|"
    r"binfmt_misc|efivarfs|selinuxfs|autofs|nsfs|rpc_pipefs|fusectl"
)
"""A folder that is made there is none, or does something."""
_MEMORY = re.compile(r"tmpfs|devtmpfs|ramfs")
_REMOTE = re.compile(
    r"nfs.*|cifs|smb.*|lustre|ceph|gpfs|beegfs|pvfs2|orangefs|afs|ocfs2|gfs2|9p|fuse\..*"
)

_FEW_CHUNKS = 16
"""Less is hardly a cache; a log has room for as many at least."""
LARGE = MAX_SLICE_BYTES
"""A tier moves no more by one call."""
TRIAL_BYTES = 64 << 20
"""What is written and read to see how fast a disk is, each time that it is tried."""
TRIAL_CHUNKS = 1024
_ROOMY = 16
"""So many times that has to be free."""
WORTHWHILE = 1 / 3
"""Of what the disk does in large calls: below it other chunks or another layout are worth it."""
_UNKNOWN = Namespace({"kvtiers": "doctor"})


def check_file_system(folder: str, layout: str, mounts: str = _MOUNTS) -> Check:
    """Whether it is a disk at all, and for a log one of this machine: it has one owner."""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            kind = file_system(file.read().splitlines(), os.path.realpath(folder))
    except OSError as e:
        found = f"not known: {e.strerror}"
        return Check("file system", Grade.WARN, found, "look at mount yourself")
    if _NO_DISK.fullmatch(kind):
        found = f"{folder} is of {kind}, which stores no files"
        return Check("file system", Grade.FAIL, found, "name a folder on a disk")
    if _MEMORY.fullmatch(kind):
        remedy = "name a folder on a disk: this takes memory, and a restart of the machine ends it"
        return Check("file system", Grade.WARN, f"{kind}, which is memory", remedy)
    if layout == "log" and _REMOTE.fullmatch(kind):
        remedy = "use layout=files: hosts that share a log damage it, and each write waits for it"
        return Check("file system", Grade.WARN, f"{kind}, which is shared over a network", remedy)
    return Check("file system", Grade.OK, kind or "of an unknown kind")


def file_system(mounts: Sequence[str], folder: str) -> str:
    """The kind of file system that holds ``folder``, from the lines of mountinfo."""
    found, kind = "", ""
    for line in mounts:
        before, _, after = line.partition(" - ")
        words, kinds = before.split(" "), after.split(" ")
        if len(words) > 4 and kinds[0]:
            point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), words[4])
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(found):  # of equal ones the last lies on top
                found, kind = point, kinds[0]
    return kind


def check_making(root: str, above: str) -> Check:
    """Whether a root that is absent can be made, by making another folder where it would be."""
    first = os.path.join(above, os.path.relpath(root, above).split(os.sep)[0])
    if os.path.lexists(first):
        return Check("permissions", Grade.FAIL, f"{first} is in the way", "name another folder")
    try:
        with trial_folder(above):
            return Check("permissions", Grade.OK, f"{root} will be made in {above}")
    except OSError as e:
        found = f"{root} is absent, and user {os.geteuid()} cannot make it in {above}: {e.strerror}"
        return Check("permissions", Grade.FAIL, found, "make it, for the user of the engine")


def check_bound(
    root: str,
    layout: str,
    capacity: int,
    share: float | None = None,
    chunk: int | None = None,
    namespace: Namespace | None = None,
) -> Check:
    """Whether an engine takes the capacity, and whether more than a few chunks go into it.

    ``share``: the ``capacity_fraction`` that it was made of. Chunks have a page at least.
    """
    stated = key_of(share)
    bound = {stated: capacity if share is None else share}
    groups = (GroupLayout(0, chunk or PAGE_BYTES, 1),)
    context = StoreContext(
        "fs",
        "tool:fs",
        namespace or _UNKNOWN,
        ChunkLayout(groups),
        time.monotonic,
        time.time,
        lambda keys, reason: None,
    )
    try:
        refuse_bound(context, parse(FsOptions, {"root_dir": root, "layout": layout, **bound}))
    except ConfigError as e:
        return Check("capacity", Grade.FAIL, size(capacity), str(e))
    if chunk is None:
        return Check("capacity", Grade.OK, f"{size(capacity)}; --chunk-bytes has it held to chunks")
    count = capacity // (chunk + PAGE_BYTES)
    said = f"{size(capacity)}, room for {count} chunks of {size(chunk)}"
    if count < _FEW_CHUNKS:
        return Check("capacity", Grade.WARN, said, f"raise {stated}")
    return Check("capacity", Grade.OK, said)


def check_speed(folder: str, layout: str, direct_io: str, chunk: int, advance: Advance) -> Check:
    """What a tier of such chunks makes of the disk, tried in a folder of its own in ``folder``."""
    said = f"{size(chunk)} a chunk, layout {layout}"
    if chunk >= LARGE:
        return Check("chunk size", Grade.OK, f"{said}: no call is larger")
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < _ROOMY * TRIAL_BYTES:
        found = f"{said}: not tried, for {size(_ROOMY * TRIAL_BYTES)} have to be free"
        return Check("chunk size", Grade.WARN, found, "make room")
    try:
        with trial_folder(folder) as trial:
            ours, most = _speeds(trial, layout, direct_io, chunk, advance)
    except (KVTiersError, OSError) as e:
        return Check("chunk size", Grade.FAIL, f"{said}: a trial failed: {e}", "see the disk")
    return judge_speed(said, layout, ours, most)


def _speeds(
    trial: str, layout: str, direct_io: str, chunk: int, advance: Advance
) -> tuple[list[float], list[float]]:
    """Bytes per second, written and read: of such a tier, and of large bare calls."""
    count, large = min(TRIAL_CHUNKS, TRIAL_BYTES // chunk), TRIAL_BYTES // LARGE
    options = trial_options(trial, layout, direct_io, chunk, count)
    tier, direct = measure_tier(options, chunk, count, advance)
    with closing(open_bare(trial, "log", LARGE, large, direct)) as bare:
        disk = measure_bare(bare, LARGE, large, advance)
    return [f.bytes_per_s for f in tier], [f.bytes_per_s for f in disk]


def judge_speed(
    said: str, layout: str, ours: Sequence[float], most: Sequence[float], medium: str = "disk"
) -> Check:
    """Of bytes per second, written and read."""
    shares = [a / b for a, b in zip(ours, most, strict=True)]
    found = "; ".join(
        f"{verb} {rate(a)}, {share:.0%} of the {medium}"
        for verb, a, share in zip(("writes", "reads"), ours, shares, strict=True)
    )
    if min(shares) >= WORTHWHILE:
        return Check("chunk size", Grade.OK, f"{said}: {found}")
    remedy = "raise blocks_per_chunk: larger chunks would be faster"
    if layout == "files":
        remedy = "use layout=log on a local disk, or raise blocks_per_chunk: small files are slow"
    return Check("chunk size", Grade.WARN, f"{said}: {found}", remedy)
