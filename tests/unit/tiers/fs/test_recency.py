from pathlib import Path

import pytest

from kvtiers.tiers.fs import stamps
from kvtiers.tiers.fs.recency import Recency
from tests.unit.tiers.tier_kit import ManualClock, key


class Bench:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stamped: list[str] = []
        self.clock = ManualClock()
        monkeypatch.setattr(stamps, "move_up", lambda path, at: self.stamped.append(path))
        self.recency = Recency(lambda k: str(tmp_path / k.hex()), self.clock)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_uses_are_bounded_in_keys_and_the_oldest_are_forgotten(bench: Bench) -> None:
    for n in range(0, 150_000, 1000):
        bench.recency.note([key(n + i) for i in range(1000)], 1.0)
    bench.recency.check()
    assert "100000 uses" in repr(bench.recency)
    bench.recency.apply()
    known = [n for n in range(150_000) if bench.recency.used_at(key(n))]
    assert known == list(range(51_024, 58_192)), "the first ones are stamped"
    bench.recency.finish()
    assert len(bench.stamped) == 8192 + 1024
    assert bench.stamped[-1].endswith(key(149_999).hex())


def test_one_write_sets_the_times_of_a_few_files_only(bench: Bench) -> None:
    bench.recency.note([key(n) for n in range(3000)], 1.0)
    bench.recency.apply()
    assert bench.stamped == []
    bench.clock.advance(10)
    for total in (1024, 2048, 3000, 3000):
        bench.recency.apply()
        assert len(bench.stamped) == total
    bench.recency.check()


def test_a_file_used_often_gets_one_time(bench: Bench) -> None:
    for at in range(100):
        bench.recency.note([key(1)], float(at))
    bench.recency.finish()
    assert len(bench.stamped) == 1
