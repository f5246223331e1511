"""What one peer wants for one of its requests: chunks, and who waits for each. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from kvtiers.chunks import Key, Lookup
from kvtiers.tiers.p2p.parent import Pin
from kvtiers.tiers.p2p.protocol import Code, Role, Verdict


class Stage(Enum):
    """Where a wanted chunk is."""

    UNKNOWN = "unknown"
    """Being asked for."""
    COMING = "coming"
    """On its way into host memory."""
    PARKED = "parked"
    """Not computed yet."""


@dataclass(slots=True, eq=False)
class Held:
    """Chunks that were pinned together, and which of them are still needed."""

    pin: Pin
    left: dict[Key, int]
    """Their places in the pin."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A transfer: which of its chunks still wait, and which are being read."""

    places: dict[Key, int]
    """Of chunks that wait."""
    deadline: float
    reading: dict[int, Key] = field(default_factory=dict)
    failed: dict[int, Code] = field(default_factory=dict)
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """What comes of it."""

    answer: Callable[[int, dict[int, Verdict], bool], None]
    """Question, verdicts by place, whether they are its last."""
    push: Callable[[int, list[tuple[int, memoryview]]], None]
    """Transfer, chunks by place."""
    done: Callable[[int, dict[int, Code]], None]
    """Transfer, chunks that will not be pushed."""
    release: Callable[[Pin], None]


