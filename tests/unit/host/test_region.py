import gc
import mmap
import os
import stat

import numpy as np
import pytest

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.host.limits import Limit
from kvtiers.host.region import HEADER_BYTES, Region, check_capacity
from tests.unit.host.region_kit import RECORD, SLOT, dead, files


def test_a_new_region_is_private_whole_and_allocated(attach, tmp_path):
    region = attach()
    status = os.stat(region.path)
    assert files(tmp_path) == ["kvtiers-a.region"]
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == HEADER_BYTES + 3 * SLOT
    assert status.st_blocks * 512 >= status.st_size
    assert (region.num_slots, region.slot_bytes, region.record) == (3, SLOT, RECORD)
    region.check()


def test_views_are_the_slots_not_copies(attach):
    region = attach()
    slots = np.frombuffer(region.buffer, dtype=np.uint8).reshape(3, SLOT)
    region.view(1, 4, True)[:] = b"abcd"
    assert bytes(slots[1, :4]) == b"abcd"
    slots[2, 0] = 7
    reader = region.view(2, SLOT, False)
    assert reader[0] == 7
    assert reader.readonly
    assert len(reader) == SLOT
    assert not slots[0].any()
    with pytest.raises(TypeError):
        reader[0] = 1


def test_slots_start_on_a_page(attach):
    region = attach()
    assert np.frombuffer(region.buffer, dtype=np.uint8).ctypes.data % mmap.PAGESIZE == 0


@pytest.mark.parametrize(("slot", "nbytes"), [(-1, 1), (3, 1), (0, SLOT + 1), (0, -1)])
def test_a_view_outside_of_its_slot_is_refused(attach, slot, nbytes):
    with pytest.raises(KVTiersError) as caught:
        attach().view(slot, nbytes, True)
    assert caught.value.kind is Kind.BROKEN


def test_attaching_twice_is_the_same_memory(attach):
    one, two = attach(), attach()
    one.view(0, 2, True)[:] = b"hi"
    assert bytes(two.view(0, 2, False)) == b"hi"


def test_open_finds_what_the_workers_made(attach, tmp_path):
    worker = attach()
    with Region.open("a", str(tmp_path)) as scheduler:
        assert (scheduler.num_slots, scheduler.slot_bytes) == (3, SLOT)
        assert scheduler.record == RECORD
        worker.view(2, 1, True)[0] = 9
        assert scheduler.view(2, 1, False)[0] == 9
        scheduler.check()


def test_a_chunk_of_several_slots_stays_within_its_slab(attach):
    region = attach(num_slots=8, slab_slots=4)
    assert repr(region).endswith("8 slots of 8192 bytes in slabs of 4, mapped>")
    region.view(5, 3 * SLOT, True)[:] = b"x" * (3 * SLOT)
    assert bytes(region.buffer[5 * SLOT :]) == b"x" * (3 * SLOT)
    assert set(region.buffer[: 5 * SLOT]) == {0}
    for slot, slots in ((5, 4), (3, 2), (7, 2), (8, 1), (-1, 1)):
        with pytest.raises(KVTiersError, match="are not in <Region"):
            region.view(slot, slots * SLOT, True)


def test_open_without_workers_says_where_they_might_be(tmp_path):
    with pytest.raises(ConfigError, match=r"another host\?.*run them where the scheduler runs"):
        Region.open("a", str(tmp_path))


def test_unlinked_memory_is_still_shared_and_a_new_name_is_new_memory(attach, tmp_path):
    worker = attach()
    scheduler = Region.open("a", str(tmp_path))
    scheduler.unlink()
    scheduler.unlink()
    assert files(tmp_path) == []
    worker.view(0, 1, True)[0] = 5
    assert scheduler.view(0, 1, False)[0] == 5
    worker.check()
    other = attach()
    assert other.view(0, 1, False)[0] == 0
    scheduler.unlink()
    assert files(tmp_path) == ["kvtiers-a.region"], "a later engine's file of this name stays"
    scheduler.close()


def test_close_twice_then_everything_is_refused(attach):
    region = attach()
    region.close()
    region.close()
    region.check()
    assert repr(region).endswith("3 slots of 8192 bytes, closed>")
    for use in (lambda: region.view(0, 1, False), lambda: region.buffer, region.unlink):
        with pytest.raises(KVTiersError) as caught:
            use()
        assert caught.value.kind is Kind.CLOSED


