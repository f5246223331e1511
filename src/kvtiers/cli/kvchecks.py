"""What ``doctor`` looks at of a key-value server: each check gives a verdict on what was tried."""

import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtiers.cli.checks import largest_chunk
from kvtiers.cli.diskchecks import LARGE, TRIAL_BYTES, TRIAL_CHUNKS, judge_speed
from kvtiers.cli.kvtrial import BareValues, server_trial
from kvtiers.cli.measure import measure_bare, measure_tier
from kvtiers.cli.output import Advance, size
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.errors import KVTiersError
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.kv.urls import open_kv

if TYPE_CHECKING:
    from kvtiers.tiers.kv.trial import ServerTrial

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ASKED = 10


def check_server(options: KvOptions, chunk: int | None, advance: Advance) -> Iterator[Check]:
    """Servers of a tier: do they answer, allow what an engine does there, and have room.

    ``chunk``: bytes of a chunk to try; None: as large as those that are stored.
    """
    yield check_transport(options)
    with server_trial(options) as trial:
        service = check_service(options, trial)
        yield service
        if service.grade is Grade.FAIL:
            return
        permissions = check_permissions(trial)
        yield permissions
        if permissions.grade is Grade.FAIL:
            return
        yield check_memory(options, trial)
        if chunk:
            yield _check_speed(options, trial, chunk, advance)
    if not chunk:
        yield check_chunk(largest_chunk(open_kv(options, lambda sentence: None, True)))


def check_transport(options: KvOptions) -> Check:
    """Whether others can read along."""
    address = parse_address(options.url)
    if address.tls:
        return Check("transport", Grade.OK, f"{address}, by TLS")
    if all(name in _LOOPBACK for name, _ in address.hosts):
        return Check("transport", Grade.OK, f"{address}, on this machine")
    remedy = "use rediss: who can read KV caches can learn of the prompts"
    return Check("transport", Grade.WARN, f"{address}, without TLS", remedy)


def check_service(options: KvOptions, trial: "ServerTrial") -> Check:
    """Whether it answers, and how soon."""
    name = trial.name(0)
    try:
        took = statistics.median(_timed(trial, name) for _ in range(_ASKED))
    except KVTiersError as e:
        return Check("service", Grade.FAIL, str(e), "an engine would have misses only")
    found = f"{parse_address(options.url)} answers in {took * 1e3:.2f} ms"
    return Check("service", Grade.OK, found)


def _timed(trial: "ServerTrial", name: bytes) -> float:
    began = time.monotonic()
    trial.ask(b"EXISTS", name, name=name)
    return time.monotonic() - began


def check_permissions(trial: "ServerTrial") -> Check:
    """Whether a user may say what an engine says, by saying it."""
    name = trial.name(0)
    page = memoryview(bytes(4096))
    for what, act in (
        ("SET", lambda: trial.put(0, page)),
        ("GET", lambda: trial.get(0, memoryview(bytearray(4096)))),
        ("TOUCH", lambda: trial.ask(b"TOUCH", name, name=name)),
        ("EXPIRE", lambda: trial.ask(b"EXPIRE", name, b"600", name=name)),
        ("SCAN", trial.names),
        ("UNLINK", lambda: trial.ask(b"UNLINK", name, name=name)),
    ):
        try:
            act()
        except KVTiersError as e:
            return Check("permissions", Grade.FAIL, f"{what} fails: {e}", "see docs/configuration")
    return Check("permissions", Grade.OK, "values are written, read, listed and deleted")


def check_memory(options: KvOptions, trial: "ServerTrial") -> Check:
    """Whether there is a bound, and whether the server makes room within it."""
    from kvtiers.tiers.kv.memory import complaint

    try:
        said = trial.memory()
    except KVTiersError as e:
        grade = Grade.WARN if options.capacity_bytes is None else Grade.FAIL
        return Check("memory", grade, f"not known: {e}", "allow INFO")
    used, limits = sum(s.used_bytes for s in said), [s.limit_bytes for s in said]
    bounds = [b for b in (options.capacity_bytes, sum(limits) if all(limits) else None) if b]
    bound = f" of {size(min(bounds))}" if bounds else ", no bound"
    found = f"{size(used)} used{bound}; maxmemory-policy {said[0].policy}"
    problem = complaint(said, options.capacity_bytes, options.ttl_s is not None)
    if problem is not None:
        return Check("memory", Grade.WARN, found, f"the server {problem}")
    return Check("memory", Grade.OK, found)


def check_chunk(chunk: int | None) -> Check:
    """How chunks of the size lie there."""
    if chunk is None:
        return Check("chunk size", Grade.OK, "not known: nothing is stored, --chunk-bytes says it")
    return Check("chunk size", Grade.OK, f"{size(chunk)} a chunk, a value each")


def _check_speed(options: KvOptions, trial: "ServerTrial", chunk: int, advance: Advance) -> Check:
    count, large = max(1, min(TRIAL_CHUNKS, TRIAL_BYTES // chunk)), TRIAL_BYTES // LARGE
    try:
        tier, _ = measure_tier(trial.options, chunk, count, advance)
        threads = options.n_write_threads, options.n_read_threads + options.n_write_threads
        bare = measure_bare(BareValues(trial, LARGE), LARGE, large, advance, "server", threads)
    except KVTiersError as e:
        found = f"{size(chunk)} a chunk: {e}"
        return Check("chunk size", Grade.FAIL, found, "see whether there is room for the trial")
    ours, most = ([each.bytes_per_s for each in figures] for figures in (tier, bare))
    return judge_speed(f"{size(chunk)} a chunk", "values", ours, most, "server")
