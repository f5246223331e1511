"""What a tier is known to hold, so that a lookup is dictionary work.

Pure and owned by one thread; ``now`` (monotonic seconds) is an argument.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvtiers.chunks import Key
from kvtiers.errors import KVTiersError
from kvtiers.events import MissReason

_LEAST_DENIAL_S = 0.5
"""A "no" that is over before the next step asks would be asked for again and again."""

MAX_LOSSES = 65_536
"""Losses that are remembered. Stale news of an older one is believed until a load fails."""


class Denials:
    """What is said not to be there for a while, whatever is known of it."""

    def __init__(self, ttl_s: float, max_chunks: int) -> None:
        self._ttl_s = max(_LEAST_DENIAL_S, ttl_s)
        self._max_chunks = max_chunks
        self._until: OrderedDict[Key, tuple[float, MissReason]] = OrderedDict()

    def covers(self, key: Key, now: float) -> bool:
        """Whether ``key`` is denied."""
        denial = self._until.get(key)
        return denial is not None and now < denial[0]

    def why(self, key: Key, now: float) -> MissReason | None:
        """Why ``key`` is denied; None if it is not."""
        denial = self._until.get(key)
        return denial[1] if denial is not None and now < denial[0] else None

    def add(self, keys: Iterable[Key], now: float, why: MissReason) -> None:
        """Deny these until the time to live has passed, or until they are lifted."""
        denial = (now + self._ttl_s, why)
        for key in keys:
            self._until[key] = denial
            self._until.move_to_end(key)

    def lift(self, key: Key) -> None:
        """Deny this no more."""
        self._until.pop(key, None)

    def expire(self, now: float) -> None:
        """Drop denials that are over; also the oldest ones above the bound."""
        denied = self._until
        while denied:
            key, (until, _) = next(iter(denied.items()))
            if until > now and len(denied) <= self._max_chunks:
                return
            del denied[key]

    def __len__(self) -> int:
        return len(self._until)

    def check(self) -> None:
        """Raise AssertionError if the order of expiry is broken."""
        times = [until for until, _ in self._until.values()]
        assert times == sorted(times), "denials are not in order of expiry"


class Losses:
    """Chunks that were lost lately, and when: the ``moment`` grows with every loss."""

    def __init__(self) -> None:
        self.moment = 0
        self._lost: OrderedDict[Key, int] = OrderedDict()

    def add(self, key: Key) -> None:
        """It was lost just now."""
        self.moment += 1
        self._lost[key] = self.moment
        self._lost.move_to_end(key)
        if len(self._lost) > MAX_LOSSES:
            self._lost.popitem(last=False)

    def after(self, key: Key, moment: int) -> bool:
        """Whether ``key`` was lost after that moment, as far as is remembered."""
        return self._lost.get(key, 0) > moment

    def forget(self, key: Key) -> None:
        """It is there again, beyond doubt."""
        self._lost.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._lost

    def __len__(self) -> int:
        return len(self._lost)


class InstantPresence:
    """Presence in a store that knows by itself what it holds, at once: nothing is kept twice.

    As :class:`Presence`. ``ask`` gives an answer for each key, or an error: then ``complain`` is
    told of it, and nothing is there.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Key]], list[bool] | KVTiersError],
        complain: Callable[[KVTiersError], None],
        denial_ttl_s: float,
    ) -> None:
        self._ask = ask
        self._complain = complain
        self._denials = Denials(denial_ttl_s, MAX_LOSSES)
        self._losses = Losses()
        self.complete = True
        self.resident_bytes: int | None = None
        """The store knows by itself."""

    @property
    def moment(self) -> int:
        """Grows with every loss."""
        return self._losses.moment

    def find(self, key: Key, now: float) -> bool | None:
        """True: there. False: not there, or not usable now."""
        return self.holds(key) and not self._denials.covers(key, now)

    def holds(self, key: Key) -> bool:
        """Whether the chunk is stored, usable or not."""
        return not self.lacks((key,))

    def lacks(self, keys: Sequence[Key]) -> Sequence[int]:
        """The indices in ``keys`` of those that are not stored."""
        answer = self._ask(keys)
        if isinstance(answer, KVTiersError):
            self._complain(answer)
            return range(len(keys))
        return [i for i, there in enumerate(answer) if not there]

    def add(self, keys: Iterable[Key], since: int | None = None) -> list[Key]:
        """These are there: they are not denied any more. None of them is news."""
        for key in keys:
            self._denials.lift(key)
        return []

    def scanned(self, keys: Sequence[Key]) -> list[Key]:
        """The start-up scan found these. Returns those that are still there."""
        return self._those(keys, there=True)

    def announce(self, keys: Iterable[Key], since: int | None = None) -> list[Key]:
        """These are there by our doing. Returns those that still are.

        What left between its write and this was, or will be, said to be gone: that is the end.
        """
        new = self._those(keys, there=True)
        self.add(new)
        for key in new:
            self._losses.forget(key)
        return new

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """These are gone. Returns those of which that was not said before.

        What was written again meanwhile is there: news of its loss may come later than of that.
        """
        news = [key for key in self._those(keys, there=False) if key not in self._losses]
        for key in news:
            self._losses.add(key)
        return news

    def _those(self, keys: Iterable[Key], *, there: bool) -> list[Key]:
        """Those of which the store says now that they are there, or that they are not."""
        asked = list(keys)
        lacking = set(self.lacks(asked))
        return [key for i, key in enumerate(asked) if (i not in lacking) is there]

    def deny(self, keys: Iterable[Key], now: float, why: MissReason = MissReason.ABSENT) -> None:
        """Do not find these until the time to live has passed, or until they are added."""
        self._denials.add(keys, now, why)

    def why_denied(self, key: Key, now: float) -> MissReason | None:
        """Why ``key`` is not found although it may be there; None if it is not denied."""
        return self._denials.why(key, now)

    def touch(self, keys: Iterable[Key]) -> None:
        """The store is told by itself."""

    def expire(self, now: float) -> None:
        """Drop denials that are over."""
        self._denials.expire(now)

    def __len__(self) -> int:
        return 0

    def check(self) -> None:
        """Raise AssertionError if a bound or the order of denials is broken."""
        self._denials.check()
        assert len(self._losses) <= MAX_LOSSES, "more losses than the bound"

    def __repr__(self) -> str:
        return f"<InstantPresence {len(self._denials)} denied>"


