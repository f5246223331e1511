"""The laws of chunk stores (``kvtiers.tiers.base.ChunkStore``)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from kvtiers.chunks import Key, Namespace
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Reason
from kvtiers.testing.bench import Environment, Stops, StoreBench, closing, refusal, together
from kvtiers.testing.laws import Holdings, Laws, hook, law, must
from kvtiers.testing.values import (
    LAYOUT,
    NAMESPACE,
    OTHER_NAMESPACE,
    Slots,
    chunk,
    content,
    key,
    keys,
    near_misses,
)
from kvtiers.tiers.base import ChecksAgain, ChunkStore, StoreContext

_SIZES = [group.group for group in LAYOUT.groups]
_MANY = 128
"""More than the store needs room for: one that has a small capacity has to evict."""
_LANES = 4


class StoreLaws(Laws):
    """Subclass it, define the three hooks, and name the class ``Test...`` for pytest.

    The store under test needs room for 40 chunks of five pages.
    """

    @hook
    def make(self, place: Path, context: StoreContext) -> ChunkStore:
        """Hook: open a store at ``place``; what was stored there before is there again."""
        raise NotImplementedError

    @hook
    def peek(self, store: ChunkStore, name: Key) -> bytes | None:
        """Hook: the record of a chunk as it lies in storage, behind the API; None if absent."""
        raise NotImplementedError

    @hook
    def seed(self, store: ChunkStore, name: Key, record: bytes) -> None:
        """Hook: put ``record`` where that of ``name`` lies, behind the API."""
        raise NotImplementedError

    # -- bytes ----------------------------------------------------------------------------------

    @law("S1")
    def test_s1_what_was_written_is_read_back(self, tmp_path: Path) -> None:
        """Bit for bit, for every size, in any order and grouping, from and to any address."""
        with self._open(tmp_path) as bench:
            names = [key(n, group) for group in _SIZES for n in range(4)]
            bench.write(names)
            bench.must_hold(names[::-1])
            for name in names:
                bench.must_hold([name])
            shifted = [key(f"shifted {n}", group) for group in _SIZES for n in range(2)]
            bench.write(shifted, shift=1)
            bench.must_hold(shifted, shift=3)
            bench.write([])
            bench.must_hold([])

    @law("S2")
    def test_s2_keys_that_look_alike_never_meet(self, tmp_path: Path) -> None:
        """A key that differs in one bit, in its group or by a prefix is another chunk."""
        with self._open(tmp_path) as bench:
            name = key("x")
            others = near_misses(name)
            bench.write([name])
            must(not any(bench.contains(others)), "a key that was never written is found")
            bench.write(others)
            bench.must_hold([name, *others])

    @law("S3")
    def test_s3_one_failure_leaves_the_neighbours_alone(self, tmp_path: Path) -> None:
        """One result per item, in order; an item that fails does not fail the others."""
        with self._open(tmp_path) as bench:
            a, b, c, absent = keys("a", "b", "c", "absent", group=1)
            bench.write([a, b, c])
            kinds = bench.read([a, absent, b, absent, c])
            expected = [None, Kind.VANISHED, None, Kind.VANISHED, None]
            must(kinds == expected, f"reading present and absent chunks gave {kinds}")
            must(bench.contains([absent, a]) == [False, True], "contains answers out of order")

    @law("S4")
    def test_s4_a_read_writes_into_its_own_views_only(self, tmp_path: Path) -> None:
        """No byte before or behind a view changes, whether the item succeeds or fails."""
        with self._open(tmp_path) as bench:
            names = [key("a", 0), key("b", 7)]
            bench.write(names)
            record = self._record(bench, names[1])
            self.seed(bench.store, names[1], record + record)
            for shift in (0, 1):
                slots = Slots([*names, key("absent", 1)], shift)
                bench.read_into(slots)
                must(slots.holds(0) == chunk(names[0]), "a failing neighbour spoilt a chunk")

    @law("S5")
    def test_s5_a_write_copies_and_leaves_its_memory_alone(self, tmp_path: Path) -> None:
        """When it returns it has what it needs; the bytes it was given are as they were."""
        with self._open(tmp_path) as bench:
            names = [key(n, group) for n, group in enumerate(_SIZES)]
            slots = Slots.filled(names)
            before = slots.image()
            must(bench.write_from(slots) == [None] * len(names), "writing failed")
            must(slots.image() == before, "a write changed the memory that it was given")
            slots.scribble()
            bench.write(keys("something else"))
            bench.must_hold(names)

    @law("S6")
    def test_s6_after_a_call_its_memory_is_the_callers(self, tmp_path: Path) -> None:
        """No view is touched or kept exported once the call returned, and no error keeps one."""
        with self._open(tmp_path) as bench:
            names = keys("a", "b", "c", group=1)
            written = bench.write(names)
            record = self._record(bench, names[1])
            self.seed(bench.store, names[1], _flip(record, len(record) - 1))
            read = Slots([*names, key("absent", 1)])
            errors = bench.read_into(read)
            images = [written.scribble(), read.scribble()]
            for slots in (written, read):
                slots.must_be_free()
            bench.write(keys("d"))
            bench.must_hold([names[0], key("d")])
            bench.store.touch(names)
        for slots, image in zip((written, read), images, strict=True):
            must(slots.image() == image, "memory was touched after the call had returned")
        must(len(errors) == 4, "the errors live on")

    @law("S7")
    def test_s7_absent_is_vanished_and_reported(self, tmp_path: Path) -> None:
        """Reading what is not there is ``VANISHED``, and ``on_removed`` hears of it."""
        with self._open(tmp_path) as bench:
            present, absent = keys("present", "absent")
            bench.write([present])
            bench.must_lack([absent])
            reasons = set(bench.environment.reasons(absent))
            must(reasons == {Reason.VANISHED}, f"an absent chunk was reported as {reasons}")
            must(not bench.environment.reasons(present), "a present chunk was reported")

    @law("S8")
    def test_s8_damage_is_never_delivered(self, tmp_path: Path) -> None:
        """Damaged, short, torn and foreign records are ``CORRUPT``, reported, and gone."""
        with self._open(tmp_path) as bench:
            names = keys("a", "b", "good", group=1)
            bench.write(names)
            record, other = self._record(bench, names[0]), self._record(bench, names[1])
            for damaged in [*_damages(record), other, b""]:
                bench.write(names[:1])
                self.seed(bench.store, names[0], damaged)
                self._must_be_refused(bench, names[0], names[2])

    @law("S9")
    def test_s9_a_key_is_stored_once_however_often_it_is_written(self, tmp_path: Path) -> None:
        """Writing a present key succeeds, in one call, in two, and from several threads."""
        with self._open(tmp_path) as bench:
            names = keys("a", "b", group=7)
            bench.write([*names, *names])
            bench.write(names)
            both = keys("c", "d", group=7)
            together([partial(bench.write, both)] * _LANES, self.patience_s)
            bench.must_hold([*names, *both])
            if bench.store.capabilities.scan:
                listed = [entry.key for entry in bench.store.scan()]
                must(sorted(listed) == sorted([*names, *both]), "a key is stored twice")

    @law("S10")
    def test_s10_lanes_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        """Calls from several threads at once give what they would give one after the other."""
        with self._open(tmp_path) as bench:

            def lane(number: int) -> None:
                for turn in range(4):
                    names = _of_lane(number, turn)
                    bench.write(names)
                    bench.must_hold(names)
                    bench.must_lack(keys(f"absent {number} {turn}"))

            together([partial(lane, number) for number in range(_LANES)], self.patience_s)
            for number in range(_LANES):
                bench.must_hold([name for turn in range(4) for name in _of_lane(number, turn)])

    # -- what is there ---------------------------------------------------------------------------

    @law("S11")
    def test_s11_nothing_leaves_unsaid(self, tmp_path: Path) -> None:
        """A chunk that was taken is there, until its removal was reported; else it was ``FULL``."""
        with self._open(tmp_path) as bench:
            names = [key(n, _SIZES[n % len(_SIZES)]) for n in range(_MANY)]
            taken = []
            for name in names:
                (error,) = bench.write_from(Slots.filled([name]))
                full = error is None or error.kind is Kind.FULL
                must(full, f"a store without room is FULL, not {error!r}")
                taken += [name] if error is None else []
            reported = {k for k, _ in bench.environment.removed}
            must(reported <= set(taken), "a chunk was reported that was not there")
            reasons = {reason for _, reason in bench.environment.removed}
            must(reasons <= {Reason.EVICTED}, f"what makes room is EVICTED, not {reasons}")
            bench.must_hold([k for k in taken if k not in reported])
            bench.must_lack([k for k in names if k in reported or k not in taken])

    @law("S12")
    def test_s12_delete_forgets_or_refuses(self, tmp_path: Path) -> None:
        """Deleted chunks are gone, absent ones no error, none is reported; or ``UNSUPPORTED``."""
        with self._open(tmp_path) as bench:
            a, b, absent = keys("a", "b", "absent")
            bench.write([a, b])
            delete = bench.store.delete
            if not bench.store.capabilities.delete:
                _must_refuse("delete", lambda: delete([a]))
                bench.must_hold([a, b])
                return
            delete([a, absent, a])
            must(not bench.environment.removed, "delete was reported through on_removed")
            bench.must_lack([a])
            bench.must_hold([b])
            bench.write([a])
            bench.must_hold([a, b])

    @law("S13")
    def test_s13_scan_lists_everything_once_or_refuses(self, tmp_path: Path) -> None:
        """Each stored chunk of the namespace once, and nothing else; or ``UNSUPPORTED``."""
        with self._open(tmp_path) as bench:
            if not bench.store.capabilities.scan:
                _must_refuse("scan", lambda: list(bench.store.scan()))
                return
            must(list(bench.store.scan()) == [], "an empty store lists chunks")
            names = [key(n, group) for group in _SIZES for n in range(4)]
            bench.write(names)
            bench.write(names[:3])
            entries = list(bench.store.scan())
            listed = sorted(entry.key for entry in entries)
            must(listed == sorted(names), "scan lists other keys than those that were written")
            must(all(entry.bytes > 0 for entry in entries), "scan lists a chunk without bytes")

    @law("S14")
    def test_s14_touch_never_waits(self, tmp_path: Path) -> None:
        """It returns while a lane is anywhere inside the store, and ignores unknown keys.

        So does ``contains`` of an ``instant`` store.
        """
        stops = Stops(self.patience_s)
        environment = Environment(NAMESPACE, interrupt=stops.interrupt)
        with self._open(tmp_path, environment=environment) as bench:
            bench.write(keys("a"))

            def lane() -> None:
                bench.write(keys("b", "c"))
                bench.store.touch(keys("a"))
                bench.write(keys("d"))
                bench.read(keys("a", "absent"))

            stops.start(lane)
            try:
                while stops.next():
                    with self.watched("touch", stops.finish):
                        bench.store.touch(keys("a", "b", "never seen"))
                    if bench.store.capabilities.instant:
                        with self.watched("contains", stops.finish):
                            must(bench.contains(keys("never seen")) == [False], "it is found")
                    stops.go_on()
            finally:
                stops.finish()
            bench.must_hold(keys("a", "b", "c", "d"))
            bench.must_lack(keys("never seen"))

    # -- life -----------------------------------------------------------------------------------

    @law("S15")
    def test_s15_after_close_everything_refuses(self, tmp_path: Path) -> None:
        """Closing twice is fine; then every method raises ``CLOSED``, whatever it is given."""
        with self._open(tmp_path) as bench:
            store, names = bench.store, keys("a")
            bench.write(names)
            store.close()
            store.close()
            calls: dict[str, Callable[[], object]] = {
                "contains": lambda: store.contains(names),
                "write": lambda: store.write(bench.items(Slots.filled(names), writable=False)),
                "read": lambda: store.read(bench.items(Slots(names), writable=True)),
                "delete": lambda: store.delete(names),
                "scan": lambda: list(store.scan()),
                "touch": lambda: store.touch(names),
                "touch of nothing": lambda: store.touch([]),
            }
            if isinstance(store, ChecksAgain):
                calls["still_there"] = partial(store.still_there, names)
            for name, call in calls.items():
                kind = refusal(call)
                must(kind is Kind.CLOSED, f"{name} after close is {kind}, not CLOSED")

    @law("S16")
    def test_s16_close_lets_go_of_everything(self, tmp_path: Path) -> None:
        """No thread of the store runs after ``close`` and no file of its stays open."""
        holdings = Holdings()
        for _ in range(2):
            with self._open(tmp_path) as bench:
                bench.write(keys("a", "b"))
                bench.must_hold(keys("a"))
                bench.store.touch(keys("b"))
        holdings.must_be_back(self.patience_s)

    @law("S17")
    def test_s17_chunks_survive_close_if_and_only_if_it_says_so(self, tmp_path: Path) -> None:
        """``persistent``: the next store at this place has every chunk. Else it has none."""
        names = [key(n, group) for group in _SIZES for n in range(3)]
        with self._open(tmp_path) as bench:
            bench.write(names)
            promised = bench.store.capabilities.persistent
        with self._open(tmp_path) as bench:
            if promised:
                bench.must_hold(names)
            else:
                bench.must_lack(names)
            bench.write(keys("new"))
            bench.must_hold(keys("new"))

    @law("S18")
    def test_s18_namespaces_never_meet(self, tmp_path: Path) -> None:
        """Chunks of one namespace are absent in another, even if their record is moved there.

        A place that is not ``shared`` may have to be left first.
        """
        names = keys("a", "b")
        with self._open(tmp_path) as ours:
            ours.write(names)
            record = self._record(ours, names[0])
            try:
                theirs = self._open(tmp_path, OTHER_NAMESPACE)
            except KVTiersError:
                must(not ours.store.capabilities.shared, "a shared place is refused")
            else:
                self._must_keep_apart(theirs, names, record)
                ours.must_hold(names)
                return
            persistent = ours.store.capabilities.persistent
        self._must_keep_apart(self._open(tmp_path, OTHER_NAMESPACE), names, record)
        if persistent:
            with self._open(tmp_path) as ours:
                ours.must_hold(names)

    @law("S19")
    def test_s19_shared_stores_see_each_other_and_others_are_alone(self, tmp_path: Path) -> None:
        """``shared``: what one instance adds or removes, another finds so. Else none meets it."""
        with self._open(tmp_path) as ours:
            names = keys("a", "b")
            if not ours.store.capabilities.shared:
                self._must_be_alone(ours, names, tmp_path)
                return
            with self._open(tmp_path) as theirs:
                theirs.must_lack(names)
                ours.write(names)
                theirs.must_hold(names)
                if theirs.store.capabilities.delete:
                    theirs.store.delete(names[:1])
                    ours.must_lack(names[:1])
                    ours.write(names[:1])
                    theirs.must_hold(names)

    @law("S20")
    def test_s20_still_there_agrees_with_contains_at_rest(self, tmp_path: Path) -> None:
        """Where there is ``still_there``: one answer per key, in order, as ``contains`` has it."""
        with self._open(tmp_path) as bench:
            store = bench.store
            if not isinstance(store, ChecksAgain):
                return
            a, b, absent, *others = keys("a", "b", "absent", "c", "d")
            asked = [absent, a, b, absent, *others, a]
            bench.write([a, b])
            for name in others:
                bench.write([name])
                self._must_agree(bench, store, asked)
            if store.capabilities.delete:
                store.delete([b])
                self._must_agree(bench, store, asked)
            must(store.still_there([]) == [], "it answers what was not asked")

    # -- inside ----------------------------------------------------------------------------------

    def _open(
        self,
        place: Path,
        namespace: Namespace = NAMESPACE,
        environment: Environment | None = None,
    ) -> AbstractContextManager[StoreBench]:
        environment = environment or Environment(namespace)
        return closing(StoreBench(self.make(place, environment.context()), environment))

    def _must_keep_apart(
        self, opened: AbstractContextManager[StoreBench], names: Sequence[Key], record: bytes
    ) -> None:
        with opened as theirs:
            theirs.must_lack(names)
            theirs.write(names[1:])
            self.seed(theirs.store, names[0], record)
            self._must_be_refused(theirs, names[0], names[1])

    def _must_be_alone(self, ours: StoreBench, names: Sequence[Key], place: Path) -> None:
        """A second instance is refused at its opening, or neither finds what the other has."""
        ours.write(names[:1])
        try:
            theirs = self._open(place)
        except KVTiersError:
            ours.must_hold(names[:1])
            return
        with theirs as bench:
            bench.must_lack(names[:1])
            bench.write(names[1:])
            ours.must_hold(names[:1])
            ours.must_lack(names[1:])

    def _must_agree(self, bench: StoreBench, store: ChecksAgain, names: Sequence[Key]) -> None:
        again, expected = store.still_there(names), bench.contains(names)
        must(again == expected, f"still_there answers {again} where contains has {expected}")

    def _record(self, bench: StoreBench, name: Key) -> bytes:
        record = self.peek(bench.store, name)
        must(record is not None, "peek finds nothing where a chunk was written")
        return record or b""

    def _must_be_refused(self, bench: StoreBench, damaged: Key, good: Key) -> None:
        bench.environment.removed.clear()
        kinds = bench.read([good, damaged, good])
        must(kinds == [None, Kind.CORRUPT, None], f"a damaged chunk between good ones: {kinds}")
        reasons = bench.environment.reasons(damaged)
        must(reasons == [Reason.CORRUPT], f"a damaged chunk was reported as {reasons}")
        must(bench.contains([damaged]) == [False], "a damaged chunk is still found")


def _of_lane(number: int, turn: int) -> list[Key]:
    return [key((number, turn), group) for group in _SIZES[:2]]


def _must_refuse(operation: str, act: Callable[[], object]) -> None:
    kind = refusal(act)
    must(kind is Kind.UNSUPPORTED, f"{operation} is declared absent but is {kind}")


def _flip(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 0x10]) + record[at + 1 :]


def _damages(record: bytes) -> Sequence[bytes]:
    last = len(record) - 1
    flipped = [_flip(record, at) for at in (0, 8, last // 2, last)]
    torn = record[: len(record) // 2] + bytes(len(record) - len(record) // 2)
    swapped = content(key("somebody else"), len(record))
    return [*flipped, record[:-1], record[: last // 2], torn, swapped]
