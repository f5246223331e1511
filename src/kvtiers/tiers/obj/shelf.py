"""The packs of one namespace in a bucket: found by listing, read, written, and given up."""

import copy
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import KVTiersError
from kvtiers.tiers import record
from kvtiers.tiers.base import Entry, Item
from kvtiers.tiers.obj import names, packs
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.obj.fronts import read_front
from kvtiers.tiers.obj.index import PackIndex, Place
from kvtiers.tiers.obj.names import PackName
from kvtiers.tiers.obj.packs import Packed

_log = logging.getLogger("kvtiers")

OVERLAP_MS = 30_000
"""Names so much older than the newest are listed again: clocks of writers differ, and a write
takes its time."""
_FRONTS_AT_ONCE = 16
"""Of an inventory, so that lookups find free threads meanwhile."""

Run = Callable[[Sequence[Callable[[], None]]], object]
"""Does several requests, and leaves those that fail for another time."""


def _nonce() -> int:
    return secrets.randbits(32)


class Shelf:
    """What packs there are, and what is in them. Any thread; methods block unless they say no.

    What is new is found by listing names from the newest one on, less ``OVERLAP_MS``; what comes
    later than that, and what left, by listing all.
    """

    def __init__(
        self,
        client: Client,
        namespace_id: str,
        index: PackIndex,
        wall_clock: Callable[[], float],
        nonce: Callable[[], int] = _nonce,
    ) -> None:
        self._client = client
        self._id = namespace_id
        self._index = index
        self._wall_clock = wall_clock
        self._nonce = nonce
        self._lock = threading.Lock()
        """Guards the index and ``_newest``; never held during a request."""
        self._newest: PackName | None = None
        """The latest name that was listed or given."""
        self._listing = threading.Lock()
        self._begun = 0
        self._failure: KVTiersError | None = None
        """Of the listing that began last."""

    # -- what is there --------------------------------------------------------------------------

    def find(self, keys: Iterable[Key]) -> list[Place | None]:
        """Where these lie, by what is known. Asks nobody."""
        with self._lock:
            return [self._index.find(key) for key in keys]

    def refresh(self, run: Run) -> None:
        """Learn of the packs that others made. Raises KVTiersError if they cannot be listed.

        Who comes while a listing is under way waits for the next one, and all who wait share it.
        """
        begun = self._begun
        with self._listing:
            if self._begun == begun:
                self._begun += 1
                self._failure = None
                try:
                    run([partial(self._take_in, pack) for pack in self._unseen(self._recent())])
                except KVTiersError as e:
                    self._failure = e.with_traceback(None)
            if self._failure is not None:
                raise copy.copy(self._failure)  # each with a traceback of its own

    def look_again(self, packs_: Iterable[PackName], run: Run) -> None:
        """Forget what these packs said, which led to damage, and ask them once more."""
        some = sorted(set(packs_))
        with self._lock:
            self._index.forget(some)
        run([partial(self._take_in, pack) for pack in some])

    def scan(self, run: Run, left: Callable[[Sequence[Key]], None]) -> Iterator[Entry]:
        """List all packs, and what is in them, the latest first. ``left`` hears of what is gone.

        Meanwhile :meth:`refresh` finds what is new, and what was not reached yet is not found.
        Raises KVTiersError.
        """
        with self._lock:
            before = self._index.packs
        found = self._list("")
        with self._lock:
            gone = self._index.forget(before.difference(found))
        if gone:
            left(gone)
        for at in range(0, len(found), _FRONTS_AT_ONCE):
            some = found[at : at + _FRONTS_AT_ONCE]
            run([partial(self._take_in, pack) for pack in self._unseen(some)])
            with self._lock:
                held = [each for pack in some for each in self._index.held_by(pack)]
            for key, place in held:
                yield Entry(key, place.length - PAGE_BYTES, place.pack.time_ms / 1000)

    def _recent(self) -> list[PackName]:
        with self._lock:
            newest = self._newest
        at = 0 if newest is None else newest.time_ms - OVERLAP_MS
        return self._list(names.packs_since(self._id, at))

    def _list(self, after: str) -> list[PackName]:
        """All packs whose names come after one, the latest first."""
        pages = self._client.objects(names.packs_below(self._id), after)
        maybe = [names.pack_at(self._id, stored.name) for page in pages for stored in page]
        found = sorted((pack for pack in maybe if pack is not None), reverse=True)
        if found:
            with self._lock:
                self._newest = found[0] if self._newest is None else max(self._newest, found[0])
        return found

    def _unseen(self, listed: Iterable[PackName]) -> list[PackName]:
        with self._lock:
            return [pack for pack in listed if not self._index.has_seen(pack)]

    def _take_in(self, pack: PackName) -> None:
        entries = read_front(self._client, self._id, pack)
        if entries is None:
            return  # it left since it was listed
        if isinstance(entries, KVTiersError):
            where = f"{self._client.where}/{pack.below(self._id)}"
            _log.warning("%s: %s; what is in it is not found", where, entries)
            entries = []
        with self._lock:
            self._index.adopt(pack, entries)

    # -- reading and writing --------------------------------------------------------------------

    def read(self, pack: PackName, places: Sequence[Place]) -> list[memoryview]:
        """The records at these places of one pack, by one request for all that lies between.

        A record is shorter where the pack ends before it should. Raises KVTiersError.
        """
        start = min(place.offset for place in places)
        end = max(place.offset + place.length for place in places)
        data = self._client.get(pack.below(self._id), end - start, start)
        return [data[place.offset - start :][: place.length] for place in places]

    def write(self, items: Sequence[Item]) -> None:
        """Make a pack of these. Raises KVTiersError; then none of them is there by our doing."""
        entries = packs.lay_out([i.key for i in items], [i.view.nbytes for i in items])
        parts: list[memoryview | bytes] = []
        for item in items:
            parts += [record.pack(item.key, self._id, item.view), item.view]
        self._put(entries, parts)

    def bury(self, keys: Sequence[Key]) -> None:
        """Say of these, for every engine to find, that they are gone. Raises KVTiersError.

        They are for this engine, whatever happens.
        """
        failure = None
        for at in range(0, len(keys), packs.MAX_GONE):
            try:
                self._put(packs.gone(keys[at : at + packs.MAX_GONE]), [])
            except KVTiersError as e:
                failure = e
        if failure is not None:
            raise failure

    def _put(self, entries: Sequence[Packed], records: Sequence[memoryview | bytes]) -> None:
        front = packs.pack_front(self._id, entries)
        pack = self._name(len(front) // PAGE_BYTES)
        try:
            self._client.put(pack.below(self._id), [front, *records])
        except KVTiersError:
            if records:
                raise
            with self._lock:
                self._index.adopt(pack, entries)
            raise
        with self._lock:
            self._index.adopt(pack, entries)

    def _name(self, front_pages: int) -> PackName:
        now = self._wall_clock()
        with self._lock:
            time_ms = names.next_time_ms(now, self._newest)
            self._newest = PackName(time_ms, self._nonce(), front_pages)
            return self._newest

    def lost(self, pack: PackName) -> list[Key]:
        """The pack is no more. The chunks that left with it. Asks nobody."""
        with self._lock:
            return self._index.forget([pack])

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant of the index, if any."""
        with self._lock:
            self._index.check()

    def __repr__(self) -> str:
        return f"<Shelf {self._index!r}>"
