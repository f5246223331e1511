"""Which chunks were used, until a call takes the news to the servers."""

from collections import deque
from collections.abc import Sequence

from kvtiers.chunks import Key

_MAX_NOTED = 65536
_MAX_TOLD = 512
"""With one call: what is asked for comes first."""


class Uses:
    """Noted on any thread, without a lock that a lane could hold; above the bound, the oldest
    are forgotten.
    """

    def __init__(self) -> None:
        self._noted: deque[Key] = deque(maxlen=_MAX_NOTED)

    def note(self, keys: Sequence[Key]) -> None:
        """These were used. Never blocks."""
        self._noted.extend(keys)

    def take(self) -> list[Key]:
        """Some that nobody was told of yet, each once."""
        taken: dict[Key, None] = {}
        while self._noted and len(taken) < _MAX_TOLD:
            try:
                taken[self._noted.popleft()] = None
            except IndexError:  # another lane took it
                break
        return list(taken)

    def check(self) -> None:
        """Raise AssertionError if more are noted than the bound."""
        assert len(self._noted) <= _MAX_NOTED, "more uses are noted than the bound"

    def __repr__(self) -> str:
        return f"<Uses {len(self._noted)} noted>"
