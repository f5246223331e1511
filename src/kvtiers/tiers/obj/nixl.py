"""``transport: nixl``: objects go and come by the OBJ plug-in of NIXL.

Only what moves bytes is NIXL's. It cannot list or delete, and does not say how long an object was
that it read, or why it failed; so what is there is looked up, listed and deleted by ``obstore``.
Each transfer has memory of its own: one that does not end in time may still write to it.
"""

import contextlib
import ctypes
import importlib
import mmap
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtiers.chunks import PAGE_BYTES
from kvtiers.errors import Kind, KVTiersError, Retry, closed
from kvtiers.tiers.obj import names
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.options import bad_option

_PACKAGES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_PLUGIN = "OBJ"
_THREADS = 8
_MAX_HUNG = 32
"""Transfers that did not end: each keeps its memory."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.0002, 0.005


class Plugin:
    """The OBJ plug-in, below one prefix of a bucket. Any thread. Raises KVTiersError.

    ``api`` is the module of NIXL's agent; its calls are made one at a time, and do not block.
    """

    def __init__(
        self,
        api: Any,
        options: ObjOptions,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lock = threading.Lock()
        self._clock, self._sleep = clock, sleep
        self._timeout_s = options.request_timeout_s
        prefix = options.where.prefix
        self._below = f"{prefix}/" if prefix else ""
        self._numbers = 0
        self._hung: list[tuple[Any, object]] = []
        self._name = f"kvtiers-{secrets.token_hex(8)}"
        self._agent: Any = api.nixl_agent(self._name, api.nixl_agent_config(backends=[]))
        self._agent.create_backend(_PLUGIN, parameters(options))

    def write(self, name: str, data: memoryview) -> None:
        """Make an object of ``data`` (writable memory, which is not written to)."""
        self._move("WRITE", name, 0, data)

    def read(self, name: str, start: int, data: memoryview) -> None:
        """Fill ``data`` with the bytes of an object from ``start`` on, which must be there."""
        self._move("READ", name, start, data)

    def _move(self, operation: str, name: str, start: int, data: memoryview) -> None:
        try:
            with self._transfer(operation, name, start, data) as handle:
                self._wait(operation, name, handle, data)
        except KVTiersError:
            raise
        except Exception as e:
            raise _failed(operation, name, type(e).__name__) from None

    @contextlib.contextmanager
    def _transfer(self, operation: str, name: str, start: int, data: memoryview) -> Iterator[Any]:
        """A transfer that has begun; what it needs is let go of afterwards, unless it hangs."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        with self._lock:
            agent = self._usable()
            self._numbers += 1
            memory = agent.register_memory([(address, data.nbytes, 0, "")], "DRAM", [_PLUGIN])
            there = [(start, data.nbytes, self._numbers, self._below + name)]
            objects = agent.register_memory(there, "OBJ", [_PLUGIN])
            handle = agent.initialize_xfer(operation, memory.trim(), objects.trim(), self._name)
            agent.transfer(handle)
        try:
            yield handle
        finally:
            with self._lock:
                if not any(hung is handle for hung, _ in self._hung):
                    handle.release()
                    agent.deregister_memory(memory, [_PLUGIN])
                    agent.deregister_memory(objects, [_PLUGIN])

    def _usable(self) -> Any:
        if self._agent is None:
            raise closed("the store", "request")
        look = self._agent.check_xfer_state
        self._hung = [each for each in self._hung if look(each[0]) == "PROC"]
        if len(self._hung) >= _MAX_HUNG:
            raise _failed("transfer", "any object", f"{_MAX_HUNG} transfers do not end")
        return self._agent

    def _wait(self, operation: str, name: str, handle: Any, data: object) -> None:
        until, pause = self._clock() + self._timeout_s, _FIRST_LOOK_S
        while (state := self._state(handle)) == "PROC":
            if self._clock() >= until:
                with self._lock:
                    self._hung.append((handle, data))
                raise _failed(operation, name, "no answer in time", Kind.TIMEOUT)
            self._sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        if state != "DONE":
            raise _failed(operation, name, "the plug-in does not say why; its log may")

    def _state(self, handle: Any) -> str:
        with self._lock:
            agent = self._agent
            if agent is None:
                raise closed("the store", "request")
            return str(agent.check_xfer_state(handle))

    def close(self) -> None:
        """Let go of the agent. What hangs keeps its memory."""
        with self._lock:
            self._agent = None

    def __repr__(self) -> str:
        return f"<Plugin {len(self._hung)} hung>"


