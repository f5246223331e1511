"""Who may talk to whom: CURVE key pairs, and the list of those that are let in.

On loopback everybody is. On any other address the control channel is encrypted and authenticated by
CurveZMQ (RFC 26 of rfc.zeromq.org), and only listed public keys are let in (ZAP, RFC 27), by a
handler on the I/O thread.
"""

import os
import re
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvtiers.errors import ConfigError
from kvtiers.tiers.options import bad_option, require
from kvtiers.tiers.p2p.loop import Loop
from kvtiers.tiers.p2p.names import is_loopback, is_wildcard, look_up, numeric
from kvtiers.tiers.p2p.options import LOOPBACK, P2POptions

_KEY = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_LINE = re.compile(rf"(public|secret) ({_KEY})")
_PEER = re.compile(rf"({_KEY})(?: (\S+:\d{{1,5}}))?")
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ALLOWED, _DENIED = (b"200", b"OK"), (b"400", b"this key is not in allowed_peers")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 text, 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """An engine's own keys, and those of its peers."""

    own: KeyPair
    allowed: frozenset[bytes]
    """Public keys that are let in."""
    by_address: dict[str, bytes]
    """Public keys of peers that are dialled, by ``host:port``."""

    def key_of(self, host: str, port: int) -> bytes | None:
        """The public key that the peer at this address must have; None if that is not known.

        One that stands alone, without an address, is everybody's.
        """
        known = self.by_address.get(f"{host}:{port}")
        if known is not None:
            return known
        nameless = self.allowed - set(self.by_address.values())
        return next(iter(nameless)) if len(nameless) == 1 else None


def new_keys(path: str) -> bytes:
    """Write a new key pair into a file that only its owner may read; the public key.

    Raises FileExistsError rather than to replace a key, or another OSError.
    """
    public, secret = zmq.curve_keypair()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(b"public %b\nsecret %b\n" % (public, secret))
    return bytes(public)


def read_keys(path: str) -> KeyPair:
    """Read what ``new_keys`` wrote. Raises ConfigError, which shows nothing of the file."""
    try:
        with open(path, encoding="ascii") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(4096)
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise ConfigError(f"keys is {path}, which cannot be read: {why}", key="keys") from e
    if mode & 0o077:
        raise ConfigError(f"keys is {path}, which others may read: chmod 600 it", key="keys")
    found = {m[1]: m[2] for m in map(_LINE.fullmatch, text.splitlines()) if m}
    if set(found) != {"public", "secret"}:
        raise ConfigError(
            f"keys is {path}, which holds no key pair: write one with kvtiers keys new", key="keys"
        )
    pair = KeyPair(found["public"].encode(), found["secret"].encode())
    if zmq.curve_public(pair.secret) != pair.public:
        raise ConfigError(f"keys is {path}, whose two keys are no pair", key="keys")
    return pair


def secured(own: KeyPair, allowed_peers: tuple[str, ...]) -> Security:
    """``allowed_peers``: a public key each, and the address where it is dialled if it has one."""
    allowed, by_address = set(), {}
    for entry in allowed_peers:
        match = _PEER.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"allowed_peers has {entry!a}: give a public key of 40 characters, or one and "
                "host:port",
                key="allowed_peers",
            )
        allowed.add(match[1].encode())
        if match[2] is not None:
            by_address[match[2]] = match[1].encode()
    return Security(own, frozenset(allowed), by_address)


def bind_address(options: P2POptions) -> str:
    """The numeric address of ``host``. Asks the resolver; raises ConfigError.

    Beyond loopback it is refused unless it is secured as far as it can be.
    """
    host = options.host or LOOPBACK
    address = numeric(host) or look_up(host)
    if address is None:
        raise bad_option("host", f"is {host}, a name that does not resolve")
    if not is_loopback(address):
        require(
            options.keys is not None,
            "keys",
            f"is missing: {host} can be reached by others; write a key pair with kvtiers keys "
            "new and list those of the peers in allowed_peers",
        )
        require(
            options.plaintext_data,
            "plaintext_data",
            f"is false, but chunks to and from {host} would travel unencrypted: set it if "
            "nobody else is on that network",
        )
    require(
        options.advertised_host is not None or not is_wildcard(address),
        "advertised_host",
        f"is missing: {host} is no address that a peer could be sent to",
    )
    return address


def security_of(options: P2POptions) -> Security | None:
    """Keys of this engine and its peers; None: there are none. Raises ConfigError."""
    if options.keys is None:
        return None
    return secured(read_keys(os.path.expanduser(options.keys)), options.allowed_peers)


class Doorkeeper:
    """Answers libzmq's question, for each connection, whether its key is let in."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", loop: Loop, security: Security):
        self._loop = loop
        self._allowed = {z85.decode(key) for key in security.allowed}
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(_ZAP_ADDRESS)
        loop.attach(self._socket, self._asked)

    def _asked(self, parts: list[bytes]) -> None:
        # identity, empty, version, request, domain, address, peer's identity, mechanism, key
        if len(parts) < 8:
            return
        key = parts[8] if len(parts) == 9 and parts[7] == b"CURVE" else None
        status = _ALLOWED if key in self._allowed else _DENIED
        self._loop.send(self._socket, [*parts[:2], b"1.0", parts[3], *status, b"", b""])

    def close(self) -> None:
        """Let nobody in any more."""
        self._loop.detach(self._socket)
        self._socket.close(0)
