"""Deliberately broken stores; each names the law that must catch it."""

import ctypes
import itertools
import os
import threading
from dataclasses import replace

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import Kind
from kvtiers.events import Reason
from kvtiers.testing import NAMESPACE
from kvtiers.tiers import record
from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.base import Capabilities
from tests.laws.honest import DISKS, HonestStore

STORES: dict[type[HonestStore], str] = {}
STORES_UNDER_A_TIER: dict[type[HonestStore], str] = {}


def caught_by(number, where=STORES):
    """Register a saboteur with the law that must catch it."""

    def register(cls):
        where[cls] = number
        return cls

    return register


def under_a_tier(number):
    return caught_by(number, STORES_UNDER_A_TIER)


def poke(view, offset=0):
    """Change a byte, whether the view allows it or not."""
    at = address_of(view) + offset
    ctypes.memset(at, ctypes.c_ubyte.from_address(at).value ^ 0xFF, 1)


# -- stores ---------------------------------------------------------------------------------------


@under_a_tier("T1")
@caught_by("S1")
class LosesEveryThirdKey(HonestStore):
    def __init__(self, *args):
        super().__init__(*args)
        self.count = itertools.count(1)

    def write_one(self, item):
        return super().write_one(item) if next(self.count) % 3 else None


@caught_by("S1")
class SwapsTwoSlots(HonestStore):
    def read(self, items):
        results = super().read(items)
        if len(items) > 1 and items[0].view.nbytes == items[1].view.nbytes:
            a, b = bytes(items[0].view), bytes(items[1].view)
            items[0].view[:], items[1].view[:] = b, a
        return results