class NixlClient(Client):
    """A client whose objects go and come by NIXL."""

    def __init__(self, client: Client, plugin: Plugin) -> None:
        super().__init__(client.store, client.where)
        self._plugin = plugin

    def put(self, name: str, parts: Sequence[memoryview | bytes]) -> None:
        """As that of a client. The parts are joined, for the plug-in takes one for an object."""
        size = sum(len(part) for part in parts)
        if not size:
            super().put(name, parts)
            return
        memory = mmap.mmap(-1, size)
        for part in parts:
            memory.write(part)
        self._plugin.write(name, memoryview(memory))

    def get(self, name: str, most: int, start: int = 0) -> memoryview:
        """As that of a client, which is asked for the length first."""
        there = self.size(name)
        if there is None or there <= start:
            return super().get(name, most, start)  # which knows what to say
        view = memoryview(mmap.mmap(-1, min(most, there - start)))
        self._plugin.read(name, start, view)
        return view

    def get_into(self, name: str, targets: Sequence[memoryview]) -> int:
        """As that of a client. What it reads is in memory that the agent knows, and copied."""
        room = sum(target.nbytes for target in targets)
        data = self.get(name, room + 1)
        at = 0
        for target in targets:
            part = data[at : at + target.nbytes]
            target[: part.nbytes] = part
            at += target.nbytes
        return data.nbytes

    def close(self) -> None:
        """Let go of the agent, too."""
        super().close()
        self._plugin.close()


def open_nixl(options: ObjOptions, client: Client) -> NixlClient:
    """``client``, with NIXL for what moves bytes. Raises ConfigError if that does not work here."""
    try:
        return _probed(NixlClient(client, Plugin(_api(), options)))
    except KVTiersError as e:
        if e.kind is Kind.CONFIG:
            raise
        raise _refusal(str(e)) from None
    except Exception as e:  # whatever the plug-in raises; its text may quote credentials
        raise _refusal(f"{type(e).__name__} while it was set up") from None


def _probed(client: NixlClient) -> NixlClient:
    """Write a page and read it, by a name of its own."""
    name = f"{names.TRIAL}nixl/{secrets.token_hex(8)}"
    page = secrets.token_bytes(PAGE_BYTES)
    client.put(name, [page])
    try:
        if bytes(client.get(name, PAGE_BYTES)) != page:
            raise _failed("READ", name, "it gives other bytes than were written")
    finally:
        client.delete([name])
    return client


def parameters(options: ObjOptions) -> dict[str, str]:
    """What the plug-in is told. Raises ConfigError for what it cannot be told. Pure."""
    if options.where.scheme != "s3" or options.profile is not None:
        raise _refusal("it knows s3:// only, and no profile")
    said = {
        "bucket": options.where.bucket,
        "endpoint_override": options.endpoint,
        "scheme": "http" if (options.endpoint or "").startswith("http:") else "https",
        "region": options.region,
        "access_key": options.access_key_id,
        "secret_key": options.secret_access_key,
        "session_token": options.session_token,
        "ca_bundle": options.ca_bundle,
        "use_virtual_addressing": "true" if options.virtual_hosted else None,
        "num_threads": str(_THREADS),
    }
    return {key: value for key, value in said.items() if value is not None}


def _api() -> Any:
    for name in _PACKAGES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise bad_option(
        "transport", 'is "nixl", which is not installed: pip install nixl, or leave it out'
    )


def _refusal(why: str) -> KVTiersError:
    return bad_option(
        "transport", f'is "nixl", whose OBJ plug-in does not work here: {why}; leave it out'
    )


def _failed(operation: str, name: str, why: str, kind: Kind = Kind.IO) -> KVTiersError:
    verb = operation.lower()
    return KVTiersError(
        f"{verb} of {name} by NIXL failed: {why}", kind=kind, retry=Retry.MAY, operation=verb
    )
