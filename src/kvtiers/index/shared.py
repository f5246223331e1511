"""Snapshots of pods in a Valkey or Redis server, written and read by all replicas of an index.

A replica needs no other one: it hears every engine itself. What it takes from here is a beginning
that is older than what the engine still replays. Whatever the server does, the index goes on: calls
have deadlines, and what failed is counted.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from kvtiers.errors import ConfigError
from kvtiers.index.options import Engine
from kvtiers.index.snapshot import Snapshot, packed, unpacked

_log = logging.getLogger("kvtiers.index")

_TIMEOUT_S = 3.0
_KEPT_S = 24 * 3600
_MAX_BYTES = 256 << 20


class Shared:
    """Reads snapshots, and writes the latest of each pod."""

    def __init__(self, url: str) -> None:
        """Call it on the loop that it is used on; close it there. Raises ConfigError."""
        try:
            import redis.asyncio as client
        except ImportError as e:
            raise ConfigError("--snapshot-to needs redis-py: pip install kvtiers[kv]") from e
        try:
            self._client: Any = client.Redis.from_url(
                url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
        except ValueError as e:
            raise ConfigError("--snapshot-to is no URL of a server: give redis://HOST:PORT") from e
        self._waiting: dict[str, Snapshot] = {}
        self._some = asyncio.Event()
        self.written = 0
        self.read = 0
        self.failed = 0

    async def load(self, engine: Engine) -> Snapshot | None:
        """What was kept of a pod last; None: nothing, or nothing that can be had now."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                data = await self._client.get(_key(engine))
        except Exception as e:  # whatever the client raises, the index can do without
            self._failed("read", e)
            return None
        snapshot = None if data is None else unpacked(data)
        self.read += snapshot is not None
        return snapshot

    def put(self, engine: Engine, snapshot: Snapshot) -> None:
        """Have it written soon; one that waits is replaced."""
        self._waiting[_key(engine)] = snapshot
        self._some.set()

    async def run(self) -> None:
        """Write what is put, until it is cancelled."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                key, snapshot = self._waiting.popitem()
                await self._write(key, snapshot)

    async def _write(self, key: str, snapshot: Snapshot) -> None:
        data = packed(snapshot)
        if len(data) > _MAX_BYTES:
            self._failed("written", f"{len(data)} bytes are too many")
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._client.set(key, data, ex=_KEPT_S)
            self.written += 1
        except Exception as e:  # as above
            self._failed("written", e)

    def _failed(self, what: str, why: object) -> None:
        self.failed += 1
        _log.warning("a snapshot is not %s: %s", what, str(why) or type(why).__name__)

    async def close(self) -> None:
        """Nothing more is wanted."""
        await self._client.aclose()

    def counts(self) -> Mapping[str, int]:
        """By what happened to them."""
        return {"written": self.written, "read": self.read, "failed": self.failed}

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        assert self._some.is_set() or not self._waiting, "snapshots wait, and nobody knows"

    def __repr__(self) -> str:
        return f"<Shared {self.written} written, {self.read} read, {self.failed} failed>"


def _key(engine: Engine) -> str:
    where = f"{engine.endpoint} {engine.topic}"
    return f"kvtiers-index:{engine.name}:{hashlib.sha256(where.encode()).hexdigest()[:16]}"
