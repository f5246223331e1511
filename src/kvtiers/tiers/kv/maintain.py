"""A maintenance pass over keys of servers, beside engines: what was not used for longest leaves."""

import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.tiers.kv.exchange import Servers, exchange, question
from kvtiers.tiers.kv.looking import Seen, every, seen
from kvtiers.tiers.kv.names import Names, part_of
from kvtiers.tiers.options import bad_option
from kvtiers.tiers.places import Aim, Part, Report, how_many_leave, unheard

_AT_ONCE = 512


class Leaver(NamedTuple):
    """A chunk that may leave. Ordered by when it was used last."""

    used_at: float
    name: bytes
    bytes: int
    namespace: str


def maintain(
    servers: Servers,
    prefix: str,
    ours: Set[str],
    aim: Aim,
    *,
    dry_run: bool = False,
    wall_clock: Callable[[], float] = time.time,
    advance: Callable[[int], None] = unheard,
) -> Report:
    """Remove chunks of the namespaces ``ours``, as ``aim`` says; ``advance`` hears of their bytes.

    Raises ConfigError for a wrong aim, and if the servers do not say when a chunk was used;
    KVTiersError if they cannot be asked.
    """
    aim.refuse_nonsense()
    if aim.namespace is not None and aim.namespace not in ours:
        raise bad_option(
            "namespace", f"is {aim.namespace!a}, of which nothing is stored under {prefix}"
        )
    report, leavers, now = Report(), [], wall_clock()
    for namespace, part, each in _ours(servers, prefix, aim.namespace):
        report.before_bytes += each.bytes
        if part is Part.CHUNKS and namespace in ours:
            if each.idle_s is None and (aim.max_bytes, aim.older_than_s) != (None, None):
                raise _no_times(prefix)
            leavers.append(Leaver(now - (each.idle_s or 0.0), each.name, each.bytes, namespace))
    leavers.sort()
    sizes = [(leaver.used_at, leaver.bytes) for leaver in leavers]
    chosen = leavers[: how_many_leave(sizes, report.before_bytes, aim, now)]
    for at in range(0, len(chosen), _AT_ONCE):
        _remove(servers, chosen[at : at + _AT_ONCE], report, dry_run, advance)
    return report


def _ours(servers: Servers, prefix: str, namespace: str | None) -> Iterator[tuple[str, Part, Seen]]:
    """Keys that count, with whose they are and what for."""
    pattern = f"{prefix}:*".encode() if namespace is None else Names(prefix, namespace).pattern
    for each in seen(servers, every(servers, pattern)):
        if each is not None:
            whose, part = part_of(prefix, each.name)
            if part in (Part.CHUNKS, Part.OTHER):
                yield whose, part, each


def _no_times(prefix: str) -> ConfigError:
    return ConfigError(
        f"the server does not say when chunks under {prefix} were used, so none can be chosen: its "
        "maxmemory-policy counts how often (lfu), or the user may not say OBJECT IDLETIME; let the "
        "server evict, or give the tier a ttl_s"
    )


def _remove(
    servers: Servers,
    chosen: Sequence[Leaver],
    report: Report,
    dry_run: bool,
    advance: Callable[[int], None],
) -> None:
    calls = [question(leaver.name, b"UNLINK", leaver.name) for leaver in chosen]
    if not dry_run:
        exchange(servers, calls, "delete")
    for leaver, call in zip(chosen, calls, strict=True):
        name = leaver.name.decode()
        if isinstance(call.reply, KVTiersError):
            report.failed.append(f"{name} ({call.reply})")
            continue
        report.chunks.append((name, leaver.bytes))
        report.by_namespace[leaver.namespace] += 1
        advance(leaver.bytes)
