"""Call 1 fails, call 2 fails, ... until a run has no fault in it: the promises hold in each.

Whatever fails: every job has one outcome that divides its keys, what is done is right, nothing
is raised on the scheduler thread, and when the fault has passed all can be stored and loaded.
"""

import itertools

import pytest

from kvtiers.chunks import Lookup
from kvtiers.errors import Kind, Retry
from kvtiers.testing import Fault, FaultyStore, StoreTierLaws, When
from kvtiers.testing.rig import must_be_right
from kvtiers.testing.values import keys
from kvtiers.tiers.base import FollowsSteps
from tests.laws.test_fs import TestFs as FsLaws
from tests.laws.test_memory import TestMemory as MemoryLaws

LAWS = {"memory": MemoryLaws, "fs": FsLaws}
OPERATIONS = ("contains", "write", "read", "delete", "scan", "touch", "close")
del FsLaws, MemoryLaws


def run_with(laws, faults, place):
    """A short life of a tier over a store that fails; the faulty store, to see what struck."""
    made = []

    def faulty(_, place, context):
        made.append(FaultyStore(laws().make(place, context), faults))
        return made[-1]

    with tier_of(type("Faulty", (laws,), {"make": faulty}))._open(place) as rig:
        live(rig)
        rig.tier.check()
    assert len(made) == 1
    made[0].inner.check()
    return made[0]


def live(rig):
    assert isinstance(rig.tier, FollowsSteps)
    names = keys("a", "b", "c", "d", group=1)
    for some in (names[:2], names[1:3]):
        one_job(rig, rig.store_job(some))
    assert set(rig.resolve(names)) <= {Lookup.HIT, Lookup.MISS}
    rig.tier.touch(names)
    for some in (names[:1], names):
        one_job(rig, rig.load_job(some))
    rig.clock.advance(600)  # beyond every denial and every cooldown
    one_job(rig, rig.store_job(names[2:]))
    replayed = rig.contents()
    assert set(replayed.values()) <= {0, 1}


def one_job(rig, given):
    if not rig.submit(given):
        return  # the tier is out: a refused job has no outcome
    (outcome,) = rig.outcomes([given])
    must_be_right(given, outcome)
    rig.tier.check()


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("sticky", [False, True], ids=["transient", "sticky"])
@pytest.mark.parametrize(
    ("kind", "retry", "raises"),
    [
        (Kind.IO, Retry.NEVER, False),
        (Kind.IO, Retry.MAY, False),
        (Kind.FULL, Retry.MAY, False),
        (Kind.BROKEN, Retry.NEVER, True),
    ],
    ids=["io", "io-may-pass", "full", "raises"],
)
def test_whatever_call_fails_the_promises_hold(name, when, sticky, kind, retry, raises, tmp_path):
    struck = []
    for operation in OPERATIONS:
        for n in itertools.count(1):
            assert n < 50, f"{operation} is called without end"
            fault = Fault(kind, operation, when, n, sticky, raises=raises, retry=retry)
            place = tmp_path / f"{operation}-{n}"
            place.mkdir()
            store = run_with(LAWS[name], [fault], place)
            if not store.struck:
                break
            struck.append(operation)
            with tier_of(LAWS[name])._open(place) as rig:
                rig.store(keys("a", "b", "c", "d", group=1))
                rig.must_hold(keys("a", "b", "c", "d", group=1))
    assert {"write", "read", "scan", "touch", "close"} <= set(struck)


def tier_of(laws):
    return type("On", (StoreTierLaws,), {"store_laws": laws})()
