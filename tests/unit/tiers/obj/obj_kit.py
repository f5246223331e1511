"""Stores of the ``obj`` tier in a bucket, and their chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtiers.chunks import Key, Namespace
from kvtiers.testing.bench import Environment, StoreBench, closing
from kvtiers.testing.values import NAMESPACE, key
from kvtiers.tiers.obj import ObjOptions
from kvtiers.tiers.obj.client import Client, open_client
from kvtiers.tiers.obj.store import ObjStore

SECRETS = ("AKIAWHOISIT", "a-secret-that-nobody-may-see", "a-token-that-nobody-may-see")
SMALL, LARGE = 0, 7
"""Groups of the layout of the laws; ``PACK_BELOW`` lies between their chunks."""
PACK_BELOW = 5 * 4096


def small(*names: object) -> list[Key]:
    return [key(name, SMALL) for name in names]


def large(*names: object) -> list[Key]:
    return [key(name, LARGE) for name in names]


@dataclass
class Bucket:
    """One bucket of a server, and how it is reached."""

    endpoint: str
    name: str
    options: dict[str, object] = field(default_factory=dict)

    def client(self, **options: object) -> Client:
        said = {"allow_http": True, **self.options, **options}
        return open_client(ObjOptions(url=f"s3://{self.name}/kv", endpoint=self.endpoint, **said))

    def store(self, environment: Environment, capacity_bytes: int | None = None) -> ObjStore:
        return ObjStore(
            environment.context(),
            self.client(),
            capacity_bytes=capacity_bytes,
            pack_below_bytes=PACK_BELOW,
        )

    @contextmanager
    def open(
        self,
        namespace: Namespace = NAMESPACE,
        environment: Environment | None = None,
        capacity_bytes: int | None = None,
    ) -> Iterator[StoreBench]:
        environment = environment or Environment(namespace)
        store = self.store(environment, capacity_bytes)
        with closing(StoreBench(store, environment)) as bench:
            yield bench
            bench.store.check()

    @contextmanager
    def impatient(self, bench: StoreBench) -> Iterator[None]:
        """Requests of the store are given up soon, which needs a server that is not loaded."""
        client = bench.store._client
        patient, client.store = client.store, self.client(request_timeout_s=0.3).store
        try:
            yield
        finally:
            client.store = patient

    def used(self) -> int:
        """Bytes of all objects."""
        return sum(stored.bytes for page in self.client().objects() for stored in page)

    def names(self) -> list[str]:
        """Every object, by name below the prefix."""
        return sorted(stored.name for page in self.client().objects() for stored in page)
