from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers.fs.quota import Ledger


def test_files_found_leave_in_order_of_use() -> None:
    ledger = Ledger(100)
    ledger.load([(3.0, "c", 30), (1.0, "a", 30), (2.0, "b", 30)], other_bytes=10)
    assert ledger.used == 100
    assert ledger.evict(40) == [("a", 30), ("b", 30)]
    assert ledger.evict(0) == []
    assert not ledger.holds("a")
    ledger.check()


def test_nothing_leaves_when_it_would_not_help() -> None:
    ledger = Ledger(100)
    ledger.load([(1.0, "a", 30), (2.0, "b", 30), (3.0, "c", 30)], other_bytes=0)
    ledger.begin("a")
    assert ledger.evict(80, keep={"b"}) is None
    assert len(ledger) == 3
    ledger.end("a")
    assert ledger.evict(70, keep={"b"}) == [("a", 30), ("c", 30)]


def test_replacing_a_file_counts_it_once() -> None:
    ledger = Ledger(100)
    for token in ("t1", "t2"):
        ledger.promise(token, 40)
    ledger.keep_promise("t1", "a")
    ledger.keep_promise("t2", "a")
    ledger.break_promise("t2")
    assert ledger.used == 40
    ledger.check()


@given(st.lists(st.tuples(st.sampled_from("wfdtuq"), st.integers(0, 5), st.integers(1, 40))))
def test_sums_hold_and_the_capacity_is_kept(steps: list[tuple[str, int, int]]) -> None:
    ledger, used = Ledger(100), set[str]()
    for step, n, size in steps:
        name = f"f{n}"
        if step in "wf" and ledger.evict(size) is not None:
            ledger.promise("t", size)
            if step == "w":
                ledger.keep_promise("t", name)
            ledger.break_promise("t")
        elif step == "d":
            ledger.gone(name)
        elif step == "t":
            ledger.touch(name)
        elif step == "u":
            act = ledger.end if name in used else ledger.begin
            act(name)
            used ^= {name}
        elif step == "q" and ledger.holds(name):
            ledger.put_last(name, 1)
        ledger.check()
        assert ledger.used <= 100
