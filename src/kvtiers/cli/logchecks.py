"""What ``doctor`` looks at for layout ``log``: one owner, segments that suit."""

from collections.abc import Sequence

from kvtiers.cli.output import size
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.tiers.fs.log.opening import LEAST_CHUNKS, least_segment_bytes


def check_owner(owner: int | None) -> Check:
    """Whether an engine has the log open."""
    if owner is None:
        return Check("owner", Grade.OK, "no engine has the log open")
    found = f"process {owner or 'of another user'} has the log open"
    return Check("owner", Grade.WARN, found, "give any other engine a folder of its own")


def check_segments(lengths: Sequence[int], chunk: int | None, capacity: int | None) -> Check:
    """Whether the capacity holds the segments that are there, and segments hold enough chunks."""
    said = f"{len(lengths)} of up to {size(max(lengths))}" if lengths else "none yet"
    if capacity is not None and sum(lengths) > capacity:
        found = f"{said}; {size(sum(lengths))} are more than the capacity, {size(capacity)}"
        return Check("segments", Grade.WARN, found, "the oldest leave when an engine opens the log")
    if chunk and lengths and max(lengths) < least_segment_bytes(chunk):
        found = f"{said}: fewer than {LEAST_CHUNKS} chunks of {size(chunk)} each"
        return Check("segments", Grade.WARN, found, "longer ones take their place as they leave")
    return Check("segments", Grade.OK, said)
