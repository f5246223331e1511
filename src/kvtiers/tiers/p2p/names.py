"""Names of hosts become addresses on threads of their own: a resolver may hang for a minute.

libzmq would resolve a name on the thread that serves all its sockets, so it is given numbers only.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable

from kvtiers.tiers.lanes import StartThread, start_daemon

_MAX_THREADS = 8
"""Names in work at once; of a name beyond them it is said that it does not resolve."""

Resolved = Callable[[str | None], None]


def numeric(host: str) -> str | None:
    """``host`` if it is an address, 127.0.0.1 for localhost, else None."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it; ``address`` is numeric."""
    return ipaddress.ip_address(address).is_loopback


def is_wildcard(address: str) -> bool:
    """Whether it stands for all addresses of this machine; ``address`` is numeric."""
    return ipaddress.ip_address(address).is_unspecified


def look_up(host: str) -> str | None:
    """Ask the system's resolver; may take its time."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    ordered = sorted(found, key=lambda entry: entry[0] is not socket.AF_INET)
    return str(ordered[0][4][0]) if ordered else None


class Names:
    """Resolves names without making anybody wait."""

    def __init__(
        self,
        look_up: Callable[[str], str | None] = look_up,
        start_thread: StartThread = start_daemon,
    ) -> None:
        self._look_up = look_up
        self._start = start_thread
        self._free = threading.Semaphore(_MAX_THREADS)

    def resolve(self, host: str, resolved: Resolved) -> None:
        """Call ``resolved`` with an address or None: at once, or later on another thread."""
        known = numeric(host)
        if known is not None or not self._free.acquire(blocking=False):
            resolved(known)
            return

        def work() -> None:
            try:
                address = self._look_up(host)
            finally:
                self._free.release()
            resolved(address)

        try:
            self._start(work, "kvtiers-p2p-name")
        except RuntimeError:
            self._free.release()
            resolved(None)

    def __repr__(self) -> str:
        return "<Names>"
