"""Workers, how busy they are, and which one is next. Pure: ``now`` is an argument."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvtiers.proxy.affinity import Affinity, Prompt
from kvtiers.proxy.options import Address
from kvtiers.tiers.breaker import Breaker, State

_FAILURES = 3
_COOLDOWN_S, _MAX_COOLDOWN_S = 2.0, 10.0


class Holder(NamedTuple):
    """What a pod holds of a prompt."""

    pod: str
    tokens: int
    pullable: int
    """Tokens that are in one tier other than the accelerator: what a peer can be given."""


class Worker:
    """One engine's server."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        """What logs and metrics call it; clients learn no addresses."""
        self.address = address
        self.breaker = Breaker(_FAILURES, _COOLDOWN_S, _MAX_COOLDOWN_S)
        self.pod = address.pod or address.url.partition("://")[2]
        """What the index calls it."""
        self.in_flight = 0
        self.served = 0
        """How many requests it was given."""

    @property
    def usable(self) -> bool:
        """Whether it gets requests. One that failed gets none until a look at its health worked."""
        return self.breaker.state is State.CLOSED

    def begin(self) -> None:
        """It is given a request."""
        self.in_flight += 1
        self.served += 1

    def end(self) -> None:
        """That request is over."""
        self.in_flight -= 1

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert 0 <= self.in_flight <= self.served, f"{self.name} runs what it was not given"
        self.breaker.check()

    def __repr__(self) -> str:
        return (
            f"<Worker {self.name} {self.address.url}: {self.in_flight} in flight, {self.breaker}>"
        )


class Pool:
    """Workers that are alike."""

    def __init__(self, name: str, addresses: Sequence[Address], slack: int) -> None:
        self.workers = [Worker(f"{name}-{n}", address) for n, address in enumerate(addresses)]
        self.affinity: Affinity[Worker] = Affinity()
        self._slack = slack

    def choose(
        self, prompt: Prompt, tried: Collection[Worker] = (), holders: Sequence[Holder] = ()
    ) -> Worker | None:
        """Who holds most of this prompt, or served it last, unless that one is much busier than the
        idlest.
        """
        usable = [w for w in self.workers if w.usable and w not in tried]
        if not usable:
            return None
        idlest = min(usable, key=lambda w: (w.in_flight, w.served))
        last = self._first(holders) or self.affinity.source_for(prompt)
        near = last in usable and last.in_flight <= idlest.in_flight + self._slack
        return last if near else idlest

    def source_for(self, prompt: Prompt, holders: Sequence[Holder] = ()) -> Worker | None:
        """Who can be asked for the longest prefix: by the index, or as far as can be told."""
        pullable = sorted((h for h in holders if h.pullable), key=lambda h: -h.pullable)
        source = self._first(pullable) or self.affinity.source_for(prompt)
        return source if source is not None and source.usable else None

    def _first(self, holders: Sequence[Holder]) -> Worker | None:
        """The first of them that is one of these workers, and usable."""
        names = {worker.pod: worker for worker in self.workers if worker.usable}
        return next((names[h.pod] for h in holders if h.pod in names), None)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        self.affinity.check()
        for worker in self.workers:
            worker.check()

    def __repr__(self) -> str:
        usable = sum(w.usable for w in self.workers)
        return f"<Pool {usable}/{len(self.workers)} usable, {self.affinity}>"
