"""What peers say to each other on the control channel, and the one function that reads it.

A message is ``b"KVTP"``, the version (u8), the kind (u8), a token of 16 bytes, then the fields of
its class in order, little-endian (:mod:`kvtiers.tiers.p2p.wire`). The token of ``Hello`` is the
consumer's nonce; that of every other message is the token of the session, which ``HelloAck`` gives
out. A ``Refuse`` may come before there is one: it has the token of what it refuses.

The first 22 bytes, and the bodies of ``Hello`` and ``Refuse``, are the same in every version, so
that peers of different versions can tell each other so.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, cast

from kvtiers.chunks import ChunkLayout, GroupLayout, Key
from kvtiers.tiers.p2p.wire import (
    U8,
    U64,
    Codec,
    Cursor,
    ProtocolError,
    blob,
    blobs,
    rows,
    text,
)

VERSION = 1
MAX_KEYS = 2048
"""Chunks that one message may name."""
MAX_MESSAGE_BYTES = 2 << 20
"""More than any message has; longer ones end the connection before they are read."""
MAX_KEY_BYTES = 512
TOKEN_BYTES = 16

_MAGIC = b"KVTP"
_HEADER = struct.Struct(f"<4sBB{TOKEN_BYTES}s")
_MAX_TEXT = 1024
_MAX_OFFER = 1 << 16
_MAX_GROUPS = 256


class Role(IntEnum):
    """What a consumer expects of the producer, by ``kv_transfer_params``."""

    SOURCE = 0
    """``remote_kv_source``: what it has."""
    PREFILL = 1
    """``remote_prefiller``: what the request of that name will store, too."""


class Verdict(IntEnum):
    """The answer to a lookup, for one chunk."""

    ABSENT = 0
    PRESENT = 1
    """Kept for this request for a while."""
    COMING = 2
    """On its way into host memory, or about to be computed."""


class Code(IntEnum):
    """Why a peer, a chunk or a transfer is refused."""

    VERSION = 1
    NAMESPACE = 2
    GEOMETRY = 3
    TRANSPORT = 4
    BUSY = 5
    """Too many peers, or too much kept for them."""
    UNKNOWN_SESSION = 6
    """The producer was restarted, or has forgotten the consumer."""
    MALFORMED = 7
    ABSENT = 8
    DEADLINE = 9
    CLOSING = 10
    FAILED = 11


@dataclass(frozen=True, slots=True)
class Hello:
    """Consumer -> producer: who asks."""

    namespace: str
    groups: tuple[tuple[int, int, int, int], ...]
    """Index, bytes of a chunk, tokens per chunk, whether every chunk is kept; of each group."""
    label: str
    """What the engine is called in the other's log."""
    transports: tuple[bytes, ...]
    """Names of data transports that it can take, the preferred one first."""


@dataclass(frozen=True, slots=True)
class HelloAck:
    """Producer -> consumer: welcome. Its token is the session's from now on."""

    nonce: bytes
    label: str
    transport: bytes
    offer: bytes
    """What the transport needs to know, e.g. a port and a token."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Either way: there is no session, and why, for a person to read."""

    code: int
    words: str


@dataclass(frozen=True, slots=True)
class LookUp:
    """Consumer -> producer: which of these can be had."""

    question: int
    request: str
    """``kv_request_id``."""
    role: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LookUpAnswer:
    """Producer -> consumer: verdicts on chunks of a question, by place. May come in parts."""

    question: int
    verdicts: tuple[tuple[int, int], ...]
    """Place in the question, ``Verdict``."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Consumer -> producer: bring these."""

    transfer: int
    request: str
    role: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """Producer -> consumer: these chunks can be read now: place, address, XXH3-64 of the bytes.

    For transports by which the consumer reads; TCP says it beside the bytes.
    """

    transfer: int
    chunks: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """Consumer -> producer: it has read these chunks, by place, or will not any more."""

    transfer: int
    places: tuple[tuple[int], ...]


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Producer -> consumer: it has sent all it will send of a transfer."""

    transfer: int
    failed: tuple[tuple[int, int], ...]
    """Place, ``Code``; what is not named was sent."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Consumer -> producer: bring no more of this transfer, and keep nothing for it."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Consumer -> producer: nothing more will be asked for this request."""

    request: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Consumer -> producer: say that you live."""

    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Producer -> consumer: the same number back."""

    number: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either way: the session is over, nobody is to blame."""


Message = (
    Hello
    | HelloAck
    | Refuse
    | LookUp
    | LookUpAnswer
    | Fetch
    | ChunkReady
    | Taken
    | TransferDone
    | Cancel
    | Finished
    | Ping
    | Pong
    | Goodbye
)

_TEXT = text(_MAX_TEXT)
_KEYS = blobs(MAX_KEYS, MAX_KEY_BYTES)
_CODED = rows(MAX_KEYS, "HB")