@pytest.mark.parametrize("whole", [True, False], ids=["buffer", "view"])
def test_close_leaves_the_memory_to_views_in_use(tmp_path, whole):
    region = Region.attach("a", RECORD, 3, SLOT, str(tmp_path))
    path = region.path
    array = np.frombuffer(region.buffer if whole else region.view(0, 8, True), dtype=np.uint8)
    region.close()
    array[0] = 3
    assert array[0] == 3
    assert not dead(path), "a sweep must not take memory that is in use"
    del array, region
    gc.collect()
    assert dead(path)


def test_the_context_manager_closes(tmp_path):
    with Region.attach("a", RECORD, 1, SLOT, str(tmp_path)) as region:
        assert repr(region).endswith("1 slots of 8192 bytes, mapped>")
    assert dead(region.path)


def test_check_notices_a_header_that_changed(attach):
    region = attach()
    with open(region.path, "r+b") as file:
        start = file.read(HEADER_BYTES)
        file.seek(0)
        file.write(start.replace(b"bfloat16", b"xfloat16"))
    with pytest.raises(AssertionError, match="not the one that was joined"):
        region.check()


PLENTY = {
    "space": lambda directory: 1 << 50,
    "memory": lambda: 1 << 50,
    "limits": lambda: [],
}


@pytest.mark.parametrize(
    ("capacity", "slots"),
    [(SLOT, 1), (2 * SLOT - 1, 1), (2 * SLOT, 2), (1 << 40, (1 << 40) // SLOT)],
)
def test_capacity_is_counted_in_whole_slots(capacity, slots):
    assert check_capacity(capacity, SLOT, **PLENTY) == slots


def test_less_than_one_chunk_says_what_a_chunk_needs():
    with pytest.raises(ConfigError, match=f"less than one chunk: give it at least {SLOT} bytes"):
        check_capacity(SLOT - 1, SLOT, **PLENTY)


def test_more_than_the_folder_has_free_is_refused(tmp_path):
    needed = HEADER_BYTES + 2 * SLOT

    def ask(free):
        enough = {**PLENTY, "space": lambda folder: free}
        return check_capacity(2 * SLOT, SLOT, str(tmp_path), **enough)

    assert ask(needed) == 2
    with pytest.raises(ConfigError) as caught:
        ask(needed - 1)
    assert f"cpu_bytes_to_use needs {needed} bytes, but {tmp_path} has {needed - 1}" in str(
        caught.value
    )


def test_more_than_the_memory_available_is_refused():
    needed = HEADER_BYTES + 2 * SLOT

    def ask(available):
        return check_capacity(2 * SLOT, SLOT, **{**PLENTY, "memory": lambda: available})

    assert ask(needed) == 2
    with pytest.raises(ConfigError, match=f"has {needed - 1} bytes of memory available: lower it"):
        ask(needed - 1)


def test_more_than_a_container_allows_is_refused_with_the_limit():
    needed = HEADER_BYTES + 2 * SLOT

    def ask(*left):
        limits = [Limit(f"/group{i}/memory.max", n) for i, n in enumerate(left)]
        return check_capacity(2 * SLOT, SLOT, **{**PLENTY, "limits": lambda: limits})

    assert ask(needed, 1 << 50) == 2
    with pytest.raises(ConfigError) as caught:
        ask(needed - 1, needed - 2, needed)
    assert (
        f"the memory limit /group1/memory.max of this container or control group leaves "
        f"{needed - 2} bytes: lower it, or raise that limit"
    ) in str(caught.value)


def test_a_rank_that_asks_after_the_first_one_attached_gets_the_same_answer(attach, tmp_path):
    attach("a", num_slots=3)
    nothing_left = {
        "space": lambda directory: 0,
        "memory": lambda: 0,
        "limits": lambda: [Limit("/memory.max", 0)],
    }
    assert check_capacity(3 * SLOT, SLOT, str(tmp_path), name="a", **nothing_left) == 3
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        check_capacity(3 * SLOT, SLOT, str(tmp_path), name="other", **nothing_left)


def test_the_real_machine_is_asked(tmp_path):
    assert check_capacity(SLOT, SLOT, str(tmp_path)) == 1
    with pytest.raises(ConfigError, match="bytes free: lower it, or enlarge"):
        check_capacity(1 << 60, SLOT, str(tmp_path))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be had from .*absent.*mount a tmpfs there"):
        check_capacity(SLOT, SLOT, str(tmp_path / "absent"))
