"""What ``doctor`` looks at for layout ``log``: a local disk, one owner, segments that suit."""

import os
import re
from collections.abc import Sequence

from kvtiers.chunks import PAGE_BYTES
from kvtiers.cli.output import size
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.tiers.fs.log.format import fits
from kvtiers.tiers.fs.log.opening import LEAST_CHUNKS, LEAST_SEGMENTS

_MOUNTS = "/proc/self/mountinfo"
_REMOTE = re.compile(
    r"nfs.*|cifs|smb.*|lustre|ceph|gpfs|beegfs|pvfs2|orangefs|afs|ocfs2|gfs2|9p|fuse\..*"
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


def check_local(folder: str, mounts: str = _MOUNTS) -> Check:
    """Whether the disk is one of this machine: a log belongs to one process of one host."""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            kind = file_system(file.read().splitlines(), os.path.realpath(folder))
    except OSError as e:
        return Check("local disk", Grade.WARN, f"not known: {e.strerror}", "look at mount yourself")
    if _REMOTE.fullmatch(kind):
        remedy = "use layout=files: hosts that share a log damage it, and each write waits for it"
        return Check("local disk", Grade.WARN, f"{kind}, which is shared over a network", remedy)
    return Check("local disk", Grade.OK, kind or "of an unknown kind")


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


def check_owner(owner: int | None) -> Check:
    """Whether an engine has the log open."""
    if owner is None:
        return Check("owner", Grade.OK, "no engine has the log open")
    found = f"process {owner or 'of another user'} has the log open"
    return Check("owner", Grade.WARN, found, "give any other engine a folder of its own")


def check_segments(
    lengths: Sequence[int],
    chunk: int | None,
    capacity: int | None,
    stated: str = "capacity_bytes",
) -> Check:
    """Whether the capacity holds the segments that are there, and segments hold enough chunks.

    ``stated``: the key of the configuration that it comes from.
    """
    least = fits(-(-(chunk or PAGE_BYTES) // PAGE_BYTES), LEAST_CHUNKS)
    said = f"{len(lengths)} of up to {size(max(lengths))}" if lengths else "none yet"
    if capacity is not None and capacity < LEAST_SEGMENTS * least:
        remedy = f"raise {stated}: {size(LEAST_SEGMENTS * least)} or more are needed"
        found = f"{said}; {size(capacity)} hold fewer than {LEAST_SEGMENTS} segments"
        return Check("segments", Grade.FAIL, found, remedy)
    if capacity is not None and sum(lengths) > capacity:
        found = f"{said}; {size(sum(lengths))} are more than the capacity, {size(capacity)}"
        return Check("segments", Grade.WARN, found, "the oldest leave when an engine opens the log")
    if chunk and lengths and max(lengths) < least:
        found = f"{said}: fewer than {LEAST_CHUNKS} chunks of {size(chunk)} each"
        return Check("segments", Grade.WARN, found, "longer ones take their place as they leave")
    return Check("segments", Grade.OK, said)
