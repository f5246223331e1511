from kvtiers.tiers.jobs import MAX_SLICE_BYTES, split
from tests.unit.tiers.tier_kit import CHUNK


def lengths(count: int, lanes: int, min_bytes: int) -> list[int]:
    return [len(part) for part in split([CHUNK] * count, range(count), lanes, min_bytes)]


def test_a_job_of_many_chunks_uses_all_lanes() -> None:
    assert lengths(10, 4, 0) == [2, 3, 2, 3]
    assert lengths(3, 4, 0) == [1, 1, 1]


def test_small_slices_are_not_worth_a_lane() -> None:
    assert lengths(10, 4, 5 * CHUNK) == [5, 5]
    assert lengths(10, 4, 100 * CHUNK) == [10]


def test_a_slice_is_not_so_large_that_other_lanes_wait_for_it() -> None:
    size = MAX_SLICE_BYTES // 2
    parts = split([size] * 8, range(8), 1, 1)
    assert [len(part) for part in parts] == [2] * 4
    parts = split([size] * 8, range(8), 1, 2 * MAX_SLICE_BYTES)
    assert [len(part) for part in parts] == [4] * 2, "unless small slices are not wanted"


def test_nothing_to_do_is_no_slice() -> None:
    assert split([CHUNK] * 3, [], 4, 0) == []


def test_every_chunk_is_in_one_slice() -> None:
    parts = split([CHUNK] * 10, [1, 4, 7, 9], 3, 0)
    assert [i for part in parts for i in part] == [1, 4, 7, 9]
