"""Which workers a request goes to, and what roles they have for it. Pure."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvtiers.proxy import bodies
from kvtiers.proxy.asked import Asked
from kvtiers.proxy.options import ProxyOptions
from kvtiers.proxy.workers import Pool, Worker


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one worker."""

    worker: Worker
    path: str
    body: bytes | None
    """None: a GET."""
    name: str = ""
    """Of a prefill: under which its chunks are pulled."""
    asks: Worker | None = None
    """Whom the worker is told to ask for the prefix."""


class Router:
    """Two pools, for prefill and decode, or one that does both."""

    def __init__(self, options: ProxyOptions, new_name: Callable[[], str]) -> None:
        """``new_name`` makes a ``kv_request_id`` that was never used."""
        self._new_name = new_name
        self.prefill_pool: Pool | None = None
        if options.prefill:
            self.prefill_pool = Pool("prefill", options.prefill, options.slack)
            self.pool = Pool("decode", options.decode, options.slack)
        else:
            self.pool = Pool("worker", options.workers, options.slack)

    @property
    def pools(self) -> list[Pool]:
        """All there are."""
        return [self.pool] if self.prefill_pool is None else [self.prefill_pool, self.pool]

    @property
    def workers(self) -> list[Worker]:
        """Of all pools."""
        return [worker for pool in self.pools for worker in pool.workers]

    def prefill(self, asked: Asked) -> Call | None:
        """Who computes the prompt; None: who answers does."""
        pool = self.prefill_pool
        wanted = pool is not None and asked.roles
        worker = pool.choose(asked.prompt, (), asked.holders) if pool and wanted else None
        if pool is None or worker is None or asked.body is None:
            return None
        name = self._new_name()
        source = _other(pool.source_for(asked.prompt, asked.holders), worker)
        roles = bodies.produces(name)
        if source is not None:
            roles |= bodies.asks(self._new_name(), source.address)
        return Call(worker, asked.path, bodies.for_prefill(asked.body, roles), name, source)

    def serve(
        self, asked: Asked, prefill: Call | None, tried: Collection[Worker] = ()
    ) -> Call | None:
        """Who answers, with the prompt as ``prefill`` computes it; None: nobody is left."""
        worker = self.pool.choose(asked.prompt, tried, asked.holders)
        if worker is None:
            return None
        source: Worker | None = None
        roles: bodies.Roles = {}
        if prefill is not None:
            roles = bodies.pulls(prefill.name, prefill.worker.address)
        elif asked.roles and self.prefill_pool is None:
            source = _other(self.pool.source_for(asked.prompt, asked.holders), worker)
            if source is not None:
                roles = bodies.asks(self._new_name(), source.address)
        body = None if asked.body is None else bodies.with_roles(asked.body, roles)
        return Call(worker, asked.path, body, asks=source)

    def served(self, asked: Asked, call: Call) -> None:
        """The worker has the prompt now."""
        for pool in self.pools:
            if call.worker in pool.workers:
                pool.affinity.note(asked.prompt, call.worker)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        for pool in self.pools:
            pool.check()

    def __repr__(self) -> str:
        return f"<Router {' '.join(map(repr, self.pools))}>"


def _other(source: Worker | None, worker: Worker) -> Worker | None:
    return None if source is worker else source
