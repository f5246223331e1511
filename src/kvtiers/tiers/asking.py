"""Lookups whose answer only the store knows: gathered by step, asked in batches, given up in time.

Pure and owned by one thread; ``now`` (monotonic seconds) is an argument.
"""

from collections import deque
from collections.abc import Iterable

from kvtiers.chunks import Key, Lookup
from kvtiers.tiers.work import Question

_BATCH_KEYS = 256
"""Keys per question: a long prefix on a slow mount is asked by several lanes."""


class Asking:
    """Keys that wait for an answer, at most ``deadline_s`` from their first lookup."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._waiting: dict[Key, float] = {}  # -> when it becomes a MISS
        self._gathered: list[Key] = []
        self._sent: deque[Question] = deque()

    def lookup(self, key: Key, now: float) -> Lookup:
        """RETRY while there is time for an answer, then MISS. A new key is gathered."""
        deadline = self._waiting.get(key)
        if deadline is None:
            self._waiting[key] = now + self._deadline_s
            self._gathered.append(key)
            return Lookup.RETRY
        return Lookup.RETRY if now < deadline else Lookup.MISS

    def gather(self) -> list[tuple[list[Key], float]]:
        """Batches of what was gathered since the last call, each with its deadline.

        That of its youngest key: one that waits for longer is a MISS before, by ``lookup``.
        """
        keys, self._gathered = self._gathered, []
        batches = [keys[i : i + _BATCH_KEYS] for i in range(0, len(keys), _BATCH_KEYS)]
        return [(batch, self._waiting[batch[-1]]) for batch in batches]

    def sent(self, question: Question) -> None:
        """Remember a question that is on its way."""
        self._sent.append(question)

    def answered(self, question: Question) -> bool:
        """An answer came: its keys wait no more. False if it came too late."""
        if question not in self._sent:
            return False
        self._sent.remove(question)
        self.forget(question.keys)
        return True

    def overdue(self, now: float) -> list[Question]:
        """Questions that were not answered in time: their keys wait no more."""
        late = []
        while self._sent and now >= self._sent[0].deadline:
            late.append(self._sent.popleft())
            self.forget(late[-1].keys)
        return late

    def forget(self, keys: Iterable[Key]) -> None:
        """These wait no more."""
        for key in keys:
            self._waiting.pop(key, None)

    def clear(self) -> None:
        """Nothing is asked any more."""
        self._waiting.clear()
        self._gathered.clear()
        self._sent.clear()

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        """Raise AssertionError if a key waits for a question that nobody asked."""
        asked = {key for question in self._sent for key in question.keys} | set(self._gathered)
        assert set(self._waiting) == asked, "waiting lookups and open questions differ"

    def __repr__(self) -> str:
        return f"<Asking {len(self._waiting)} keys, {len(self._sent)} questions out>"
