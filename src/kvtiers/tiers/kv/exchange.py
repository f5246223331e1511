"""Calls of many keys at once: one round trip to each server that they concern.

Everything is sent before the first reply is waited for. What a server says goes to its call, an
error too; what becomes of a connection goes to all calls that were waiting for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Protocol

from redis.exceptions import AskError, InvalidResponse, MovedError, RedisError, ResponseError

from kvtiers.errors import Kind, KVTiersError
from kvtiers.tiers.kv.commands import Piece, asking, command
from kvtiers.tiers.kv.failures import explained
from kvtiers.tiers.kv.wire import Length, Wire

_REDIRECTS = 3
"""How often a call follows a slot that moves to another server."""
_ASKING = command(b"ASKING")

Types = tuple[type, ...]
PLACED: Types = (Length, NoneType)
"""Answers to ``GET`` where there is a place for the value."""
_ANSWERS: Mapping[bytes, Types] = {
    b"EXISTS": (int,),
    b"EXPIRE": (int,),
    b"GET": (bytes, NoneType),
    b"INFO": (bytes,),
    b"OBJECT": (int, NoneType),
    b"SCAN": (list,),
    b"SET": (bytes,),
    b"STRLEN": (int,),
    b"TOUCH": (int,),
    b"UNLINK": (int,),
}
"""By command, errors aside."""


class Connections(Protocol):
    """redis-py's pool of connections to one server."""

    def get_connection(self) -> Any:
        """One that nobody uses, connected. Raises errors of redis-py."""

    def release(self, connection: Any) -> None:
        """Give it back."""

    def disconnect(self, inuse_connections: bool) -> None:
        """Close all that nobody uses, or those in use as well."""


@dataclass(slots=True, eq=False)
class Server:
    """One server."""

    name: str
    """For people: host and port."""
    pool: Connections


@dataclass(slots=True, eq=False)
class Call:
    """One command about the key ``name``, and what became of it."""

    name: bytes
    pieces: Callable[[], Iterable[Piece]]
    """What is to be sent, made as it is sent: then a checksum has just brought it into the cache.
    Must not raise."""
    answers: Types
    """What a server can answer, errors aside. A connection over which it says something else has
    lost its place: which reply belongs to which call is not known any more."""
    targets: list[memoryview] | None = None
    """Where a value goes; see :meth:`~kvtiers.tiers.kv.wire.Wire.receive`."""
    server: Server | None = None
    """Who is to be asked, whatever the name."""
    asking: bool = False
    """The server is about to take over the slot."""
    reply: Any = field(default=None, repr=False)
    """Or a KVTiersError."""


def question(name: bytes, *words: bytes, server: Server | None = None) -> Call:
    """A call about the key ``name`` that takes no value along, and brings none to a place."""
    return Call(name, asking(*words), _ANSWERS[words[0]], server=server)


class Servers(Protocol):
    """One server, or several that divide the keys."""

    def of(self, name: bytes) -> Server:
        """Who has that key. Raises KVTiersError, also redis-py's errors, if that is not known."""

    def all(self) -> list[Server]:
        """Those that take chunks. Raises as ``of``."""

    def moved(self, error: MovedError | AskError) -> Server:
        """Who is meant by an error that names another server. Raises KVTiersError."""

    def failed(self, server: Server) -> None:
        """A connection to it was lost, or never came to be."""

    def worked(self, server: Server) -> None:
        """It answered all that it was asked."""

    def close(self) -> None:
        """Close all connections, those in use as well, for good."""


def exchange(servers: Servers, calls: Sequence[Call], operation: str) -> None:
    """Make all calls; each has its reply then, or its error.

    Raises only what making a call raises, such as memory that is gone.
    """
    waiting = list(calls)
    for _ in range(1 + _REDIRECTS):
        talks = _assigned(servers, waiting, operation)
        try:
            for talk in talks:
                talk.send()
            for talk in talks:
                talk.receive()
        finally:
            for talk in talks:
                talk.hang_up()
        waiting = [call for call in waiting if _follow(servers, call, operation)]
        if not waiting:
            return
    for call in waiting:
        call.reply = KVTiersError(
            "its slot moves from server to server: is somebody rearranging the cluster?",
            kind=Kind.IO,
            operation=operation,
        )


def _assigned(servers: Servers, calls: Sequence[Call], operation: str) -> "list[_Talk]":
    talks: dict[int, _Talk] = {}
    for call in calls:
        try:
            server = call.server or servers.of(call.name)
        except (RedisError, KVTiersError) as e:
            call.reply = explained(e, operation, "the cluster")
            continue
        talk = talks.get(id(server))
        if talk is None:
            talk = talks[id(server)] = _Talk(servers, server, operation)
        talk.calls.append(call)
    return list(talks.values())


def _follow(servers: Servers, call: Call, operation: str) -> bool:
    """Whether the call is to be made again, at another server."""
    error = call.reply
    if not isinstance(error, AskError):  # MovedError is one
        return False
    try:
        call.server, call.asking = servers.moved(error), not isinstance(error, MovedError)
    except KVTiersError as e:
        call.reply = e
        return False
    call.reply = None
    return True


class _Talk:
    """What is said to one server over one connection."""

    def __init__(self, servers: Servers, server: Server, operation: str) -> None:
        self.calls: list[Call] = []
        self._servers = servers
        self._server = server
        self._operation = operation
        self._connection: Wire | None = None

    def send(self) -> None:
        try:
            self._connection = self._server.pool.get_connection()
            self._connection.send(self._pieces())
        except (RedisError, OSError) as e:
            self._give_up(e, self.calls)

    def _pieces(self) -> Iterator[Piece]:
        """Of all calls; each costs a system call, so words between two values become one."""
        words: list[bytes] = []
        for call in self.calls:
            if call.asking:
                words.append(_ASKING)
            for piece in call.pieces():
                if isinstance(piece, bytes):
                    words.append(piece)
                    continue
                yield b"".join(words)
                yield piece
                words = []
        yield b"".join(words)

    def receive(self) -> None:
        connection = self._connection
        if connection is None:
            return
        for done, call in enumerate(self.calls):
            try:
                call.reply = self._reply(connection, call)
            except (RedisError, OSError) as e:
                self._give_up(e, self.calls[done:])
                return
        self._connection = None
        self._server.pool.release(connection)
        self._servers.worked(self._server)

    def hang_up(self) -> None:
        """Give back a connection over which not all was said, closed: something was raised."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._server.pool.release(connection)

    def _reply(self, connection: Wire, call: Call) -> Any:
        """Both replies of a call with ``ASKING`` are taken, whatever the first is."""
        refused = self._next(connection, None, (bytes,)) if call.asking else None
        reply = self._next(connection, call.targets, call.answers)
        if isinstance(refused, ResponseError):
            reply = refused
        if isinstance(reply, ResponseError) and not isinstance(reply, AskError):
            return explained(reply, self._operation, self._server.name)
        return reply  # MovedError is an AskError

    def _next(self, connection: Wire, targets: list[memoryview] | None, answers: Types) -> Any:
        """A reply, or what the server refuses. Raises other errors of redis-py, and OSError."""
        try:
            reply = connection.receive(targets)
        except ResponseError as e:
            return e
        if not isinstance(reply, answers):
            raise InvalidResponse(f"{type(reply).__name__} is no answer to {self._operation}")
        return reply

    def _give_up(self, error: Exception, calls: Sequence[Call]) -> None:
        self.hang_up()
        self._servers.failed(self._server)
        for call in calls:
            call.reply = explained(error, self._operation, self._server.name)
