from kvtiers.tiers.base import Job, JobKind
from kvtiers.tiers.jobs import split
from tests.unit.tiers.tier_kit import CHUNK, filled, key


def job(count: int) -> Job:
    keys = tuple(key(n) for n in range(count))
    return Job(1, JobKind.STORE, keys, tuple(range(count)), tuple(filled(n) for n in range(count)))


def sizes(count: int, lanes: int, min_bytes: int) -> list[int]:
    return [len(run) for run in split(job(count), range(count), lanes, min_bytes)]


def test_a_job_of_many_chunks_uses_all_lanes() -> None:
    assert sizes(10, 4, 0) == [2, 3, 2, 3]
    assert sizes(3, 4, 0) == [1, 1, 1]


def test_small_slices_are_not_worth_a_lane() -> None:
    assert sizes(10, 4, 5 * CHUNK) == [5, 5]
    assert sizes(10, 4, 100 * CHUNK) == [10]


def test_nothing_to_do_is_no_slice() -> None:
    assert split(job(3), [], 4, 0) == []


def test_every_chunk_is_in_one_slice() -> None:
    runs = split(job(10), [1, 4, 7, 9], 3, 0)
    assert [item.key for run in runs for item in run] == [key(n) for n in (1, 4, 7, 9)]
