"""Adaptive Replacement Cache.

Nimrod Megiddo and Dharmendra S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
USENIX FAST 2003. Names follow the paper: T1 and T2 hold resident keys seen once and more than
once, B1 and B2 remember keys evicted from them, p is the size that T1 should have.

Two things differ, because room is made before it is known which key will come (a store is
reserved, written, and inserted only when its bytes are whole):

* an eviction does not know whether the new key is in B2, so at ``|T1| = p`` it takes from T2;
* B1 is trimmed after the insertion instead of before it; the sizes that result are the same.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvtiers.chunks import Key
from kvtiers.host.policies.base import Staying
from kvtiers.host.policies.keyqueue import KeyQueue
from kvtiers.host.policies.lru import evict_oldest


class ARCPolicy:
    """Balances recency against frequency by watching which evicted keys come back.

    One scan of keys that are never used again cannot push out keys that are. A key that cannot be
    evicted when its turn comes goes to the recent end of its list.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._t1 = KeyQueue()
        self._t2: OrderedDict[Key, None] = OrderedDict()
        self._b1 = KeyQueue()
        self._b2 = KeyQueue()
        self._p = 0.0

    def insert(self, keys: Sequence[Key]) -> None:
        """Take in ``keys``; one that is remembered moves ``p`` towards the list it fell from."""
        t1, t2 = self._t1, self._t2
        if self._b1.isdisjoint(keys) and self._b2.isdisjoint(keys):
            t1.add(keys)
            self._trim_ghosts()
            return
        for key in keys:
            if key in self._b1:
                self._favour_recency()
                self._b1.discard(key)
                t2[key] = None
            elif key in self._b2:
                self._favour_frequency()
                self._b2.discard(key)
                t2[key] = None
            else:
                t1.add((key,))
                self._trim_ghosts()

    def touch(self, keys: Sequence[Key]) -> None:
        """Move ``keys`` to the recent end of T2, in this order."""
        t1, t2 = self._t1, self._t2
        for key in keys:
            if key in t2:
                t2.move_to_end(key)
            elif key in t1:
                t1.discard(key)
                t2[key] = None

    def evict(self, count: int, staying: Staying) -> list[Key]:
        """Remove ``count`` keys that may leave: from T1 while it is larger than p, else from T2.

        Where nothing of one list may leave the other gives.
        """
        surplus = min(count, max(0, len(self._t1) - int(self._p)))
        taken = self._demote_recent(surplus, staying)
        if len(taken) < count:
            taken += self._demote_frequent(count - len(taken), staying)
        if len(taken) < count:
            taken += self._demote_recent(count - len(taken), staying)
        return taken

    def remove(self, keys: Sequence[Key]) -> None:
        """Forget resident ``keys`` without remembering them as evicted."""
        for key in keys:
            if key in self._t1:
                self._t1.discard(key)
            self._t2.pop(key, None)

    def clear(self) -> None:
        """Forget everything, history and balance included."""
        for keys in (self._t1, self._t2, self._b1, self._b2):
            keys.clear()
        self._p = 0.0

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def check(self) -> None:
        """Raise AssertionError if an invariant of the paper (section III) is broken."""
        t1, t2 = set(self._t1), set(self._t2)
        b1, b2 = set(self._b1), set(self._b2)
        c = self.capacity
        broken = {
            "a key is in two lists": len(t1 | t2 | b1 | b2) != sum(map(len, (t1, t2, b1, b2))),
            "|T1|+|T2| exceeds the capacity": len(t1) + len(t2) > c,
            "|T1|+|B1| exceeds the capacity": len(t1) + len(b1) > c,
            "all lists together exceed twice the capacity": len(t1 | t2 | b1 | b2) > 2 * c,
            "p is outside 0..capacity": not 0 <= self._p <= c,
        }
        for queue in (self._t1, self._b1, self._b2):
            queue.check()
        for what, is_broken in broken.items():
            if is_broken:
                raise AssertionError(f"{self!r}: {what}")

    def __repr__(self) -> str:
        sizes = f"T1 {len(self._t1)}, T2 {len(self._t2)}, B1 {len(self._b1)}, B2 {len(self._b2)}"
        return f"<ARCPolicy {len(self)}/{self.capacity}: {sizes}, p {self._p:.1f}>"

    def _favour_recency(self) -> None:
        step = max(1.0, len(self._b2) / len(self._b1))
        self._p = min(float(self.capacity), self._p + step)

    def _favour_frequency(self) -> None:
        step = max(1.0, len(self._b1) / len(self._b2))
        self._p = max(0.0, self._p - step)

    def _trim_ghosts(self) -> None:
        self._b1.drop_oldest(len(self._t1) + len(self._b1) - self.capacity)
        remembered = len(self._b1) + len(self._b2)
        self._b2.drop_oldest(len(self) + remembered - 2 * self.capacity)

    def _demote_recent(self, count: int, staying: Staying) -> list[Key]:
        taken = self._t1.take_oldest(count, staying)
        self._b1.add(taken)
        return taken

    def _demote_frequent(self, count: int, staying: Staying) -> list[Key]:
        taken = evict_oldest(self._t2, count, staying)
        self._b2.add(taken)
        return taken
