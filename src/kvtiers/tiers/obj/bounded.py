"""A bound for what lies below a prefix, kept by every engine that states one."""

from collections.abc import Callable, Sequence

from kvtiers.chunks import PAGE_BYTES, ChunkLayout
from kvtiers.errors import Kind, KVTiersError, Retry
from kvtiers.tiers.base import Usage
from kvtiers.tiers.complaints import Complaints
from kvtiers.tiers.obj.client import Client
from kvtiers.tiers.obj.maintain import maintain
from kvtiers.tiers.obj.room import Room
from kvtiers.tiers.obj.together import one_by_one
from kvtiers.tiers.options import require
from kvtiers.tiers.places import Aim, Report

LEAST_CHUNKS = 32
"""No bound has room for less; nor is any pack longer than such a part of it."""


def refuse_too_small(layout: ChunkLayout, capacity_bytes: int) -> None:
    """Raise ConfigError if hardly any chunk fits into the bound."""
    least = LEAST_CHUNKS * (layout.slot_bytes + PAGE_BYTES)
    require(
        capacity_bytes >= least,
        "capacity_bytes",
        f"is {capacity_bytes}, less than {LEAST_CHUNKS} chunks with their headers: give at least "
        f"{least}",
    )


class Bounded:
    """Asks for room before each write, and makes some where there is none. Any thread.

    ``begin`` does something in the background; ``evicted`` hears the names of objects that left.
    """

    def __init__(
        self,
        client: Client,
        room: Room,
        complaints: Complaints,
        clocks: tuple[Callable[[], float], Callable[[], float]],
        begin: Callable[[Callable[[], None]], None],
        evicted: Callable[[Sequence[str]], None],
    ) -> None:
        """``clocks``: monotonic, and wall-clock, seconds."""
        self.room = room
        self._client = client
        self._complaints = complaints
        self._clock, self._wall_clock = clocks
        self._begin = begin
        self._evicted = evicted

    def take(self, size: int) -> KVTiersError | None:
        """None if so much may be written, else ``FULL``; then what was written first leaves."""
        if self.room.take(size):
            return None
        self.make_room()
        full = KVTiersError(
            f"{self._client.where}: its capacity_bytes ({self.room.capacity}) are used; what was "
            "written first leaves",
            kind=Kind.FULL,
            retry=Retry.MAY,
            operation="write",
        )
        full.said = True  # it comes and goes, and nothing is wrong
        return full

    def make_room(self) -> None:
        """Count all and have what is too much leave, in the background, unless that is done now."""
        if self.room.begin_count(self._clock()):
            self._begin(self._count)

    def _count(self) -> None:
        left = None
        try:
            report = maintain(
                self._client,
                Aim(max_bytes=self.room.aim),
                one_by_one,
                wall_clock=self._wall_clock,
            )
            left = report.before_bytes - report.bytes
            self._evicted([name for name, _ in (*report.chunks, *report.packs)])
            self._say(report)
        except KVTiersError as e:
            self._complaints.failed("evict", e)
        finally:
            self.room.end_count(left, self._clock())

    def _say(self, report: Report) -> None:
        if report.failed:
            said = f"{len(report.failed)} objects cannot be deleted: {report.problems[0]}"
            error = KVTiersError(said, kind=Kind.IO, operation="evict")
            self._complaints.failed("evict", error)
        else:
            self._complaints.worked("evict")

    def usage(self) -> Usage | None:
        """Of all that lies below the prefix, once it was counted."""
        return Usage(self.room.used, self.room.capacity) if self.room.counted else None

    def check(self) -> None:
        """Raise AssertionError if the sum is wrong."""
        self.room.check()

    def __repr__(self) -> str:
        return f"<Bounded {self.room!r}>"
