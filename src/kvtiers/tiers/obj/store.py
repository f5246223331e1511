"""Chunks in a bucket: one object each, and small ones together in packs.

See ``names`` for what objects are called, ``packs`` for the format of a pack. Equal names have
equal bytes, so that engines that share a bucket need no coordination, and writing again is safe.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError, closed
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext, Usage
from kvtiers.tiers.complaints import Complaints
from kvtiers.tiers.obj import manifests, names
from kvtiers.tiers.obj.bounded import LEAST_CHUNKS, Bounded, refuse_too_small
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.obj.index import PackIndex
from kvtiers.tiers.obj.packs import MAX_PACK_BYTES, front_pages
from kvtiers.tiers.obj.reading import Reading, Result
from kvtiers.tiers.obj.room import Room
from kvtiers.tiers.obj.shelf import Shelf
from kvtiers.tiers.obj.together import Together, one_by_one
from kvtiers.tiers.portions import portions

LIST_EVERY_S = 300.0
"""How often all packs are listed, and the manifest is looked after."""


class ObjStore:
    """Chunks of one namespace below the prefix of ``client``.

    Raises ConfigError if the bucket cannot be used. ``max_requests`` bounds the requests under
    way besides one for each caller; ``max_packed`` the packed chunks that are known at a time;
    ``capacity_bytes`` what lies below the prefix, unless it is None.
    """

    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(
        self,
        context: StoreContext,
        client: Client,
        *,
        max_requests: int = 32,
        max_packed: int = 2_000_000,
        capacity_bytes: int | None = None,
        pack_below_bytes: int = names.PACK_BELOW_BYTES,
    ) -> None:
        self._context = context
        self._client = client
        if capacity_bytes is not None:
            refuse_too_small(context.layout, capacity_bytes)
        self._id = context.namespace.id
        self._pack_below = pack_below_bytes
        self._closed = False
        self._complaints = Complaints(client.where, context.clock)
        manifests.open_manifest(client, context.namespace)
        self._together = Together(max_requests, f"kvtiers-{context.label}-request")
        self._shelf = Shelf(client, self._id, PackIndex(max_packed), context.wall_clock)
        self._reading = Reading(
            client, self._id, self._shelf, self._together, self._vanished, pack_below_bytes
        )
        self._bounded = self._bound(capacity_bytes)
        # Small against the bound, or it would never fit.
        self._max_pack = min(MAX_PACK_BYTES, (capacity_bytes or sys.maxsize) // LEAST_CHUNKS)
        self._lock = threading.Lock()
        """Guards the time of the last look, and whether one is under way."""
        self._looked_after_at = context.clock()
        self._looking = False
        if self._bounded is not None:
            self._bounded.make_room()

    def _bound(self, capacity_bytes: int | None) -> Bounded | None:
        if capacity_bytes is None:
            return None
        return Bounded(
            self._client,
            Room(capacity_bytes),
            self._complaints,
            (self._context.clock, self._context.wall_clock),
            self._together.begin,
            self._evicted,
        )

    # -- the contract ---------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each chunk is there. Raises KVTiersError if the service cannot be asked.

        One listing finds what others packed, or said to be gone; other chunks are asked for one
        by one, at the same time.
        """
        self._refuse_if_closed("contains")
        self._look_after_it()
        if not all(map(self._has_an_object, keys)):
            self._shelf.refresh(self._together.run)
        places = self._shelf.find(keys)
        unknown = [key for key, place in zip(keys, places, strict=True) if place is None]
        single = [key for key in unknown if self._has_an_object(key)]
        there = dict(zip(single, self._look_up(single), strict=True))
        return [p is not None or there.get(k, False) for k, p in zip(keys, places, strict=True)]

    def _look_up(self, keys: Sequence[Key]) -> list[bool]:
        sizes = self._together.run([partial(self._client.size, self._name(key)) for key in keys])
        for size in sizes:
            if isinstance(size, KVTiersError):
                raise size
        return [size is not None for size in sizes]

    def write(self, items: Sequence[Item]) -> list[Result]:
        """Store each item: large ones as they are, small ones together.

        A large one that is there is replaced by the same bytes: to ask first would cost a request
        for each, to save few of them. A small one that is known to be there is left out.
        """
        self._refuse_if_closed("write")
        self._look_after_it()
        distinct = list({item.key: item for item in items}.values())
        large = [item for item in distinct if item.view.nbytes >= self._pack_below]
        small = [item for item in distinct if item.view.nbytes < self._pack_below]
        places = self._shelf.find(item.key for item in small)
        new = [item for item, place in zip(small, places, strict=True) if place is None]
        groups = [*_packfuls(new, self._max_pack), *([item] for item in large)]
        results: dict[Key, Result] = {}
        outcomes = self._together.run([partial(self._write, group) for group in groups])
        for group, outcome in zip(groups, outcomes, strict=True):
            results.update(dict.fromkeys((item.key for item in group), outcome))
        self._note("write", outcomes)
        return [results.get(item.key) for item in items]

    def _write(self, group: Sequence[Item]) -> KVTiersError | None:
        packed = group[0].view.nbytes < self._pack_below
        if self._bounded is not None:
            size = sum(PAGE_BYTES + item.view.nbytes for item in group)
            if packed:
                size += PAGE_BYTES * front_pages([item.key for item in group])
            full = self._bounded.take(size)
            if full is not None:
                return full
        if packed:
            self._shelf.write(group)
        else:
            (item,) = group
            page = record.pack(item.key, self._id, item.view)
            self._client.put(self._name(item.key), [page, item.view])
        return None

    def read(self, items: Sequence[Item]) -> list[Result]:
        """Read and verify each item. What is damaged, read twice, is taken away."""
        self._refuse_if_closed("read")
        results = self._reading.read(items)
        self._note("read", results)
        failed = [(item.key, e.kind) for item, e in zip(items, results, strict=True) if e]
        vanished = [key for key, kind in failed if kind is Kind.VANISHED]
        if vanished:
            self._context.on_removed(vanished, Reason.VANISHED)
        damaged = list(dict.fromkeys(key for key, kind in failed if kind is Kind.CORRUPT))
        if damaged:
            self._take_away(damaged)
            self._context.on_removed(damaged, Reason.CORRUPT)
        return results

    def _take_away(self, damaged: Sequence[Key]) -> None:
        """If that fails it is found damaged again, until it is written again."""
        try:
            self._remove(damaged)
        except KVTiersError as e:
            self._complaints.failed("delete", e)

    def delete(self, keys: Sequence[Key]) -> None:
        """Delete these chunks' objects; of those in packs, say there that they are gone."""
        self._refuse_if_closed("delete")
        if not all(map(self._has_an_object, keys)):
            self._shelf.refresh(self._together.run)
        self._remove(keys)

    def _remove(self, keys: Sequence[Key]) -> None:
        places = self._shelf.find(keys)
        packed = [key for key, place in zip(keys, places, strict=True) if place is not None]
        if packed:
            self._shelf.bury(list(dict.fromkeys(packed)))
        self._client.delete([self._name(key) for key in keys if self._has_an_object(key)])

    def scan(self) -> Iterator[Entry]:
        """Every chunk of the namespace; of packed ones also where they lie is learnt."""
        self._refuse_if_closed("scan")
        return self._scan()

    def _scan(self) -> Iterator[Entry]:
        yield from self._shelf.scan(self._together.run, self._vanished)
        for page in self._client.objects(self._id):
            for stored in page:
                key = names.key_of(self._id, stored.name)
                if key is not None:
                    size = max(0, stored.bytes - PAGE_BYTES)
                    yield Entry(key, size, stored.modified_at)

    def touch(self, keys: Sequence[Key]) -> None:
        """Nothing: a bucket keeps no time of use, and what leaves leaves by age."""
        self._refuse_if_closed("touch")

    def close(self) -> None:
        """Begin no request any more, and wait for those under way."""
        self._closed = True
        self._client.close()
        self._together.close()

    # -- inside ---------------------------------------------------------------------------------

    def _look_after_it(self) -> None:
        """Now and then, in the background: what left, what was listed late, the manifest."""
        now = self._context.clock()
        with self._lock:
            if self._looking or now - self._looked_after_at < LIST_EVERY_S:
                return
            self._looked_after_at, self._looking = now, True
        self._together.begin(self._look_after)
        if self._bounded is not None:
            self._bounded.make_room()

    def _look_after(self) -> None:
        try:
            for _ in self._shelf.scan(one_by_one, self._vanished):
                if self._closed:
                    return
            manifests.keep_manifest(self._client, self._context.namespace)
        except KVTiersError as e:
            self._complaints.failed("list", e)
        else:
            self._complaints.worked("list")
        finally:
            self._looking = False

    def _vanished(self, keys: Sequence[Key]) -> None:
        self._context.on_removed(keys, Reason.VANISHED)

    def _evicted(self, gone: Sequence[str]) -> None:
        """Objects of these names, of this or another namespace, left for others."""
        packs = [names.pack_at(self._id, name) for name in gone]
        keys = [names.key_of(self._id, name) for name in gone]
        left = [key for key in keys if key is not None]
        for pack in packs:
            if pack is not None:
                left += self._shelf.lost(pack)
        if left:
            self._context.on_removed(left, Reason.EVICTED)

    def _note(self, operation: str, outcomes: Sequence[Result]) -> None:
        for error in outcomes:
            if error is not None and not error.said:
                self._complaints.failed(operation, error)
        if None in outcomes:
            self._complaints.worked(operation)

    def _has_an_object(self, key: Key) -> bool:
        return self._context.layout.chunk_bytes(key) >= self._pack_below

    def _name(self, key: Key) -> str:
        return names.chunk_name(self._id, key)

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise closed(self._context.name, operation)

    def usage(self) -> Usage | None:
        """Of all that lies below the prefix; None where it has no bound, or is not counted yet."""
        return None if self._bounded is None else self._bounded.usage()

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant of a part, if any."""
        self._shelf.check()
        self._together.check()
        if self._bounded is not None:
            self._bounded.check()
        self._complaints.check()

    def __repr__(self) -> str:
        return f"<ObjStore {self._client.where}/{self._id}: {self._shelf!r}>"


def _packfuls(items: Sequence[Item], most: int) -> Iterator[list[Item]]:
    """Runs of items whose records have ``most`` bytes, or single ones."""
    return portions(items, lambda item: PAGE_BYTES + item.view.nbytes, most)
