"""What is said of a job between host memory and a tier that ended. Pure."""

from collections.abc import Iterable, Sequence

from kvtiers.chunks import Key
from kvtiers.core.ledger import Flight
from kvtiers.errors import Kind
from kvtiers.events import MissReason, Reason, TransferFinished
from kvtiers.tiers.base import JobOutcome
from kvtiers.tiers.misses import miss_of


def finished_event(
    flight: Flight,
    outcome: JobOutcome,
    done: int,
    failed: int,
    now: float,
    reason: Reason | None = None,
) -> TransferFinished:
    """The event that a job ended with; ``reason`` is found in the outcome if it is not given."""
    if reason is None and failed:
        reason = _reason_of([e.kind for e in outcome.failed.values()])
    return TransferFinished(
        flight.hop,
        flight.tier.label,
        done,
        failed,
        outcome.bytes,
        outcome.seconds,
        reason,
        now - flight.started,
    )


def miss_reasons(failed: Iterable[Key], outcome: JobOutcome) -> dict[Key, MissReason]:
    """Why each of the ``failed`` chunks of a promotion did not come."""
    errors = outcome.failed
    return {
        key: miss_of(errors[key].kind) if key in errors else MissReason.FAILED for key in failed
    }


def _reason_of(kinds: Sequence[Kind]) -> Reason:
    """The reason to report for a job that failed with these kinds of error."""
    for kind, reason in (
        (Kind.TIMEOUT, Reason.TIMEOUT),
        (Kind.CORRUPT, Reason.CORRUPT),
        (Kind.VANISHED, Reason.VANISHED),
        (Kind.FULL, Reason.NO_ROOM),
    ):
        if kind in kinds:
            return reason
    return Reason.FAILED
