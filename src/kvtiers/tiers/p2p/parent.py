"""What serving peers needs of the engine it runs beside: its chunks, wherever they are.

All calls are made on the serving thread, but for ``listen``. None waits for a disk or a peer.
``kvtiers.core.serving`` meets it with a manager.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvtiers.chunks import Key, Lookup
from kvtiers.tiers.views import ChunkViews


class Pin(Protocol):
    """Chunks that stay in host memory, and as they are, until they are let go."""

    @property
    def keys(self) -> Sequence[Key]:
        """Which."""

    @property
    def views(self) -> ChunkViews:
        """Where, in the same order; read-only. Dead once host memory was reset."""


class Parent(Protocol):
    """An engine's chunks, for others."""

    max_keys: int
    """How many chunks ``pin`` takes at once."""

    @property
    def room(self) -> int:
        """How many chunks more can be pinned now, of those that are not."""

    def ask(self, keys: Sequence[Key], request: str) -> list[Lookup]:
        """The verdict on each; what lies below host memory begins its way up, for ``request``.

        A HIT is in host memory now, and may be gone before it is pinned.
        """

    def end(self, request: str) -> None:
        """Nothing more is asked for ``request``. Unknown ones are fine."""

    def pin(self, keys: Sequence[Key]) -> Pin | None:
        """Keep those that are in host memory, as far as there is room; None if none is.

        Caller guarantees: there are no more than ``max_keys``.
        """

    def release(self, pin: Pin) -> None:
        """Let go. Caller guarantees: nobody reads its views any more. Once for each pin."""

    def advance(self) -> None:
        """Let what was asked for go on, though the engine may be idle."""

    def listen(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called, on any thread, when chunks may have come into host memory."""


@runtime_checkable
class ServesPeers(Protocol):
    """What ``kvtiers.wiring`` looks for among the tiers: one that gives chunks to other engines."""

    max_pinned_fraction: float
    """The share of host memory that may be kept for peers."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which peers reach this engine."""

    def serve(self, parent: Parent) -> None:
        """Answer peers from these chunks; before it, every chunk is absent for them. Once."""
