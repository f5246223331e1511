"""Which tier has which chunks now, for a prompt that nobody asked an engine for.

It looks and does not touch: the scheduler's thread is not involved, and no lookup is counted. What
a tier does not know from memory its store is asked, on a thread of that tier's own, which is waited
for so long and no longer: a store that hangs costs one thread and an answer.
"""

import threading
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from kvtiers.chunks import Key, Lookup
from kvtiers.errors import KVTiersError
from kvtiers.events import PRIMARY, MissReason
from kvtiers.tiers.base import Peeks
from kvtiers.tiers.lanes import StartThread, start_daemon

ASK_S = 2.0
"""How long a store may take to say what it has."""

_THERE: "State" = ("there", None)
_UNKNOWN: "State" = ("unknown", None)

State = tuple[str, str | None]
"""``there``, ``missing`` or ``unknown``; and why, as far as that is known."""


class Labelled(Protocol):
    """A tier as the core has it."""

    @property
    def label(self) -> str:
        """What it is called."""

    @property
    def tier(self) -> object:
        """It itself; one that ``Peeks`` can be asked."""


class Residency:
    """Host memory and the tiers below it, as they can be looked at from any thread."""

    def __init__(
        self,
        resident: Container[Key],
        tiers: Sequence[Labelled],
        start_thread: StartThread = start_daemon,
    ) -> None:
        """``resident`` holds the keys that are whole in host memory."""
        self._resident = resident
        self._beside = [_Beside(tier.label, tier.tier, start_thread) for tier in tiers]

    def explain(self, keys: Sequence[Key]) -> list[dict[str, Any]]:
        """By tier, what each chunk is there: runs of equal states, in the order of ``keys``."""
        host: list[State] = [
            _THERE if key in self._resident else _missing(MissReason.ABSENT) for key in keys
        ]
        told: list[tuple[str, list[State], str | None]] = [(PRIMARY, host, None)]
        told += [(b.label, *b.states(keys)) for b in self._beside]
        return [
            {
                "tier": label,
                "there": sum(state == _THERE for state in states),
                "first_missing": next((i for i, s in enumerate(states) if s != _THERE), None),
                "runs": _runs(states),
                "problem": problem,
            }
            for label, states, problem in told
        ]

    def __repr__(self) -> str:
        return f"<Residency of host memory and {len(self._beside)} tiers>"


class _Beside:
    """One tier, asked beside its work; at most one question at a time."""

    def __init__(self, label: str, tier: object, start_thread: StartThread) -> None:
        self.label = label
        self._tier = tier if isinstance(tier, Peeks) else None
        self._start_thread = start_thread
        self._asking = threading.Lock()

    def states(self, keys: Sequence[Key]) -> tuple[list[State], str | None]:
        """Of each chunk, and what was wrong if something was."""
        tier = self._tier
        if tier is None:
            return [_UNKNOWN] * len(keys), "this kind of tier cannot be asked without a request"
        try:
            known = tier.peek(keys)
        except Exception as e:  # another thread changes it, or it is not ours
            return [_UNKNOWN] * len(keys), f"{type(e).__name__}: {e}"
        open_keys = [key for key, state in zip(keys, known, strict=True) if state is Lookup.RETRY]
        answers, problem = self._ask(tier, open_keys) if open_keys else ({}, None)
        return [_state(key, said, answers) for key, said in zip(keys, known, strict=True)], problem

    def _ask(self, tier: Peeks, keys: Sequence[Key]) -> tuple[dict[Key, bool], str | None]:
        if not self._asking.acquire(blocking=False):
            return {}, "its store is still busy with an earlier question"
        found: list[list[bool] | KVTiersError] = []
        ended = threading.Event()

        def work() -> None:
            try:
                found.append(tier.ask_store(keys))
            finally:
                self._asking.release()
                ended.set()

        self._start_thread(work, f"kvtiers-{self.label}-asked")
        if not ended.wait(ASK_S) or not found:
            return {}, f"its store did not answer within {ASK_S:g} s"
        answer = found[0]
        if isinstance(answer, KVTiersError):
            return {}, str(answer)
        return dict(zip(keys, answer, strict=True)), None

    def __repr__(self) -> str:
        return f"<_Beside {self.label}>"


def _state(key: Key, said: Lookup | MissReason, answers: dict[Key, bool]) -> State:
    if isinstance(said, MissReason):
        return _missing(said)
    if said is Lookup.HIT:
        return _THERE
    there = answers.get(key)
    if there is None:
        return _UNKNOWN
    return _THERE if there else _missing(MissReason.ABSENT)


def _missing(why: MissReason) -> State:
    return "missing", why.value


def _runs(states: Sequence[State]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    last: State | None = None
    for i, state in enumerate(states):
        if state == last:
            runs[-1]["count"] += 1
        else:
            runs.append({"first": i, "count": 1, "state": state[0], "reason": state[1]})
            last = state
    return runs


Explain = Callable[[Sequence[Key]], list[dict[str, Any]]]
