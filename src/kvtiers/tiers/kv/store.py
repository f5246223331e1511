"""Chunks as values of a key-value server that speaks RESP: Valkey or Redis.

A value is the identity page without its zeros (:mod:`kvtiers.tiers.record`) and the payload. It is
written by one ``SET``, so that it is seen whole or not at all; equal names have equal bytes, so
that engines that share a server need no coordination. Who leaves when memory is short is the
server's choice.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from kvtiers.chunks import Key
from kvtiers.errors import Kind, KVTiersError, closed
from kvtiers.events import Reason
from kvtiers.tiers import record
from kvtiers.tiers.base import Capabilities, Entry, Item, StoreContext, Usage
from kvtiers.tiers.complaints import Complaints
from kvtiers.tiers.kv import memory, opening, scanning
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.cluster import ClusterServers
from kvtiers.tiers.kv.commands import Piece, asking, command_with_value
from kvtiers.tiers.kv.exchange import PLACED, Call, exchange, question
from kvtiers.tiers.kv.names import Names
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.kv.servers import servers_of
from kvtiers.tiers.kv.uses import Uses
from kvtiers.tiers.portions import portions

_log = logging.getLogger("kvtiers")

_MANIFEST_S = 30.0
"""So often is the manifest written again: a server may evict it, or begin anew without it."""


class KvStore:
    """Chunks of one namespace on the servers of ``options.url``.

    Raises ConfigError, naming the option, if the configuration cannot work. Servers that are down
    are no reason: every call fails until they are up.
    """

    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(self, context: StoreContext, options: KvOptions) -> None:
        opening.refuse_large_chunks(context)
        self._context = context
        self._id = context.namespace.id
        self._names = Names(options.prefix, self._id)
        self._address = parse_address(options.url)
        self._ttl = None if options.ttl_s is None else b"%d" % round(options.ttl_s)
        self._expiry = () if self._ttl is None else (b"EX", self._ttl)
        self._capacity = options.capacity_bytes
        self._batch_bytes = options.max_batch_bytes
        self._uses = Uses()
        self._bound = memory.Bound(options.capacity_bytes)
        self._complaints = Complaints(str(self._address), context.clock)
        self._told_of_memory = False
        self._manifest_at: float | None = None
        self._closed = False
        self._servers = servers_of(self._address, options, context.clock)
        try:
            opening.look(context, self._address, self._servers, self._names, options.capacity_bytes)
        except BaseException:
            self._servers.close()
            raise

    # -- the contract ---------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is there. Raises KVTiersError if no server answers.

        Of a server that is down while others of its cluster answer, chunks are absent.
        """
        return [reply == 1 for reply in self._ask(keys)]

    def still_there(self, keys: Sequence[Key]) -> list[bool]:
        """The same, but what is on a server that is down counts as there: nothing left it."""
        return [reply == 1 or isinstance(reply, KVTiersError) for reply in self._ask(keys)]

    def _ask(self, keys: Sequence[Key]) -> list[object]:
        self._refuse_if_closed("contains")
        calls = [self._call(key, b"EXISTS") for key in keys]
        self._exchange(calls, "contains")
        failures = [call.reply for call in calls if isinstance(call.reply, KVTiersError)]
        if failures and len(failures) == len(calls):
            raise failures[0]
        return [call.reply for call in calls]

    def write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Set each item, whether it is there or not: the bytes are the same."""
        self._refuse_if_closed("write")
        results: list[KVTiersError | None] = []
        for batch in self._batches(items):
            results += self._write(batch)
        return results

    def _write(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        made = [self._set(item) for item in items]
        self._exchange([call for call in made if isinstance(call, Call)], "write")
        ends = [call.reply if isinstance(call, Call) else call for call in made]
        return [end if isinstance(end, KVTiersError) else None for end in ends]

    def _set(self, item: Item) -> Call | KVTiersError:
        if len(item.key) > record.MAX_KEY_BYTES:
            return record.key_too_long(item.key)
        if not self._bound.take(item.view.nbytes):
            return self._bound.full()
        name = self._names.of(item.key)
        return Call(name, partial(self._to_set, name, item), (bytes,))

    def _to_set(self, name: bytes, item: Item) -> list[Piece]:
        header = record.shorten(record.pack(item.key, self._id, item.view), item.key)
        return command_with_value([b"SET", name], [header, item.view], self._expiry)

    def read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        """Receive each value into its view and verify it; what fails verification is deleted."""
        self._refuse_if_closed("read")
        results: list[KVTiersError | None] = []
        for batch in self._batches(items):
            results += self._read(batch)
        self._settle([item.key for item in items], results)
        return results

    def _read(self, items: Sequence[Item]) -> list[KVTiersError | None]:
        headers = [bytearray(record.shortened_bytes(item.key)) for item in items]
        calls = [
            self._to_get(item, memoryview(header))
            for header, item in zip(headers, items, strict=True)
        ]
        self._exchange(calls, "read")
        return [
            self._judged(call.reply, header, item)
            for call, header, item in zip(calls, headers, items, strict=True)
        ]

    def _to_get(self, item: Item, header: memoryview) -> Call:
        name = self._names.of(item.key)
        return Call(name, asking(b"GET", name), PLACED, targets=[header, item.view])

    def _judged(self, reply: object, header: bytearray, item: Item) -> KVTiersError | None:
        if isinstance(reply, KVTiersError):
            return reply
        if reply is None:
            return _failure("the chunk is gone: expired, evicted or deleted", Kind.VANISHED)
        expected = len(header) + item.view.nbytes
        if reply != expected:
            what = f"a stored chunk cannot be used: it has {reply} bytes instead of {expected}"
            return _failure(what, Kind.CORRUPT)
        return record.verify(record.lengthen(bytes(header)), item.key, self._id, item.view)

    def _settle(self, keys: Sequence[Key], results: Sequence[KVTiersError | None]) -> None:
        """Report and forget what cannot be used; note that the rest was used."""
        kinds = [error and error.kind for error in results]
        gone = [key for key, kind in zip(keys, kinds, strict=True) if kind is Kind.VANISHED]
        bad = [key for key, kind in zip(keys, kinds, strict=True) if kind is Kind.CORRUPT]
        if gone:
            self._context.on_removed(list(dict.fromkeys(gone)), Reason.VANISHED)
        if bad:
            self._exchange([self._call(key, b"UNLINK") for key in dict.fromkeys(bad)], "delete")
            self._context.on_removed(list(dict.fromkeys(bad)), Reason.CORRUPT)
        if self._ttl is not None:
            self._uses.note([key for key, kind in zip(keys, kinds, strict=True) if kind is None])

    def delete(self, keys: Sequence[Key]) -> None:
        """Unlink these chunks. Raises KVTiersError if a server does not answer."""
        self._refuse_if_closed("delete")
        calls = [self._call(key, b"UNLINK") for key in keys]
        self._exchange(calls, "delete")
        for call in calls:
            if isinstance(call.reply, KVTiersError):
                raise call.reply

    def scan(self) -> Iterable[Entry]:
        """Every chunk, as large as the layout says; when it was used is not known."""
        self._refuse_if_closed("scan")
        return self._scan()

    def _scan(self) -> Iterator[Entry]:
        listed: set[Key] = set()
        for server in self._servers.all():
            for name in scanning.names_at(self._servers, server, self._names.pattern):
                key = self._names.key(name)
                if key is not None and key not in listed:
                    listed.add(key)
                    with suppress(KeyError):  # of another layout, and so of nobody
                        yield Entry(key, self._context.layout.chunk_bytes(key), used_at=0.0)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note the use; the next call takes it to the servers."""
        self._refuse_if_closed("touch")
        self._uses.note(keys)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        self._servers.close()

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, key: Key, verb: bytes) -> Call:
        name = self._names.of(key)
        return question(name, verb, name)

    def _exchange(self, calls: Sequence[Call], operation: str) -> None:
        """Make the calls, and those that are due beside them."""
        if not calls:
            return
        manifest = self._manifest()
        exchange(self._servers, [*calls, *self._touches(), *manifest], operation)
        if manifest and not isinstance(manifest[0].reply, KVTiersError):
            self._manifest_at = self._context.clock()
        failure = next((c.reply for c in calls if isinstance(c.reply, KVTiersError)), None)
        if failure is None:
            self._complaints.worked(operation)
        elif not self._closed:
            self._complaints.failed(operation, failure)

    def _manifest(self) -> list[Call]:
        now = self._context.clock()
        if self._manifest_at is not None and now < self._manifest_at + _MANIFEST_S:
            return []
        name = self._names.manifest
        manifest = self._context.namespace.manifest().encode()
        return [question(name, b"SET", name, manifest, *self._expiry)]

    def _touches(self) -> list[Call]:
        names = map(self._names.of, self._uses.take())
        if self._ttl is None:
            return [question(name, b"TOUCH", name) for name in names]
        return [question(name, b"EXPIRE", name, self._ttl) for name in names]

    def _batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Runs of up to ``max_batch_bytes``, or of one chunk."""
        return portions(items, lambda item: item.view.nbytes, self._batch_bytes)

    # -- small things ---------------------------------------------------------------------------

    def usage(self) -> Usage | None:
        """Of all servers together, whoever uses them; None where they have no bound."""
        said = memory.ask(self._servers, "INFO")
        if not self._told_of_memory:
            self._told_of_memory = True
            complaint = memory.complaint(said, self._capacity, self._ttl is not None)
            if complaint is not None:
                _log.warning("%s: %s %s", self._context.label, self._address, complaint)
        return self._bound.learn(said)

    def _refuse_if_closed(self, operation: str) -> None:
        if self._closed:
            raise closed(self._context.name, operation)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        self._uses.check()
        self._bound.check()
        self._complaints.check()
        if isinstance(self._servers, ClusterServers):
            self._servers.check()

    def __repr__(self) -> str:
        return f"<KvStore {self._address} {self._names}: {self._bound}, {self._uses}>"


def _failure(what: str, kind: Kind) -> KVTiersError:
    return KVTiersError(what, kind=kind, operation="read")
