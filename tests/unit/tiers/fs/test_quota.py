"""The account of a root: whatever is granted, spent, lost and counted, it is never too low."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_hexdigest

from kvtiers.tiers.fs.quota import MAX_PORTION, RESERVED_BYTES, STATE_BYTES, Quota, from_bytes

ONE, TWO = "0" * 32 + "/tmp/1-a", "0" * 32 + "/tmp/2-b"


def account(capacity: int, claimed: int | None = 0) -> Quota:
    quota = Quota(claimed)
    quota.meet(ONE, capacity + RESERVED_BYTES, 0, 0)
    return quota


def test_nothing_is_granted_before_somebody_counted() -> None:
    quota = account(1000, claimed=None)
    assert quota.grant(ONE, 1) == 0
    quota.counted(900, quota.begin_count(), at=1.5)
    assert quota.grant(ONE, 101) == 0
    assert quota.grant(ONE, 100) == 100
    assert quota.available() == 0


def test_a_large_capacity_is_granted_in_portions_that_several_can_have() -> None:
    quota = account(64 * 100)
    assert quota.portion(1) == (64 * 100 + RESERVED_BYTES) // 64
    quota.meet(TWO, 1 << 60, 0, 0)
    assert quota.portion(1) == (64 * 100 + RESERVED_BYTES) // 128
    assert quota.portion(5000) == 5000
    assert account(1 << 50).portion(1) == MAX_PORTION


def test_the_smallest_capacity_of_a_living_engine_rules() -> None:
    quota = account(1000)
    quota.meet(TWO, 500 + RESERVED_BYTES, 0, 0)
    assert quota.available() == 500
    quota.leave(TWO)
    assert quota.available() == 1000
    quota.leave(ONE)
    assert quota.available() == 0
    assert quota.stated == 500 + RESERVED_BYTES


def test_a_dead_engines_grant_is_claimed_until_a_count() -> None:
    quota = account(1000)
    quota.grant(ONE, 300)
    quota.meet(TWO, 1000 + RESERVED_BYTES, 0, 0)
    quota.bury([ONE])
    assert quota.suspect
    assert quota.available() == 700
    quota.counted(100, quota.begin_count(), at=1.5)
    assert quota.available() == 900
    assert not quota.suspect


def test_the_file_survives_and_a_damaged_one_says_that_nobody_has_counted() -> None:
    quota = account(1000, claimed=12)
    quota.meet(TWO, None, 0, 0)
    quota.cleaning_until = 5.5
    text = quota.to_bytes()
    assert len(text) == STATE_BYTES
    assert from_bytes(text) == quota
    assert from_bytes(text + b" " * STATE_BYTES) == quota
    for damaged in (b"", text[:-3000][:50], text.replace(b"12", b"13"), b"\xff" * 4096, b"{}"):
        assert from_bytes(damaged) == Quota()


@pytest.mark.parametrize(
    "body",
    [
        b'{"claimed":-1000000,"granted":0,"suspect":false,"counted_at":0,"cleaning_until":0,'
        b'"stated":null,"members":{}}',
        b'{"claimed":0,"granted":0,"suspect":false,"counted_at":NaN,"cleaning_until":0,'
        b'"stated":null,"members":{}}',
        b'{"claimed":0,"granted":Infinity,"suspect":false,"counted_at":0,"cleaning_until":0,'
        b'"stated":null,"members":{}}',
        b'{"members":[]}',
        b"[" * 100_000,
    ],
)
def test_a_file_that_says_nonsense_says_that_nobody_has_counted(body: bytes) -> None:
    assert from_bytes(xxh3_64_hexdigest(body).encode() + b" " + body).claimed is None
    assert not from_bytes(xxh3_64_hexdigest(body).encode() + b" " + body).members


def test_names_that_lead_elsewhere_are_no_members() -> None:
    quota = account(1000)
    quota.meet("../../etc/tmp/1-a", 5, 0, 0)
    assert list(from_bytes(quota.to_bytes()).members) == [ONE]


def test_the_file_grows_by_pages_for_many_engines() -> None:
    quota = account(1000)
    for n in range(100):
        quota.meet(f"{'0' * 32}/tmp/{n}-x", 1000, 0, 0)
    assert len(quota.to_bytes()) % STATE_BYTES == 0
    assert from_bytes(quota.to_bytes()) == quota


class Disk(RuleBasedStateMachine):
    """Writers beside a real sum of what they wrote; counts that take their time."""

    CAPACITY = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.quota = Quota()
        self.disk = 0
        self.free: dict[str, int] = {}
        self.owed: dict[str, int] = {}
        self.promised: dict[str, int] = {}
        self.counts: list[list[int]] = []
        """Of each walk: the least that it can have seen, and what it was told before."""
        self.born = 0

    def turn(self, name: str) -> None:
        held, freed = self.free[name] + self.promised[name], self.owed[name]
        self.quota.meet(name, self.CAPACITY + RESERVED_BYTES, held, freed)
        self.owed[name] = 0

    def some(self, data: st.DataObject) -> str | None:
        return data.draw(st.sampled_from(sorted(self.free))) if self.free else None

    @rule()
    def join(self) -> None:
        self.born += 1
        name = f"{'0' * 32}/tmp/{self.born}-x"
        self.free[name] = self.owed[name] = self.promised[name] = 0
        self.turn(name)

    @rule(data=st.data(), size=st.integers(1, 3000))
    def take(self, data: st.DataObject, size: int) -> None:
        if (name := self.some(data)) is not None:
            self.turn(name)
            self.free[name] += self.quota.grant(name, size)

    @rule(data=st.data(), size=st.integers(1, 3000))
    def write_begins(self, data: st.DataObject, size: int) -> None:
        if (name := self.some(data)) is not None and self.free[name] >= size:
            self.free[name] -= size
            self.promised[name] += size
            self.disk += size

    @rule(data=st.data(), works=st.booleans())
    def writes_end(self, data: st.DataObject, works: bool) -> None:
        if (name := self.some(data)) is not None:
            size, self.promised[name] = self.promised[name], 0
            if not works:
                self.disk -= size
                self.owed[name] += size

    @rule(data=st.data(), size=st.integers(1, 3000))
    def evict(self, data: st.DataObject, size: int) -> None:
        name = self.some(data)
        settled = self.disk - sum(self.promised.values())
        if name is not None and settled >= size:
            self.turn(name)
            self.delete(size)
            self.quota.free(size)

    def delete(self, size: int) -> None:
        """And every walk came too late to see it."""
        self.disk -= size
        for count in self.counts:
            count[0] = max(0, count[0] - size)

    @rule(size=st.integers(1, 3000))
    def strangers_delete(self, size: int) -> None:
        self.delete(min(size, self.disk - sum(self.promised.values())))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if (name := self.some(data)) is not None:
            self.disk -= self.promised[name]  # its temporary files are swept
            self.quota.bury([name])
            for sums in (self.free, self.owed, self.promised):
                del sums[name]

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if (name := self.some(data)) is not None:
            self.disk -= self.promised[name]
            self.turn(name)
            self.quota.leave(name)
            for sums in (self.free, self.owed, self.promised):
                del sums[name]

    @rule(data=st.data())
    def count_begins(self, data: st.DataObject) -> None:
        if (name := self.some(data)) is not None:
            self.turn(name)
            settled = self.disk - sum(self.promised.values())
            self.counts.append([settled, self.quota.begin_count()])

    @rule(unlisted=st.integers(0, 1000))
    def count_ends(self, unlisted: int) -> None:
        if self.counts and (self.quota.claimed is not None or not unlisted):
            found, before = self.counts.pop()
            found = max(0, found - unlisted)
            self.quota.counted(found, before, at=0.0, whole=not unlisted)

    @rule()
    def reread(self) -> None:
        self.quota = from_bytes(self.quota.to_bytes())

    @invariant()
    def never_too_low(self) -> None:
        self.quota.check()
        assert self.disk <= self.CAPACITY
        if self.quota.claimed is not None:
            assert self.disk + sum(self.free.values()) <= self.quota.claimed


TestDisk = Disk.TestCase
TestDisk.settings = settings(max_examples=200, stateful_step_count=40)