_BODIES: Mapping[type[Message], tuple[int, tuple[Codec, ...]]] = {
    Hello: (1, (_TEXT, rows(_MAX_GROUPS, "IQIB"), _TEXT, blobs(16, 32))),
    HelloAck: (2, (blob(TOKEN_BYTES), _TEXT, blob(32), blob(_MAX_OFFER))),
    Refuse: (3, (U8, _TEXT)),
    LookUp: (4, (U64, _TEXT, U8, _KEYS)),
    LookUpAnswer: (5, (U64, _CODED)),
    Fetch: (6, (U64, _TEXT, U8, _KEYS)),
    ChunkReady: (7, (U64, rows(MAX_KEYS, "HQQ"))),
    Taken: (8, (U64, rows(MAX_KEYS, "H"))),
    TransferDone: (9, (U64, _CODED)),
    Cancel: (10, (U64,)),
    Finished: (11, (_TEXT,)),
    Ping: (12, (U64,)),
    Pong: (13, (U64,)),
    Goodbye: (14, ()),
}
_KINDS = {number: (cls, codecs) for cls, (number, codecs) in _BODIES.items()}
_IN_EVERY_VERSION = (Hello, Refuse)
_VERDICTS = frozenset(Verdict)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message as it came."""

    version: int
    token: bytes
    message: Message


def encode(message: Message, token: bytes, version: int = VERSION) -> bytes:
    """The bytes of ``message``; ``token`` has 16 bytes."""
    kind, codecs = _BODIES[type(message)]
    values = (getattr(message, f.name) for f in fields(message))
    body = [codec.write(value) for codec, value in zip(codecs, values, strict=True)]
    return b"".join((_HEADER.pack(_MAGIC, version, kind, token), *body))


def parse(data: bytes) -> Envelope:
    """Read one message, whatever the bytes are. Raises ProtocolError and nothing else."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ProtocolError("it is no message of kvtiers")
    _, version, kind, token = _HEADER.unpack_from(data)
    cls, codecs = _KINDS.get(kind, (None, ()))
    if version != VERSION and cls not in _IN_EVERY_VERSION:
        raise ProtocolError(f"it has protocol version {version}, this kvtiers has {VERSION}")
    if cls is None:
        raise ProtocolError(f"there is no kind of message {kind}")
    cursor = Cursor(data[_HEADER.size :])
    values = [codec.read(cursor) for codec in codecs]
    if cursor.left:
        raise ProtocolError(f"{cursor.left} bytes stand behind its end")
    message = cast(Message, cast(Any, cls)(*values))
    _check(message)
    return Envelope(version, token, message)


def _check(message: Message) -> None:
    """What the types of the fields do not say."""
    if isinstance(message, LookUp | Fetch):
        if message.role not in tuple(Role):
            raise ProtocolError(f"there is no role {message.role}")
        if not message.keys or len(set(message.keys)) < len(message.keys):
            raise ProtocolError("it names no chunk, or one twice")
    if isinstance(message, LookUpAnswer):
        if any(verdict not in _VERDICTS for _, verdict in message.verdicts):
            raise ProtocolError("a verdict in it is none")
        _check_places(message.verdicts)
    if isinstance(message, TransferDone):
        _check_places(message.failed)
    if isinstance(message, ChunkReady):
        _check_places(message.chunks)
    if isinstance(message, Taken):
        _check_places(message.places)
    if isinstance(message, HelloAck) and len(message.nonce) != TOKEN_BYTES:
        raise ProtocolError(f"its nonce has {len(message.nonce)} bytes")


def _check_places(named: Sequence[tuple[int, ...]]) -> None:
    if len({row[0] for row in named}) < len(named):
        raise ProtocolError("it names a place twice")


def groups_of(layout: ChunkLayout) -> tuple[tuple[int, int, int, int], ...]:
    """A chunk layout as ``Hello`` says it."""
    return tuple(sorted(_row(group) for group in layout.groups))


def _row(group: GroupLayout) -> tuple[int, int, int, int]:
    return group.group, group.chunk_bytes, group.tokens_per_chunk, int(group.keeps_every_chunk)


def refusal_of(hello: Hello, namespace: str, layout: ChunkLayout, version: int) -> Refuse | None:
    """Why the engine that says ``hello`` cannot be served by one of this model; None: it can."""
    if version != VERSION:
        return Refuse(
            Code.VERSION,
            f"you speak version {version}, I speak {VERSION}: run the same kvtiers on both",
        )
    if hello.namespace != namespace:
        return Refuse(
            Code.NAMESPACE,
            f"your namespace is {shown(hello.namespace)}, mine is {namespace}: it is another "
            "model, or other settings that change the bytes",
        )
    if hello.groups != groups_of(layout):
        return Refuse(
            Code.GEOMETRY,
            f"your chunks (group, bytes, tokens) are {_shown(hello.groups)}, mine are "
            f"{_shown(groups_of(layout))}: give both the same block size and blocks_per_chunk",
        )
    return None


def _shown(groups: tuple[tuple[int, int, int, int], ...]) -> str:
    text = ", ".join(f"({g}, {size}, {tokens})" for g, size, tokens, _ in groups[:4])
    return f"{text}, ..." if len(groups) > 4 else text


def shown(words: str) -> str:
    """What a peer says of itself, as it may stand in a log: one line, and not a long one."""
    return words[:400].encode("unicode_escape").decode("ascii")


def keys_of(message: LookUp | Fetch, layout: ChunkLayout) -> tuple[Key, ...]:
    """The chunks that a message names. Raises ProtocolError for one that the model cannot have."""
    keys = cast(tuple[Key, ...], message.keys)
    if min(map(len, keys)) <= 4:
        raise ProtocolError("a key in it is too short to be one")
    known = {g.group for g in layout.groups}
    if not {int.from_bytes(key[-4:], "big") for key in keys} <= known:
        raise ProtocolError("it names a chunk of a KV-cache group that the model does not have")
    return keys
