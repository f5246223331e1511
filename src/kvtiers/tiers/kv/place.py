"""Servers as tools see them: read beside engines, and nothing is changed or made young."""

import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtiers.chunks import ChunkLayout, Key, Namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers import record
from kvtiers.tiers.base import ChunkStore, Entry, StoreContext
from kvtiers.tiers.kv import memory
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.commands import asking
from kvtiers.tiers.kv.exchange import PLACED, Call, exchange, question
from kvtiers.tiers.kv.looking import Quietly, Seen, every, seen
from kvtiers.tiers.kv.maintain import maintain
from kvtiers.tiers.kv.names import Names, part_of
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.kv.servers import servers_of
from kvtiers.tiers.kv.store import KvStore
from kvtiers.tiers.kv.urls import options_of, url_of
from kvtiers.tiers.places import (
    Aim,
    Complain,
    Fault,
    Found,
    Part,
    Payload,
    Report,
    Usage,
    parse_manifest,
    unheard,
)
from kvtiers.tiers.portions import portions

_PATIENCE_S = 30.0
"""For one reply to a tool, which no request of a model waits for."""
_WINDOW_BYTES = 32 << 20
"""What is read at once, ahead of who takes it."""
_WINDOW_CHUNKS = 64


class KvPlace:
    """What servers hold under a prefix. See :class:`~kvtiers.tiers.places.Place`."""

    layout = "values"

    def __init__(self, options: KvOptions, complain: Complain) -> None:
        """Connects to nobody yet. Raises ConfigError if a secret is not where it should be."""
        address = parse_address(options.url)
        self.url = url_of(options)
        self.options: Mapping[str, Any] = options_of(options)
        self.site: tuple[str, ...] = ("kv", str(address), options.prefix)
        self._options = options
        self._complain = complain
        self._told: set[str] = set()
        patient = replace(options, timeout_s=_PATIENCE_S)
        self._servers = servers_of(address, patient, time.monotonic, Quietly(self._is_heard))

    def _is_heard(self) -> None:
        self._say(
            f"{self.url}: looking counts as use there, for the server is older than 7.2 or the "
            "user may not say CLIENT NO-TOUCH: what is looked at leaves later"
        )

    def _say(self, sentence: str) -> None:
        """Once, however often there is reason to."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._complain(sentence)

    # -- what is there --------------------------------------------------------------------------

    def _every(self) -> Iterator[bytes]:
        return every(self._servers, f"{self._options.prefix}:*".encode())

    def has_any(self) -> bool:
        """Whether anything of any namespace is there. Raises KVTiersError."""
        return any(part_of(self._options.prefix, name)[0] for name in self._every())

    def namespaces(self) -> list[Found]:
        """Of every key with the prefix: a server may have evicted a manifest, and kept chunks."""
        ids = {part_of(self._options.prefix, name)[0] for name in self._every()} - {""}
        calls = {each: self._get_manifest(each) for each in sorted(ids)}
        exchange(self._servers, list(calls.values()), "read")
        return [_found(each, call.reply) for each, call in calls.items()]

    def _get_manifest(self, namespace_id: str) -> Call:
        name = Names(self._options.prefix, namespace_id).manifest
        return question(name, b"GET", name)

    def entries(self, namespace_id: str) -> Iterator[Entry]:
        """Every key that is named as a chunk."""
        names = Names(self._options.prefix, namespace_id)
        chunks = (name for name in every(self._servers, names.pattern) if names.key(name))
        for each in seen(self._servers, chunks):
            if each is not None:
                yield self._entry(names, each)

    def find(self, namespace_id: str, keys: Sequence[Key]) -> list[Entry | None]:
        """By asking for these."""
        names = Names(self._options.prefix, namespace_id)
        found = seen(self._servers, map(names.of, keys))
        return [None if each is None else self._entry(names, each) for each in found]

    def _entry(self, names: Names, chunk: Seen) -> Entry:
        key = names.key(chunk.name)
        assert key is not None
        if chunk.idle_s is None:
            self._say(f"{self.url}: when chunks were used is not known there; said as of 1970")
        used_at = 0.0 if chunk.idle_s is None else time.time() - chunk.idle_s
        return Entry(key, max(0, chunk.bytes - record.shortened_bytes(key)), used_at)

    # -- reading --------------------------------------------------------------------------------

    def read(self, namespace_id: str, keys: Sequence[Key]) -> Iterator[tuple[Key, Payload]]:
        """Some by one round trip, as many as fit into 32 MiB."""
        for at in range(0, len(keys), _WINDOW_CHUNKS):
            some = keys[at : at + _WINDOW_CHUNKS]
            pairs = list(zip(some, self.find(namespace_id, some), strict=True))
            for window in portions(pairs, _bytes_of, _WINDOW_BYTES):
                yield from self._read(namespace_id, window)

    def _read(
        self, namespace_id: str, pairs: Sequence[tuple[Key, Entry | None]]
    ) -> Iterator[tuple[Key, Payload]]:
        names = Names(self._options.prefix, namespace_id)
        headers = [bytearray(record.shortened_bytes(key)) for key, _ in pairs]
        views = [memoryview(mmap.mmap(-1, max(1, e.bytes if e else 0))) for _, e in pairs]
        calls = []
        for (key, _), header, view in zip(pairs, headers, views, strict=True):
            name = names.of(key)
            targets = [memoryview(header), view]
            calls.append(Call(name, asking(b"GET", name), PLACED, targets=targets))
        exchange(self._servers, calls, "read")
        for (key, _), header, view, call in zip(pairs, headers, views, calls, strict=True):
            problem = self._problem(call, header, view, key, namespace_id)
            yield key, problem or view

    def _problem(
        self, call: Call, header: bytearray, view: memoryview, key: Key, namespace_id: str
    ) -> KVTiersError | None:
        where = f"{parse_address(self._options.url)}: {call.name.decode()}"
        reply = call.reply
        if reply is None:
            return _failure(f"{where} is gone", Kind.VANISHED)
        if isinstance(reply, KVTiersError):
            return _failure(f"{where}: {reply}", reply.kind)
        if reply != len(header) + view.nbytes:
            what = f"{where}: it has {reply} bytes, as no chunk has, or changes"
            return _failure(what, Kind.CORRUPT)
        error = record.verify(record.lengthen(bytes(header)), key, namespace_id, view)
        return error and _failure(f"{where}: {error}", error.kind)

    def repair(self, namespace: Namespace, damaged: Sequence[Entry]) -> list[str]:
        """Read again; what is damaged still is unlinked."""
        outcomes = []
        for key, payload in self.read(namespace.id, [entry.key for entry in damaged]):
            if not isinstance(payload, KVTiersError):
                outcomes.append("intact by now")
            elif payload.kind is Kind.VANISHED:
                outcomes.append("gone by now")
            elif payload.kind is Kind.CORRUPT:
                outcomes.append(self._remove(Names(self._options.prefix, namespace.id).of(key)))
            else:
                outcomes.append(f"cannot be removed: {payload}")
        return outcomes

    def _remove(self, name: bytes) -> str:
        call = question(name, b"UNLINK", name)
        exchange(self._servers, [call], "delete")
        return (
            f"cannot be removed: {call.reply}" if isinstance(call.reply, Exception) else "removed"
        )

    # -- what else lies there -------------------------------------------------------------------

    def usage(self, advance: Callable[[int], None] = unheard) -> list[Usage]:
        """Bytes of values; what a server needs besides, and keys of others, it counts itself."""
        count: Counter[tuple[str, Part]] = Counter()
        sizes: Counter[tuple[str, Part]] = Counter()
        for each in seen(self._servers, self._every()):
            if each is not None:
                where = part_of(self._options.prefix, each.name)
                count[where] += 1
                sizes[where] += each.bytes
                advance(1)
        parts = list(Part)
        ordered = sorted(count, key=lambda where: (where[0], parts.index(where[1])))
        return [Usage(*where, count[where], sizes[where]) for where in ordered]

    def segments(self) -> list[int]:
        """None."""
        return []

    def capacity(self) -> int | None:
        """What the URL states, or the servers have as their maxmemory together."""
        if self._options.capacity_bytes is not None:
            return self._options.capacity_bytes
        said = memory.ask(self._servers, "INFO")
        limits = [server.limit_bytes for server in said]
        return sum(limits) if all(limits) else None

    def bound(self) -> int | None:
        """Their maxmemory, where they evict: chunks, or keys of others."""
        said = memory.ask(self._servers, "INFO")
        limits = [server.limit_bytes for server in said]
        expiring = self._options.ttl_s is not None
        forgetful = all(limits) and all(server.evicts(expiring) for server in said)
        return sum(limits) if forgetful else None

    def free(self) -> tuple[int, int] | None:
        """Of memory, which is no disk."""
        return None

    def owner(self) -> int | None:
        """Nobody: engines share it."""
        return None

    def faults(self, namespace_id: str) -> Iterator[Fault]:
        """None: all that is there is chunks and manifests."""
        return iter(())

    def mend(self, faults: Sequence[Fault]) -> list[Fault]:
        """There are none."""
        return list(faults)

    # -- changes --------------------------------------------------------------------------------

    def maintain(
        self,
        aim: Aim,
        *,
        dry_run: bool = False,
        advance: Callable[[int], None] = unheard,
    ) -> Report:
        """What was not used for longest leaves first. What engines miss then they compute."""
        ours = {found.id for found in self.namespaces() if found.namespace is not None}
        prefix = self._options.prefix
        return maintain(self._servers, prefix, ours, aim, dry_run=dry_run, advance=advance)

    def open_store(self, namespace: Namespace, layout: ChunkLayout) -> ChunkStore:
        """Engines share the servers, so it never refuses because of one."""
        context = StoreContext(
            "kv", "tool:kv", namespace, layout, time.monotonic, time.time, lambda keys, why: None
        )
        store = KvStore(context, replace(self._options, timeout_s=_PATIENCE_S))
        if self._options.capacity_bytes is not None:
            store.usage()  # what is there counts from the first chunk on
        return store

    def backdate(self, namespace_id: str, copies: Sequence[Entry]) -> None:
        """A server keeps the time of use by itself."""

    def __repr__(self) -> str:
        return f"<KvPlace {self.url}>"


def _found(namespace_id: str, manifest: object) -> Found:
    if isinstance(manifest, KVTiersError):
        return Found(namespace_id, None, f"its manifest cannot be read: {manifest}")
    if not isinstance(manifest, bytes):
        return Found(namespace_id, None, "it has no manifest: the server may have evicted it")
    namespace = parse_manifest(manifest)
    if namespace is None or namespace.id != namespace_id:
        return Found(namespace_id, None, "its manifest is damaged or of another namespace")
    return Found(namespace_id, namespace)


def _bytes_of(pair: tuple[Key, Entry | None]) -> int:
    _, entry = pair
    return entry.bytes if entry else 0


def _failure(what: str, kind: Kind) -> KVTiersError:
    return KVTiersError(what, kind=kind, operation="read")
