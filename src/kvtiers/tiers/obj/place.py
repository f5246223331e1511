"""A bucket as tools see it: listed and read beside engines, and nothing is changed."""

import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, Key, Namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers import record
from kvtiers.tiers.base import ChunkStore, Entry, StoreContext
from kvtiers.tiers.obj import manifests, names
from kvtiers.tiers.obj.client import Client, open_client
from kvtiers.tiers.obj.fronts import read_front
from kvtiers.tiers.obj.index import PackIndex
from kvtiers.tiers.obj.maintain import maintain
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.shelf import Shelf
from kvtiers.tiers.obj.store import ObjStore
from kvtiers.tiers.obj.together import Together
from kvtiers.tiers.obj.written import options_of, site_of, url_of
from kvtiers.tiers.places import (
    MAX_CHUNK_BYTES,
    Aim,
    Fault,
    Found,
    Part,
    Payload,
    Report,
    Usage,
    unheard,
)
from kvtiers.tiers.portions import portions

_WINDOW_BYTES = 32 << 20
"""What is read at once, ahead of who takes it."""
_WINDOW_CHUNKS = 64
_MAX_PACKED = 1 << 40
_REQUESTS = 16


class ObjPlace:
    """What lies below a prefix of a bucket. See :class:`~kvtiers.tiers.places.Place`."""

    layout = "objects"

    def __init__(self, options: ObjOptions, client: Client) -> None:
        self.url = url_of(options)
        self.options: Mapping[str, Any] = options_of(options)
        self.site = site_of(options)
        self._options = options
        self._client = client
        self._together = Together(_REQUESTS, "kvtiers-tool")
        self._shelves: dict[str, Shelf] = {}
        self._known: dict[str, dict[Key, Entry]] = {}
        """By namespace, as far as it was listed."""
        self._whole: set[str] = set()
        """Namespaces that were listed to the end."""

    def namespaces(self) -> list[Found]:
        """Every folder named like a namespace."""
        return manifests.namespaces(self._client, self._client.folders())

    def entries(self, namespace_id: str) -> Iterator[Entry]:
        """What is in packs, then every object that is named as a chunk. Used: when written."""
        known = self._known[namespace_id] = {}
        self._whole.discard(namespace_id)
        for entry in self._list(namespace_id):
            known[entry.key] = entry
            yield entry
        self._whole.add(namespace_id)

    def _list(self, namespace_id: str) -> Iterator[Entry]:
        shelf = Shelf(self._client, namespace_id, PackIndex(_MAX_PACKED), time.time)
        self._shelves[namespace_id] = shelf
        yield from shelf.scan(self._all, lambda keys: None)
        for page in self._client.objects(namespace_id):
            for stored in page:
                key = names.key_of(namespace_id, stored.name)
                if key is not None:
                    yield Entry(key, max(0, stored.bytes - PAGE_BYTES), stored.modified_at)

    def _all(self, acts: Sequence[Callable[[], None]]) -> None:
        """Raises what one of them raised: what a tool passed over would look as if it were not."""
        for error in self._together.run(acts):
            if error is not None:
                raise error

    def find(self, namespace_id: str, keys: Sequence[Key]) -> list[Entry | None]:
        """From memory, once the namespace was listed."""
        known = self._listed(namespace_id, keys)
        return [known.get(key) for key in keys]

    def _listed(self, namespace_id: str, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        """What is known, to the end unless all of ``keys`` are met before."""
        known = self._known.get(namespace_id, {})
        if namespace_id not in self._whole and not all(key in known for key in keys):
            for _ in self.entries(namespace_id):
                pass
        return self._known.get(namespace_id, {})

    # -- reading --------------------------------------------------------------------------------

    def read(self, namespace_id: str, keys: Sequence[Key]) -> Iterator[tuple[Key, Payload]]:
        """Some at the same time, as many as fit into 32 MiB."""
        known = self._listed(namespace_id, keys)

        def size_of(key: Key) -> int:
            return known[key].bytes if key in known else 0

        for some in portions(keys, size_of, _WINDOW_BYTES, _WINDOW_CHUNKS):
            acts = [partial(self._payload, namespace_id, key, known.get(key)) for key in some]
            yield from zip(some, self._together.run(acts), strict=True)

    def _payload(self, namespace_id: str, key: Key, entry: Entry | None) -> memoryview:
        """The verified chunk. Raises KVTiersError. ``entry``: what is known of its length."""
        where = f"{self._client.where}/{names.chunk_name(namespace_id, key)}"
        if entry is not None and entry.bytes > MAX_CHUNK_BYTES:
            raise _damaged(where, "it is larger than any chunk")
        data = self._record(namespace_id, key)
        if data.nbytes <= PAGE_BYTES:
            raise _damaged(where, f"it is short: {data.nbytes} bytes")
        if data.nbytes > PAGE_BYTES + MAX_CHUNK_BYTES:
            raise _damaged(where, "it is larger than any chunk")
        view = memoryview(mmap.mmap(-1, data.nbytes - PAGE_BYTES))
        view[:] = data[PAGE_BYTES:]
        error = record.verify(data[:PAGE_BYTES], key, namespace_id, view)
        if error is not None:
            raise _damaged(where, str(error))
        return view

    def _record(self, namespace_id: str, key: Key) -> memoryview:
        (place,) = self._shelves[namespace_id].find([key])
        if place is not None:
            return self._shelves[namespace_id].read(place.pack, [place])[0]
        name = names.chunk_name(namespace_id, key)
        return self._client.get(name, PAGE_BYTES + MAX_CHUNK_BYTES + 1)

    def repair(self, namespace: Namespace, damaged: Sequence[Entry]) -> list[str]:
        """Read again; an object that is damaged still is deleted, a packed chunk buried."""
        self._listed(namespace.id, [entry.key for entry in damaged])
        return [self._repair(namespace.id, entry.key) for entry in damaged]

    def _repair(self, namespace_id: str, key: Key) -> str:
        shelf = self._shelves[namespace_id]
        try:
            self._payload(namespace_id, key, self._now(namespace_id, key))
            return "intact by now"
        except KVTiersError as e:
            if e.kind is Kind.VANISHED:
                return "gone by now"
            if e.kind is not Kind.CORRUPT:
                return f"cannot be removed: {e}"
        try:
            if shelf.find([key]) == [None]:
                self._client.delete([names.chunk_name(namespace_id, key)])
            else:
                shelf.bury([key])
            return "removed"
        except KVTiersError as e:
            return f"cannot be removed: {e}"

    def _now(self, namespace_id: str, key: Key) -> Entry | None:
        """As it is now. Raises KVTiersError."""
        (place,) = self._shelves[namespace_id].find([key])
        if place is not None:
            return Entry(key, place.length - PAGE_BYTES, 0.0)
        size = self._client.size(names.chunk_name(namespace_id, key))
        return None if size is None else Entry(key, size - PAGE_BYTES, 0.0)

    # -- what else lies there -------------------------------------------------------------------

    def usage(self, advance: Callable[[int], None] = unheard) -> list[Usage]:
        """Every object below the prefix, by what its name says."""
        count: Counter[tuple[str, Part]] = Counter()
        sizes: Counter[tuple[str, Part]] = Counter()
        for page in self._client.objects():
            for stored in page:
                where = names.part_of(stored.name)
                count[where] += 1
                sizes[where] += stored.bytes
            advance(len(page))
        parts = list(Part)
        ordered = sorted(count, key=lambda where: (where[0], parts.index(where[1])))
        return [Usage(*where, count[where], sizes[where]) for where in ordered]

    def segments(self) -> list[int]:
        """None."""
        return []

    def capacity(self) -> int | None:
        """What the URL states: nothing in a bucket says what engines keep to."""
        return self._options.capacity_bytes

    def bound(self) -> int | None:
        """None: a store of a tool leaves it to engines and to ``gc``."""
        return None

    def free(self) -> tuple[int, int] | None:
        """Nobody knows."""
        return None

    def owner(self) -> int | None:
        """Nobody: engines share it."""
        return None

    def faults(self, namespace_id: str) -> Iterator[Fault]:
        """Packs that do not say what is in them. Nothing is ever served from those."""
        for fault, _ in self._bad_packs(namespace_id):
            yield fault

    def _bad_packs(self, namespace_id: str) -> Iterator[tuple[Fault, str]]:
        if not namespace_id:
            return
        for page in self._client.objects(names.packs_below(namespace_id)):
            for stored in page:
                pack = names.pack_at(namespace_id, stored.name)
                if pack is None:
                    continue
                said = read_front(self._client, namespace_id, pack)
                if isinstance(said, KVTiersError):
                    problem = f"{self._client.where}/{stored.name}: {said}"
                    yield Fault(namespace_id, problem, "removed"), stored.name

    def mend(self, faults: Sequence[Fault]) -> list[Fault]:
        """Packs that can serve nothing are deleted."""
        found = [bad for name in {f.namespace for f in faults} for bad in self._bad_packs(name)]
        objects = {fault.problem: name for fault, name in found}
        return [replace(fault, outcome=self._mend(objects.get(fault.problem))) for fault in faults]

    def _mend(self, name: str | None) -> str:
        if name is None:
            return "gone by now"
        try:
            self._client.delete([name])
            return "removed"
        except KVTiersError as e:
            return f"cannot be removed: {e}"

    # -- changes --------------------------------------------------------------------------------

    def maintain(
        self,
        aim: Aim,
        *,
        dry_run: bool = False,
        advance: Callable[[int], None] = unheard,
    ) -> Report:
        """Objects and packs, those written first before the others. What engines miss then is
        computed by them.
        """
        return maintain(self._client, aim, self._together.run, dry_run=dry_run, advance=advance)

    def open_store(self, namespace: Namespace, layout: ChunkLayout) -> ChunkStore:
        """Engines share it, so it never refuses because of one."""
        context = StoreContext(
            "obj",
            "tool:obj",
            namespace,
            layout,
            time.monotonic,
            time.time,
            lambda keys, reason: None,
        )
        return ObjStore(context, open_client(self._options), max_requests=_REQUESTS)

    def backdate(self, namespace_id: str, copies: Sequence[Entry]) -> None:
        """A service keeps the time at which it was written to, and no other."""

    def __repr__(self) -> str:
        return f"<ObjPlace {self._client.where}>"


def _damaged(where: str, problem: str) -> KVTiersError:
    return KVTiersError(
        f"{where}: {problem}", kind=Kind.CORRUPT, operation="read", context={"object": where}
    )
