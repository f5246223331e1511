"""What ``doctor`` looks at of a bucket: each check gives a verdict on what was tried."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout
from kvtiers.cli.checks import largest_chunk
from kvtiers.cli.diskchecks import LARGE, TRIAL_BYTES, TRIAL_CHUNKS, judge_speed
from kvtiers.cli.measure import measure_bare, measure_tier
from kvtiers.cli.objtrial import BareObjects, bucket_trial
from kvtiers.cli.output import Advance, size
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.tiers.obj.bounded import refuse_too_small
from kvtiers.tiers.obj.client import Client, open_client
from kvtiers.tiers.obj.names import PACK_BELOW_BYTES
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.place import ObjPlace
from kvtiers.tiers.places import Part

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ASKED = 10
_FEW_S = 30.0
"""Clocks that differ by more find new packs late."""


def check_bucket(options: ObjOptions, chunk: int | None, advance: Advance) -> Iterator[Check]:
    """A tier below a prefix: does the service answer, and allow what an engine does there.

    ``chunk``: bytes of a chunk to try; None: as large as those that are stored.
    """
    yield check_transport(options)
    client = open_client(options)
    service = check_service(client)
    yield service
    if service.grade is Grade.FAIL:
        return
    try:
        with bucket_trial(options) as (said, trial):
            permissions = check_permissions(trial)
            yield permissions
            if permissions.grade is Grade.FAIL:
                return
            yield check_clock(_written_at(trial) - time.time())
            if chunk:
                yield _check_speed(said, trial, options.max_requests, chunk, advance)
    except KVTiersError as e:
        yield Check("trial", Grade.FAIL, str(e), "see the service")
        return
    place = ObjPlace(options, client)
    stored = chunk or largest_chunk(place)
    if not chunk:
        yield check_chunk(stored)
    if options.capacity_bytes is not None:
        ours = sum(u.bytes for u in place.usage() if u.part not in (Part.FOREIGN, Part.TRIAL))
        yield check_bound(options.capacity_bytes, ours, stored)


def check_transport(options: ObjOptions) -> Check:
    """Whether others can read along."""
    where = options.endpoint or str(options.where)
    if not where.startswith("http://"):
        return Check("transport", Grade.OK, f"{where}, by TLS")
    if urlsplit(where).hostname in _LOOPBACK:
        return Check("transport", Grade.OK, f"{where}, on this machine")
    remedy = "use https: who can read KV caches can learn of the prompts"
    return Check("transport", Grade.WARN, f"{where}, without TLS", remedy)


def check_service(client: Client) -> Check:
    """Whether it answers, and how soon."""
    try:
        client.folders()
        took = statistics.median(_timed(lambda: client.size("kvtiers")) for _ in range(_ASKED))
    except KVTiersError as e:
        return Check("service", Grade.FAIL, str(e), "an engine would refuse to start")
    return Check("service", Grade.OK, f"{client.where} answers in {took * 1e3:.1f} ms")


def _timed(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def check_permissions(trial: Client) -> Check:
    """Whether objects may be written, read, looked up, listed and deleted, by doing it."""
    for what, act in (
        ("written", lambda: trial.put("page", [bytes(4096)])),
        ("read", lambda: trial.get("page", 4096)),
        ("looked up", lambda: trial.size("page")),
        ("listed", lambda: _written_at(trial)),
        ("deleted", lambda: trial.delete(["page"])),
    ):
        try:
            act()
        except KVTiersError as e:
            return Check("permissions", Grade.FAIL, f"an object cannot be {what}: {e}", "allow it")
    trial.put("page", [bytes(4096)])
    return Check("permissions", Grade.OK, "objects are written, read, listed and deleted")


def _written_at(trial: Client) -> float:
    """When the page was, by the clock of the service. Raises KVTiersError."""
    return next(trial.objects())[0].modified_at


def check_clock(ahead_s: float) -> Check:
    """Whether the clock of the service is that of this machine."""
    if abs(ahead_s) > _FEW_S:
        found = f"the service is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
        remedy = "set both by NTP: signatures are refused at 15 minutes, and gc goes by its times"
        return Check("clock", Grade.WARN, found, remedy)
    return Check("clock", Grade.OK, "agrees with that of the service")


def check_chunk(chunk: int | None) -> Check:
    """How chunks of the size lie there."""
    if chunk is None:
        return Check("chunk size", Grade.OK, "not known: nothing is stored, --chunk-bytes says it")
    how = "packed" if chunk < PACK_BELOW_BYTES else "an object each"
    return Check("chunk size", Grade.OK, f"{size(chunk)} a chunk, {how}")


def check_bound(capacity: int, ours: int, chunk: int | None) -> Check:
    """Whether an engine takes the bound, and whether what is there is within it.

    Chunks have a page at least.
    """
    said = f"{size(capacity)}, {size(ours)} taken"
    layout = ChunkLayout((GroupLayout(0, chunk or PAGE_BYTES, 1),))
    try:
        refuse_too_small(layout, capacity)
    except ConfigError as e:
        return Check("capacity", Grade.FAIL, said, str(e))
    if ours > capacity:
        remedy = "engines that state it delete what was written first: raise it, or let them"
        return Check("capacity", Grade.WARN, said, remedy)
    return Check("capacity", Grade.OK, said)


def _check_speed(
    said: dict[str, Any], trial: Client, requests: int, chunk: int, advance: Advance
) -> Check:
    count, large = max(1, min(TRIAL_CHUNKS, TRIAL_BYTES // chunk)), TRIAL_BYTES // LARGE
    tier, _ = measure_tier(said, chunk, count, advance)
    bare = BareObjects(trial, LARGE)
    bucket = measure_bare(bare, LARGE, large, advance, "bucket", (requests, requests))
    return judge_speed(
        f"{size(chunk)} a chunk", "objects", _speeds(tier), _speeds(bucket), "bucket"
    )


def _speeds(figures: Sequence[Any]) -> list[float]:
    return [each.bytes_per_s for each in figures]
