"""What ``gc`` deletes: least recently used first. A seam: it may become a function of the tier."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtiers.chunks import Key, Namespace
from kvtiers.cli.common import layout_of
from kvtiers.errors import KVTiersError
from kvtiers.tiers.base import ChunkStore, Entry
from kvtiers.tiers.places import Complain, Part, Place

_AT_ONCE = 64


@dataclass(slots=True)
class Collected:
    """What left, or would leave."""

    before_bytes: int
    """On disk, of the namespaces in question."""
    chunks: int = 0
    bytes: int = 0
    """Of files, headers included."""
    failed: int = 0
    """Chunks that could not be deleted."""
    by_namespace: dict[str, int] = field(default_factory=dict)
    """Chunks."""


@dataclass(frozen=True, slots=True)
class _Victim:
    namespace: Namespace
    entry: Entry
    on_disk: int


def collect(
    place: Place,
    namespaces: Sequence[Namespace],
    *,
    max_bytes: int | None,
    older_than: float | None,
    dry_run: bool,
    advance: Callable[[int], None],
    complain: Complain,
) -> Collected:
    """Delete chunks last used before ``older_than`` (wall-clock seconds), then the least recently
    used until at most ``max_bytes`` are on disk, both for ``namespaces`` only.
    """
    before, chunks = _on_disk(place, namespaces)
    collected = Collected(before)
    victims = choose(chunks, before, max_bytes, older_than)
    for namespace in namespaces:
        ours = [v for v in victims if v.namespace is namespace]
        if ours and dry_run:
            _count(collected, namespace, ours)
        elif ours:
            for gone, failed in _delete(place, namespace, ours, complain):
                _count(collected, namespace, gone)
                collected.failed += failed
                advance(sum(v.on_disk for v in gone))
    return collected


def choose(
    chunks: Iterable[_Victim], used: int, max_bytes: int | None, older_than: float | None
) -> list[_Victim]:
    """Those that leave, least recently used first."""
    victims = []
    for victim in sorted(chunks, key=lambda v: v.entry.used_at):
        is_old = older_than is not None and victim.entry.used_at < older_than
        if not (is_old or (max_bytes is not None and used > max_bytes)):
            break  # all others were used later
        victims.append(victim)
        used -= victim.on_disk
    return victims


def _on_disk(place: Place, namespaces: Sequence[Namespace]) -> tuple[int, list[_Victim]]:
    """Bytes of the namespaces, and their chunks with what each gives back."""
    usage = place.usage()
    total, chunks = 0, []
    for namespace in namespaces:
        parts = {u.part: u for u in usage if u.namespace == namespace.id}
        total += sum(u.bytes for u in parts.values())
        entries = list(place.entries(namespace.id))
        payloads, stored = sum(e.bytes for e in entries), parts.get(Part.CHUNKS)
        header = (stored.bytes - payloads) // len(entries) if stored and entries else 0
        chunks += [_Victim(namespace, e, e.bytes + max(0, header)) for e in entries]
    return total, chunks


def _delete(
    place: Place, namespace: Namespace, victims: Sequence[_Victim], complain: Complain
) -> Iterator[tuple[list[_Victim], int]]:
    """Step by step those that left, and how many would not."""
    store = place.open_store(namespace, layout_of([v.entry for v in victims]))
    try:
        for at in range(0, len(victims), _AT_ONCE):
            unused = _not_used_since(place, namespace, victims[at : at + _AT_ONCE])
            kept = _delete_from(store, [v.entry.key for v in unused], complain)
            yield [v for v in unused if v.entry.key not in kept], len(kept)
    finally:
        store.close()


def _delete_from(store: ChunkStore, keys: Sequence[Key], complain: Complain) -> set[Key]:
    """Those that stay: one that cannot be deleted is no reason to keep the others."""
    try:
        store.delete(keys)
    except KVTiersError as e:
        if len(keys) == 1:
            complain(f"{e}")
            return set(keys)
        return {k for key in keys for k in _delete_from(store, [key], complain)}
    return set()


def _not_used_since(
    place: Place, namespace: Namespace, victims: Sequence[_Victim]
) -> list[_Victim]:
    """Those that no engine has used, or taken away, since they were chosen."""
    now = place.find(namespace.id, [v.entry.key for v in victims])
    return [
        v
        for v, entry in zip(victims, now, strict=True)
        if entry is not None and entry.used_at <= v.entry.used_at
    ]


def _count(collected: Collected, namespace: Namespace, gone: Sequence[_Victim]) -> None:
    by = collected.by_namespace
    by[namespace.id] = by.get(namespace.id, 0) + len(gone)
    collected.chunks += len(gone)
    collected.bytes += sum(v.on_disk for v in gone)
