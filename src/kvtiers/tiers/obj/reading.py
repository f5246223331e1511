"""Reading chunks of one namespace from a bucket, and finding out what is wrong with them."""

from collections.abc import Callable, Sequence
from functools import partial

from kvtiers.chunks import PAGE_BYTES, Key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers import record
from kvtiers.tiers.base import Item
from kvtiers.tiers.obj import names
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.obj.index import Place
from kvtiers.tiers.obj.names import PackName
from kvtiers.tiers.obj.shelf import Shelf
from kvtiers.tiers.obj.together import Together

Result = KVTiersError | None

_MAX_GAP_BYTES = 1 << 20
"""What nobody asked for and travels along rather than to cost a request more."""


class Reading:
    """Any thread. What is missing or damaged is answered, and left as it is.

    ``left`` hears of chunks that nobody asked for and that are gone with their pack.
    """

    def __init__(
        self,
        client: Client,
        namespace_id: str,
        shelf: Shelf,
        together: Together,
        left: Callable[[Sequence[Key]], None],
        pack_below_bytes: int,
    ) -> None:
        self._client = client
        self._id = namespace_id
        self._shelf = shelf
        self._together = together
        self._left = left
        self._pack_below = pack_below_bytes

    def read(self, items: Sequence[Item]) -> list[Result]:
        """Fill each item's view: packs by ranges, all at the same time. One result per item.

        ``CORRUPT`` only if it is so twice, for what is in storage may be better than what came.
        """
        results = self._read(items)
        again = [n for n, error in enumerate(results) if _is_lack(error)]
        if again:
            lacking = [items[n] for n in again]
            self._look_again([e for n in again if (e := results[n]) is not None], lacking)
            for n, error in zip(again, self._read_again(lacking), strict=True):
                results[n] = error
        return results

    def _look_again(self, errors: Sequence[KVTiersError], items: Sequence[Item]) -> None:
        """Where packs said that it lies may have been a wrong answer, too."""
        damaged = [i.key for i, e in zip(items, errors, strict=True) if e.kind is Kind.CORRUPT]
        places = self._shelf.find(damaged)
        packs = [place.pack for place in places if place is not None]
        if packs:
            self._shelf.look_again(packs, self._together.run)

    def _read_again(self, items: Sequence[Item]) -> Sequence[Result]:
        """Perhaps others know more, or a second answer is better."""
        if any(item.view.nbytes < self._pack_below for item in items):
            try:
                self._shelf.refresh(self._together.run)
            except KVTiersError as e:
                return [e.with_traceback(None)] * len(items)
        return self._read(items)

    def _read(self, items: Sequence[Item]) -> list[Result]:
        results: list[Result] = [None] * len(items)
        packs: dict[PackName, list[tuple[int, Place]]] = {}
        single: list[int] = []
        for n, place in enumerate(self._shelf.find(item.key for item in items)):
            if place is not None and place.length != PAGE_BYTES + items[n].view.nbytes:
                results[n] = self._error(items[n], f"its pack gives it {place.length} bytes")
            elif place is not None:
                packs.setdefault(place.pack, []).append((n, place))
            elif items[n].view.nbytes >= self._pack_below:
                single.append(n)
            else:
                results[n] = self._error(items[n], "it is not there", Kind.VANISHED)
        near = [(pack, some) for pack, wanted in packs.items() for some in _near(wanted)]
        acts = [partial(self._read_pack, pack, items, some) for pack, some in near]
        parts = [[n for n, _ in some] for _, some in near] + [[n] for n in single]
        acts += [partial(self._read_object, items[n]) for n in single]
        for part, outcome in zip(parts, self._together.run(acts), strict=True):
            outcomes = [outcome] * len(part) if isinstance(outcome, KVTiersError) else outcome
            for n, error in zip(part, outcomes, strict=True):
                results[n] = error
        return results

    def _read_pack(
        self, pack: PackName, items: Sequence[Item], wanted: Sequence[tuple[int, Place]]
    ) -> list[Result]:
        try:
            records = self._shelf.read(pack, [place for _, place in wanted])
        except KVTiersError as e:
            if e.kind is Kind.VANISHED:
                asked = {items[n].key for n, _ in wanted}
                self._left([key for key in self._shelf.lost(pack) if key not in asked])
            raise
        return [self._fill(items[n], data) for (n, _), data in zip(wanted, records, strict=True)]

    def _read_object(self, item: Item) -> list[Result]:
        page = memoryview(bytearray(PAGE_BYTES))
        name = names.chunk_name(self._id, item.key)
        length = self._client.get_into(name, [page, item.view])
        return [self._judged(item, page, length)]

    def _fill(self, item: Item, data: memoryview) -> Result:
        if data.nbytes == PAGE_BYTES + item.view.nbytes:
            item.view[:] = data[PAGE_BYTES:]
        return self._judged(item, data[:PAGE_BYTES], data.nbytes)

    def _judged(self, item: Item, page: memoryview, length: int) -> Result:
        """``page`` and the item's view are what came of ``length`` bytes."""
        expected = PAGE_BYTES + item.view.nbytes
        if length != expected:
            how = "short" if length < expected else "long"
            return self._error(item, f"it is {how}: {length} bytes, not {expected}")
        error = record.verify(page, item.key, self._id, item.view)
        return None if error is None else self._error(item, str(error))

    def _error(self, item: Item, what: str, kind: Kind = Kind.CORRUPT) -> KVTiersError:
        where = f"{self._client.where}/{names.chunk_name(self._id, item.key)}"
        return KVTiersError(
            f"{where}: {what}", kind=kind, operation="read", context={"object": where}
        )


def _near(wanted: Sequence[tuple[int, Place]]) -> list[list[tuple[int, Place]]]:
    """The same by offset, parted where more than ``_MAX_GAP_BYTES`` lie between."""
    groups: list[list[tuple[int, Place]]] = []
    end = 0
    for each in sorted(wanted, key=lambda one: one[1].offset):
        place = each[1]
        if not groups or place.offset - end > _MAX_GAP_BYTES:
            groups.append([])
        groups[-1].append(each)
        end = place.offset + place.length
    return groups


def _is_lack(error: Result) -> bool:
    return error is not None and error.kind in (Kind.VANISHED, Kind.CORRUPT)
