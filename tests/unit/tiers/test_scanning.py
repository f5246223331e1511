from kvtiers.errors import Kind
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.scanning import Scan, StartUpScan
from tests.unit.tiers.tier_kit import ManualClock, ScriptedStore, error


def begun(stored: int = 0) -> tuple[StartUpScan, Scan, ManualClock]:
    scan, clock = StartUpScan("1:fake", 30), ManualClock(100)
    return scan, scan.begin(ScriptedStore(stored=range(stored)), Inbox(), clock), clock


def test_waiting_for_a_lane_is_no_hanging() -> None:
    scan, piece, clock = begun()
    assert scan.hung(1e9) is None
    clock.advance(500)
    piece.run()
    assert scan.hung(600 + 29.9) is None
    assert scan.hung(600 + 30) is piece


def test_a_piece_that_was_taken_in_does_not_hang() -> None:
    scan, piece, _ = begun()
    piece.run()
    assert scan.took(piece) is None
    assert scan.complete
    assert scan.hung(1e9) is None
    assert "complete" in repr(scan)


def test_a_piece_that_was_given_up_goes_on_when_it_returns() -> None:
    scan, piece, _ = begun(stored=4097)
    scan.give_up()
    assert scan.hung(1e9) is None
    piece.run()
    following = scan.took(piece)
    assert following is not None
    assert not scan.complete
    following.run()
    assert scan.took(following) is None
    assert scan.complete


def test_a_failed_scan_is_never_complete() -> None:
    scan, piece, _ = begun()
    piece.error = error(Kind.IO)
    assert scan.took(piece) is None
    assert not scan.complete