class Wants:
    """One peer's, for one request."""

    def __init__(self, role: Role, outputs: Outputs) -> None:
        self.role = role
        self.stages: dict[Key, Stage] = {}
        """Of chunks that somebody waits for."""
        self.due = 0.0
        """When it is to be looked after, unless a chunk is waited for: then always."""
        self._until = 0.0
        """How long pinned chunks that nobody fetched are kept."""
        self._outputs = outputs
        self._questions: dict[int, dict[Key, int]] = {}
        """Places of chunks that are not answered."""
        self._question_deadlines: dict[int, float] = {}
        self._transfers: dict[int, Outgoing] = {}
        self._held: dict[Key, Held] = {}
        self._reading: Counter[Key] = Counter()
        """How many transfers read a chunk that is held."""

    # -- what is wanted --------------------------------------------------------------------------

    def keep(self, until: float) -> None:
        """Keep what is pinned until then, though nobody fetches it."""
        self._until = until
        self.due = 0.0

    def ask(self, question: int, keys: Iterable[Key], deadline: float) -> None:
        """Verdicts on these are wanted by then."""
        places = {key: place for place, key in enumerate(keys)}
        self._questions[question] = places
        self._question_deadlines[question] = deadline
        known = {}
        for key, place in places.items():
            if key in self._held:
                known[place] = Verdict.PRESENT
            elif self.stages.setdefault(key, Stage.UNKNOWN) is not Stage.UNKNOWN:
                known[place] = Verdict.COMING
        self._answer(question, known)

    def fetch(self, transfer: int, keys: Iterable[Key], deadline: float) -> None:
        """These are to be brought by then."""
        places = {key: place for place, key in enumerate(keys)}
        self._transfers[transfer] = Outgoing(places, deadline)
        for key in places:
            if key not in self._held:
                self.stages.setdefault(key, Stage.UNKNOWN)
        self._push_held(transfer)

    def stop(self, transfer: int) -> None:
        """Nothing more of it is to be brought."""
        self.due = 0.0
        outgoing = self._transfers.get(transfer)
        if outgoing is not None:
            outgoing.places.clear()
            outgoing.stopped = True
            self._end_if_done(transfer)
            self._forget_unwanted()

    def sent(self, transfer: int, places: Iterable[int]) -> None:
        """These chunks of it are read no more."""
        self.due = 0.0
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            return
        keys = [outgoing.reading.pop(place) for place in places if place in outgoing.reading]
        self._reading.subtract(keys)
        self._let_go(keys)
        self._end_if_done(transfer)

    # -- what is found out -----------------------------------------------------------------------

    def told(self, verdicts: Mapping[Key, Lookup], *, may_come: bool) -> list[Key]:
        """What the engine says of chunks; those that are in host memory, to be pinned.

        ``may_come``: what is absent may still be computed.
        """
        if_absent = Stage.PARKED if may_come else None
        stages = {Lookup.HIT_PENDING: Stage.COMING, Lookup.MISS: if_absent}
        coming = {
            key: stage
            for key, verdict in verdicts.items()
            if (stage := stages.get(verdict)) is not None
        }
        self.stages.update(coming)
        self._answer_all(coming.keys(), Verdict.COMING)
        if not may_come:
            self.absent([key for key, verdict in verdicts.items() if verdict is Lookup.MISS])
        return [key for key, verdict in verdicts.items() if verdict is Lookup.HIT]

    def pinned(self, pin: Pin) -> None:
        """These are kept; whoever waits for them is served."""
        held = Held(pin, {key: place for place, key in enumerate(pin.keys)})
        for key in pin.keys:
            self.stages.pop(key, None)
            self._held[key] = held
        self._answer_all(held.left.keys(), Verdict.PRESENT)
        for transfer in list(self._transfers):
            self._push_held(transfer)

    def absent(self, keys: Iterable[Key], code: Code = Code.ABSENT) -> None:
        """These cannot be had."""
        gone = set(keys)
        for key in gone:
            self.stages.pop(key, None)
        self._answer_all(gone, Verdict.ABSENT)
        for transfer, outgoing in list(self._transfers.items()):
            for key in outgoing.places.keys() & gone:
                outgoing.failed[outgoing.places.pop(key)] = code
            self._end_if_done(transfer)

    def no_room(self, keys: Iterable[Key]) -> None:
        """These are there and cannot be kept: no promise is made of them; who fetches may wait."""
        self._answer_all(set(keys), Verdict.ABSENT)
        self._forget_unwanted()

    def expire(self, now: float) -> None:
        """Give up what was waited for too long."""
        for question, deadline in list(self._question_deadlines.items()):
            if now >= deadline:
                places = self._questions[question]
                self._answer(question, dict.fromkeys(places.values(), Verdict.ABSENT))
        for transfer, outgoing in list(self._transfers.items()):
            if now >= outgoing.deadline and outgoing.places:
                late = dict.fromkeys(outgoing.places.values(), Code.DEADLINE)
                outgoing.failed.update(late)
                outgoing.places.clear()
                self._end_if_done(transfer)
        if now >= self._until and not self._transfers:
            self._let_go(list(self._held))
        self._forget_unwanted()

    def end(self) -> None:
        """Nothing more is wanted, nothing is read any more: let go of everything."""
        for held in {id(h): h for h in self._held.values()}.values():
            self._outputs.release(held.pin)
        self._held.clear()
        self._reading.clear()
        self._questions.clear()
        self._question_deadlines.clear()
        self._transfers.clear()
        self.stages.clear()

    @property
    def over(self) -> bool:
        """Whether nothing is wanted or kept."""
        return not (self._questions or self._transfers or self._held or self.stages)

    @property
    def transfers(self) -> int:
        """How many are not done."""
        return len(self._transfers)

    def next(self) -> float:
        """When something expires."""
        times = [*self._question_deadlines.values()]
        times += [o.deadline for o in self._transfers.values() if o.places]
        if self._held and not self._transfers:
            times.append(self._until)
        return min(times, default=float("inf"))

    # -- inside ----------------------------------------------------------------------------------

    def _answer_all(self, keys: Set[Key], verdict: Verdict) -> None:
        for question, places in list(self._questions.items()):
            there = places.keys() & keys
            if there:
                self._answer(question, {places[key]: verdict for key in there})

    def _answer(self, question: int, verdicts: dict[int, Verdict]) -> None:
        places = self._questions[question]
        for key in [key for key, place in places.items() if place in verdicts]:
            del places[key]
        last = not places
        if last:
            del self._questions[question]
            del self._question_deadlines[question]
        if verdicts or last:
            self._outputs.answer(question, verdicts, last)

    def _push_held(self, transfer: int) -> None:
        outgoing = self._transfers[transfer]
        chunks: list[tuple[int, memoryview]] = []
        for key in outgoing.places.keys() & self._held.keys():
            held = self._held[key]
            place = outgoing.places.pop(key)
            outgoing.reading[place] = key
            self._reading[key] += 1
            chunks.append((place, held.pin.views[held.left[key]]))
        if chunks:
            self._outputs.push(transfer, sorted(chunks, key=lambda chunk: chunk[0]))
        self._end_if_done(transfer)

    def _end_if_done(self, transfer: int) -> None:
        outgoing = self._transfers.get(transfer)
        if outgoing is not None and not outgoing.places and not outgoing.reading:
            del self._transfers[transfer]
            self._outputs.done(transfer, outgoing.failed)

    def _let_go(self, keys: Iterable[Key]) -> None:
        """These are needed no more, unless somebody reads them or waits for them."""
        for key in keys:
            held = self._held.get(key)
            if held is None or self._reading[key]:
                continue
            del self._held[key], held.left[key], self._reading[key]
            if not held.left:
                self._outputs.release(held.pin)

    def _forget_unwanted(self) -> None:
        """Stages of chunks that nobody waits for any more."""
        if not self.stages:
            return
        wanted = {key for places in self._questions.values() for key in places}
        for outgoing in self._transfers.values():
            wanted |= outgoing.places.keys()
        if self.role is Role.SOURCE:
            # What was said to be coming is pinned when it is there, for the fetch that follows.
            wanted |= {key for key, stage in self.stages.items() if stage is Stage.COMING}
        for key in self.stages.keys() - wanted:
            del self.stages[key]

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self.stages.keys().isdisjoint(self._held), "a chunk is pinned and waited for"
        assert self._questions.keys() == self._question_deadlines.keys(), "a question for ever"
        reading: Counter[Key] = Counter()
        for outgoing in self._transfers.values():
            assert outgoing.places or outgoing.reading, "a transfer is done and not said to be"
            reading.update(outgoing.reading.values())
        assert reading.keys() <= self._held.keys(), "read, and not pinned"
        assert reading == +self._reading, "readers do not add up"
        for key, held in self._held.items():
            assert key in held.left, "a chunk is kept by nobody"

    def __repr__(self) -> str:
        return (
            f"<Wants {len(self.stages)} awaited, {len(self._held)} kept, "
            f"{len(self._questions)} questions, {len(self._transfers)} transfers>"
        )