class Presence:
    """Known chunks, bounded in number; and denials, which say "not now" until they expire.

    A denial is stronger than knowledge: a chunk that is there but failed to load is denied for a
    while. What somebody saw before a chunk was lost proves nothing: news carry the ``moment`` at
    which their bearer began to look. When the table overflows, the longest unused entries are
    forgotten, and from then on absence from the table proves nothing.
    """

    def __init__(
        self,
        max_chunks: int,
        denial_ttl_s: float,
        total_bytes: Callable[[Sequence[Key]], int] = lambda keys: 0,
    ) -> None:
        """``total_bytes``: of chunks together."""
        self._max_chunks = max_chunks
        self._total_bytes = total_bytes
        self._bytes = 0
        """Of those that are held."""
        self._held: OrderedDict[Key, bool] = OrderedDict()  # -> whether announced
        self._denials = Denials(denial_ttl_s, max_chunks)
        self._losses = Losses()
        self._overflowed = False
        self.complete = False
        """Set by the owner when everything that was stored before is in the table."""

    @property
    def moment(self) -> int:
        """Grows with every loss."""
        return self._losses.moment

    def find(self, key: Key, now: float) -> bool | None:
        """True: there. False: not there, or not usable now. None: has to be asked."""
        if self._denials.covers(key, now):
            return False
        if key in self._held:
            return True
        return False if self.complete and not self._overflowed else None

    def holds(self, key: Key) -> bool:
        """Whether the chunk is known to be stored, usable or not."""
        return key in self._held

    def lacks(self, keys: Sequence[Key]) -> Sequence[int]:
        """The indices in ``keys`` of those that are not known to be stored."""
        held = self._held
        return [i for i, key in enumerate(keys) if key not in held]

    def add(self, keys: Iterable[Key], since: int | None = None) -> list[Key]:
        """These are there, by what was seen after the moment ``since``; None: just now.

        Returns those that were not known.
        """
        if since is not None and self._losses:
            keys = [key for key in keys if not self._losses.after(key, since)]
        new = []
        for key in keys:
            self._denials.lift(key)
            if key not in self._held:
                self._held[key] = False
                new.append(key)
        self._bytes += self._total_bytes(new)
        if len(self._held) > self._max_chunks:
            self._overflow()
        return new

    def _overflow(self) -> None:
        surplus = len(self._held) - self._max_chunks
        forgotten = [self._held.popitem(last=False)[0] for _ in range(surplus)]
        self._bytes -= self._total_bytes(forgotten)
        self._overflowed = True

    @property
    def resident_bytes(self) -> int | None:
        """Of the chunks that are known to be there; None once some were forgotten."""
        return None if self._overflowed else self._bytes

    def scanned(self, keys: Sequence[Key]) -> list[Key]:
        """The start-up scan found these, at any time since the start. Returns those not known."""
        return self.add(keys, since=0)

    def announce(self, keys: Iterable[Key], since: int | None = None) -> list[Key]:
        """These are there by our doing. Returns those that were not announced before.

        One that a question or the scan found first, between its write and this, is announced too.
        One that was lost after the moment ``since`` may have left after it was written: of that
        nothing is known until somebody asks, or writes it again.
        """
        if since is not None and self._losses:
            keys = [key for key in keys if not self._losses.after(key, since)]
        new = [key for key in keys if not self._held.get(key, False)]
        announced = dict.fromkeys(new, True)
        self._bytes += self._total_bytes([key for key in announced if key not in self._held])
        self._held.update(announced)
        self.add(new)
        return new

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """These are gone. Returns those that were known, or that may have been and were forgotten.

        So of what was announced nothing goes unsaid; of the latter it may be said more than once.
        """
        left, forgotten = [], []
        for key in keys:
            self._losses.add(key)
            if self._held.pop(key, None) is not None:
                left.append(key)
            elif self._overflowed:
                forgotten.append(key)
        self._bytes -= self._total_bytes(left)
        return left + forgotten

    def deny(self, keys: Iterable[Key], now: float, why: MissReason = MissReason.ABSENT) -> None:
        """Do not find these until the time to live has passed, or until they are added."""
        self._denials.add(keys, now, why)

    def why_denied(self, key: Key, now: float) -> MissReason | None:
        """Why ``key`` is not found although it may be there; None if it is not denied."""
        return self._denials.why(key, now)

    @property
    def held(self) -> list[Key]:
        """All that is known to be stored. On any thread: it is copied in one go."""
        return [*dict.keys(self._held)]  # in its own order an OrderedDict takes 30 times as long

    def still_held(self, keys: Iterable[Key], since: int) -> list[Key]:
        """Those of them that are held, and were not lost and stored anew after that moment."""
        return [k for k in keys if k in self._held and not self._losses.after(k, since)]

    def touch(self, keys: Iterable[Key]) -> None:
        """Forget these last. Unknown keys are ignored."""
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)

    def expire(self, now: float) -> None:
        """Drop denials that are over; also the oldest ones above the bound."""
        self._denials.expire(now)

    def __len__(self) -> int:
        return len(self._held)

    def check(self) -> None:
        """Raise AssertionError if a bound or the order of denials is broken."""
        assert len(self._held) <= self._max_chunks, "more chunks than the bound"
        assert self._bytes == self._total_bytes(list(self._held)), "bytes do not add up"
        assert len(self._losses) <= MAX_LOSSES, "more losses than the bound"
        self._denials.check()

    def __repr__(self) -> str:
        known = "complete" if self.complete and not self._overflowed else "partial"
        return f"<Presence {len(self._held)} held, {len(self._denials)} denied, {known}>"