@caught_by("S1")
class ShortReads(HonestStore):
    def verify(self, whole, item):
        error = super().verify(whole, item)
        item.view[-PAGE_BYTES // 2 :] = bytes(PAGE_BYTES // 2)
        return error


@under_a_tier("T2")
@caught_by("S2")
class IgnoresTheGroup(HonestStore):
    def place_of(self, key):
        return self.context.namespace.id, key[:-4]


@caught_by("S2")
class KeepsAPrefixOfTheKey(HonestStore):
    def place_of(self, key):
        return self.context.namespace.id, key[:8] + key[-4:]

    def verify(self, whole, item):
        return None


@caught_by("S3")
class AnswersTwice(HonestStore):
    def read(self, items):
        return super().read(items) * 2


@caught_by("S3")
class OneFailureFailsAll(HonestStore):
    def read(self, items):
        results = super().read(items)
        first = next((r for r in results if r is not None), None)
        return [first] * len(results)


@caught_by("S3")
class AnswersInItsOwnOrder(HonestStore):
    def contains(self, keys):
        return sorted(super().contains(keys), reverse=True)


@under_a_tier("T6")
@caught_by("S4")
class WritesBesideItsView(HonestStore):
    def fill(self, item, payload):
        super().fill(item, payload)
        poke(item.view, -1)


@caught_by("S5")
class AnswersBeforeCopying(HonestStore):
    def __init__(self, *args):
        super().__init__(*args)
        self.pending = []

    def write_one(self, item):
        page = record.pack(item.key, self.context.namespace.id, item.view)
        self.pending.append((self.place_of(item.key), page, item.view))

    def refuse_if_closed(self):
        super().refuse_if_closed()
        pending, self.pending = self.pending, []
        for where, page, view in pending:
            self.put(where, page + bytes(view))


@under_a_tier("T6")
@caught_by("S5")
class WritesThroughAReadOnlyView(HonestStore):
    def pack(self, item):
        whole = super().pack(item)
        poke(item.view)
        return whole


@caught_by("S6")
class TouchesMemoryLate(HonestStore):
    def __init__(self, *args):
        super().__init__(*args)
        self.late = []

    def fill(self, item, payload):
        super().fill(item, payload)
        self.late.append((item.view.obj, address_of(item.view)))

    def refuse_if_closed(self):
        super().refuse_if_closed()
        late, self.late = self.late, []
        for _alive, at in late:
            ctypes.memset(at, 0, 1)


@caught_by("S6")
class KeepsAnExport(HonestStore):
    kept = []

    def fill(self, item, payload):
        super().fill(item, payload)
        self.kept.append(item.view[:1])


@caught_by("S7")
class RaisesForWhatIsAbsent(HonestStore):
    def read_one(self, item):
        error = super().read_one(item)
        if error is not None and error.kind is Kind.VANISHED:
            raise error
        return error


@caught_by("S7")
class SaysNothingOfWhatIsAbsent(HonestStore):
    def read_one(self, item):
        if self.place_of(item.key) not in self.disk:
            return self.error("gone", Kind.VANISHED)
        return super().read_one(item)


@under_a_tier("T7")
@caught_by("S8")
class TrustsItsDisk(HonestStore):
    def verify(self, whole, item):
        data = whole[PAGE_BYTES:][: item.view.nbytes]
        item.view[: len(data)] = data


@caught_by("S8")
class KeepsWhatIsDamaged(HonestStore):
    def drop_damaged(self, key):
        pass


@under_a_tier("T8")
@caught_by("S9")
class RefusesWhatIsPresent(HonestStore):
    def write_one(self, item):
        if self.place_of(item.key) in self.disk:
            return self.error("it is there", Kind.IO)
        return super().write_one(item)


@caught_by("S9")
class StoresTwice(HonestStore):
    def __init__(self, *args):
        super().__init__(*args)
        self.written = []

    def write_one(self, item):
        self.written.append(item.key)
        return super().write_one(item)

    def scan(self):
        entries = {entry.key: entry for entry in super().scan()}
        return [entries[key] for key in self.written if key in entries]


@caught_by("S10")
class LosesUpdatesOfLanesThatMeet(HonestStore):
    """The first lane of a write waits a while for a second one, then undoes what that did."""

    def __init__(self, *args):
        super().__init__(*args)
        self.barrier = threading.Barrier(2)
        self.first = True

    def write(self, items):
        main = threading.current_thread() is threading.main_thread()
        if main or not self.first:
            return super().write(items)
        self.meet()
        before = set(self.disk)
        results = super().write(items)
        if self.first:
            self.first = False
            for where in set(self.disk) - before:
                del self.disk[where]
        return results

    def meet(self):
        try:
            self.barrier.wait(1)
        except threading.BrokenBarrierError:
            return


@caught_by("S11")
class EvictsInSilence(HonestStore):
    def put(self, where, whole):
        super().put(where, whole)
        return []


@caught_by("S11")
class ReportsWhatStays(HonestStore):
    def put(self, where, whole):
        super().put(where, whole)
        return [where[1]]


@caught_by("S12")
class IgnoresDelete(HonestStore):
    def delete(self, keys):
        self.refuse_if_closed()


@caught_by("S12")
class ReportsItsDeletes(HonestStore):
    def delete(self, keys):
        super().delete(keys)
        self.context.on_removed(keys, Reason.EVICTED)


@caught_by("S12")
class LiesAboutDelete(HonestStore):
    capabilities = Capabilities(persistent=True, shared=True, delete=False)


@caught_by("S12")
class CannotDeleteAsItSays(HonestStore):
    def delete(self, keys):
        self.refuse_if_closed()
        raise self.error("it cannot delete", Kind.UNSUPPORTED)


@caught_by("S13")
class CannotScanAsItSays(HonestStore):
    def scan(self):
        self.refuse_if_closed()
        raise self.error("it cannot list", Kind.UNSUPPORTED)


@caught_by("S13")
class ListsTooLittle(HonestStore):
    def scan(self):
        return list(super().scan())[1:]


@caught_by("S13")
class LiesAboutScan(HonestStore):
    capabilities = Capabilities(persistent=True, shared=True, scan=False)


@caught_by("S14")
class TouchWaitsForTheLock(HonestStore):
    def write_one(self, item):
        with self.lock:
            self.context.wall_clock()
            self.put(self.place_of(item.key), self.pack(item))

    def touch(self, keys):
        with self.lock:
            super().touch(keys)


@caught_by("S14")
class AnswersAtOnceWhenItCan(HonestStore):
    capabilities = replace(HonestStore.capabilities, instant=True)

    def write_one(self, item):
        with self.lock:
            self.context.wall_clock()
            self.put(self.place_of(item.key), self.pack(item))

    def contains(self, keys):
        with self.lock:
            return super().contains(keys)


@caught_by("S14")
class TouchMindsTheUnknown(HonestStore):
    def touch(self, keys):
        super().touch(keys)
        for key in keys:
            self.disk.move_to_end(self.place_of(key))


@caught_by("S15")
class WorksAfterClose(HonestStore):
    def refuse_if_closed(self):
        pass


@caught_by("S15")
class ClosesOnce(HonestStore):
    def close(self):
        self.refuse_if_closed()
        super().close()


@under_a_tier("T15")
@caught_by("S16")
class LeaksAThreadOnClose(HonestStore):
    def __init__(self, *args):
        super().__init__(*args)
        threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()


@under_a_tier("T15")
@caught_by("S16")
class LeaksAFileOnClose(HonestStore):
    left = ()

    def close(self):
        self.left = self.left or os.pipe()  # no two are alike
        super().close()

    def __del__(self):
        for fd in self.left:
            os.close(fd)


@under_a_tier("T11")
@caught_by("S17")
class LiesAboutPersistence(HonestStore):
    def __init__(self, place, context):
        DISKS.pop(str(place), None)
        super().__init__(place, context)


@under_a_tier("T11")
@caught_by("S17")
class PersistsUnasked(HonestStore):
    capabilities = Capabilities(persistent=False, shared=False)


@under_a_tier("T12")
@caught_by("S18")
class IgnoresTheNamespace(HonestStore):
    def __init__(self, place, context):
        super().__init__(place, replace(context, namespace=NAMESPACE))


@caught_by("S19")
class LiesAboutSharing(HonestStore):
    def __init__(self, *args):
        super().__init__(*args)
        self.known = set(self.disk)

    def put(self, where, whole):
        self.known.add(where)
        return super().put(where, whole)

    def contains(self, keys):
        return [there and self.place_of(k) in self.known for k, there in self.asked(keys)]

    def asked(self, keys):
        return zip(keys, super().contains(keys), strict=True)


@caught_by("S19")
class SharesUnasked(HonestStore):
    capabilities = Capabilities(persistent=True, shared=False)


@caught_by("S20")
class ForgetsNothingWhenAskedAgain(HonestStore):
    def still_there(self, keys):
        self.refuse_if_closed()
        return [True] * len(keys)


@caught_by("S20")
class AsksAgainInItsOwnOrder(HonestStore):
    def still_there(self, keys):
        return sorted(self.contains(keys))


@caught_by("S15")
class AnswersAgainAfterClose(HonestStore):
    def still_there(self, keys):
        return [self.place_of(key) in self.disk for key in keys]
