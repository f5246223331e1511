"""What can go wrong between a client and an object store, as values."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class What(Enum):
    """What a fault does to one request."""

    STATUS = "status"
    """Answers with ``status``, and ``code`` in the body; with ``retry_after_s`` if that is said."""
    SILENT = "silent"
    """The connection stays open, and no answer comes."""
    RESET = "reset"
    """Half of the body, then the connection is reset; of a PUT, what was sent is lost."""
    TRUNCATED = "truncated"
    """Half of the body under the length of all of it, then the connection ends in order."""
    SHORT = "short"
    """Half of the body, and the length of that half: a well-formed answer that lacks the rest."""
    SLOW = "slow"
    """The body comes a byte at a time, every ``pause_s``."""
    LATE = "late"
    """It is done, and the answer is ``status``: the client does not know that it was done."""
    STALE = "stale"
    """A listing as it was ``changes`` changes ago."""
    SKEW = "skew"
    """The clock of the server is wrong by ``seconds``, in dates of objects and of the answer."""
    ETAG = "etag"
    """The entity tag is that of something else."""
    RANGE = "range"
    """``Content-Range`` says that the body lies a page further on."""
    WHOLE = "whole"
    """A range was asked for; the whole object comes, as 200."""
    OTHER = "other"
    """The body is that of another object, of the same length if there is one."""
    REDIRECT = "redirect"
    """To the same address, for ever."""
    GARBAGE = "garbage"
    """A body that is neither XML nor an object, of the length that was promised."""


@dataclass(frozen=True, slots=True)
class S3Fault:
    """One way in which a server fails."""

    what: What
    method: str | None = None
    """``PUT``, ``GET``, ``HEAD``, ``DELETE`` or ``LIST``; None: any."""
    nth: int | None = None
    """Strikes at this one of the requests that it concerns, counted from 1; None: at each."""
    first: int | None = None
    """Strikes at so many of them, and then no more."""
    keys: Callable[[str], bool] | None = None
    """Of which objects, by name; None: of all."""
    status: int = 503
    code: str = "SlowDown"
    retry_after_s: int | None = None
    pause_s: float = 0.05
    changes: int = 1
    seconds: float = 0.0

    def concerns(self, method: str, key: str) -> bool:
        """Whether it may strike this request."""
        return self.method in (None, method) and (self.keys is None or self.keys(key))

    def strikes(self, count: int) -> bool:
        """Whether it strikes at the ``count``-th request that it concerns."""
        return self.nth in (None, count) and (self.first is None or count <= self.first)
