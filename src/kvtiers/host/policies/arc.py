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
from collections.abc import Callable, Sequence

from kvtiers.chunks import Key
from kvtiers.host.policies.lru import take_oldest


class ARCPolicy:
    """Balances recency against frequency by watching which evicted keys come back.

    One scan of keys that are never used again cannot push out keys that are. A key that cannot be
    evicted when its turn comes goes to the recent end of its list.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._t1: OrderedDict[Key, None] = OrderedDict()
        self._t2: OrderedDict[Key, None] = OrderedDict()
        self._b1: OrderedDict[Key, None] = OrderedDict()
        self._b2: OrderedDict[Key, None] = OrderedDict()
        self._p = 0.0

    def insert(self, keys: Sequence[Key]) -> None:
        """Take in ``keys``; one that is remembered moves ``p`` towards the list it fell from."""
        for key in keys:
            if key in self._b1:
                self._favour_recency()
                del self._b1[key]
                self._t2[key] = None
            elif key in self._b2:
                self._favour_frequency()
                del self._b2[key]
                self._t2[key] = None
            else:
                self._t1[key] = None
                self._trim_ghosts()

    def touch(self, keys: Sequence[Key]) -> None:
        """Move ``keys`` to the recent end of T2, in this order."""
        t1, t2 = self._t1, self._t2
        for key in keys:
            if key in t2:
                t2.move_to_end(key)
            elif key in t1:
                del t1[key]
                t2[key] = None

    def evict(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        """Remove ``count`` evictable keys: from T1 while it is larger than ``p``, else from T2.

        Where one list has nothing evictable the other gives.
        """
        surplus = min(count, max(0, len(self._t1) - int(self._p)))
        taken = self._demote(self._t1, self._b1, surplus, evictable)
        taken += self._demote(self._t2, self._b2, count - len(taken), evictable)
        if len(taken) < count:
            taken += self._demote(self._t1, self._b1, count - len(taken), evictable)
        return taken

    def remove(self, keys: Sequence[Key]) -> None:
        """Forget resident ``keys`` without remembering them as evicted."""
        for key in keys:
            self._t1.pop(key, None)
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
        t1, t2, b1, b2 = map(set, (self._t1, self._t2, self._b1, self._b2))
        c = self.capacity
        broken = {
            "a key is in two lists": len(t1 | t2 | b1 | b2) != sum(map(len, (t1, t2, b1, b2))),
            "|T1|+|T2| exceeds the capacity": len(t1) + len(t2) > c,
            "|T1|+|B1| exceeds the capacity": len(t1) + len(b1) > c,
            "all lists together exceed twice the capacity": len(t1 | t2 | b1 | b2) > 2 * c,
            "p is outside 0..capacity": not 0 <= self._p <= c,
        }
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
        if self._b1 and len(self._t1) + len(self._b1) > self.capacity:
            self._b1.popitem(last=False)
        remembered = len(self._b1) + len(self._b2)
        if self._b2 and len(self) + remembered > 2 * self.capacity:
            self._b2.popitem(last=False)

    @staticmethod
    def _demote(
        resident: OrderedDict[Key, None],
        ghosts: OrderedDict[Key, None],
        count: int,
        evictable: Callable[[Key], bool],
    ) -> list[Key]:
        taken = take_oldest(resident, count, evictable)
        ghosts.update(dict.fromkeys(taken))
        return taken
