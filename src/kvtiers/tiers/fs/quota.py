"""Who leaves when the folder is full: bytes by file, least recently used first. Pure.

Names are paths relative to the root. Not synchronised: its owner holds a lock.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable


class Ledger:
    """What lies under the root, and what is spoken for.

    ``used`` counts every byte that is on disk or promised to a write. A file in use is never
    chosen to leave.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.used = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._promised: dict[str, int] = {}
        self._in_use: Counter[str] = Counter()
        self._other = 0

    def load(self, files: Iterable[tuple[float, str, int]], other_bytes: int) -> None:
        """Take in what a scan found: (last use, name, bytes) and bytes that never leave."""
        for _, name, size in sorted(files):
            self._sizes[name] = size
        self._other = other_bytes
        self.used = other_bytes + sum(self._sizes.values())

    def holds(self, name: str) -> bool:
        """Whether the file is there, as far as is known."""
        return name in self._sizes

    def begin(self, name: str) -> None:
        """``name`` is being read or written."""
        self._in_use[name] += 1

    def end(self, name: str) -> None:
        """It no longer is; take back one ``begin``."""
        self._in_use[name] -= 1
        if not self._in_use[name]:
            del self._in_use[name]

    def evict(self, size: int, keep: Container[str] = ()) -> list[tuple[str, int]] | None:
        """Forget the oldest files, so that ``size`` bytes fit, and return them with their sizes.

        None, and nothing is forgotten, if there are not enough files to evict besides ``keep``
        and those in use.
        """
        lacking = self.used + size - self.capacity
        victims = []
        for name, bytes_ in self._sizes.items():
            if lacking <= 0:
                break
            if name not in self._in_use and name not in keep:
                victims.append((name, bytes_))
                lacking -= bytes_
        if lacking > 0:
            return None
        for name, _ in victims:
            self.gone(name)
        return victims

    def promise(self, token: str, size: int) -> None:
        """A write of ``size`` bytes begins under ``token``."""
        self._promised[token] = size
        self.used += size

    def keep_promise(self, token: str, name: str) -> None:
        """That write is on disk as ``name``, the most recently used; it may have replaced one."""
        self.used -= self._sizes.pop(name, 0)
        self._sizes[name] = self._promised.pop(token)

    def break_promise(self, token: str) -> None:
        """That write left nothing on disk. Unknown tokens are ignored."""
        self.used -= self._promised.pop(token, 0)

    def touch(self, name: str) -> None:
        """``name`` was used now. Unknown names are ignored."""
        if name in self._sizes:
            self._sizes.move_to_end(name)

    def gone(self, name: str) -> None:
        """``name`` is not on disk any more. Unknown names are ignored."""
        self.used -= self._sizes.pop(name, 0)

    def put_last(self, name: str, size: int) -> None:
        """``name`` is on disk with ``size`` bytes and is the next to leave."""
        self.gone(name)
        self._sizes[name] = size
        self._sizes.move_to_end(name, last=False)
        self.used += size

    def __len__(self) -> int:
        return len(self._sizes)

    def check(self) -> None:
        """Raise AssertionError if the sums are wrong."""
        known = sum(self._sizes.values()) + sum(self._promised.values()) + self._other
        assert self.used == known, f"used {self.used} but {known} accounted for"
        assert all(n > 0 for n in self._in_use.values()), "a file is in use less than zero times"

    def __repr__(self) -> str:
        return f"<Ledger {len(self._sizes)} files, {self.used}/{self.capacity} bytes>"
