import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import make_key
from kvtiers.tiers.obj import names
from kvtiers.tiers.obj.names import PackName

NS = "00112233445566778899aabbccddeeff"
PACKS = st.builds(
    PackName, st.integers(0, (1 << 48) - 1), st.integers(0, (1 << 32) - 1), st.integers(1, 99_999)
)


def test_a_chunk_is_called_as_in_a_folder_of_fs():
    key = make_key(bytes.fromhex("ab" * 32), 7)
    assert names.chunk_name(NS, key) == f"{NS}/ab/{'ab' * 32}-g7.kvc"


@given(st.binary(max_size=40), st.integers(0, (1 << 32) - 1))
def test_the_name_of_a_chunk_says_its_key(digest, group):
    key = make_key(digest, group)
    assert names.key_of(NS, names.chunk_name(NS, key)) == key


@pytest.mark.parametrize(
    "name",
    [
        f"{NS}/manifest.json",
        f"{NS}/packs/018c251ec400-00000001-1.kvp",
        f"{NS}/ac/{'ab' * 32}-g7.kvc",  # in the wrong place
        f"{'0' * 32}/ab/{'ab' * 32}-g7.kvc",  # of another namespace
        f"ab/{'ab' * 32}-g7.kvc",
        f"x/{NS}/ab/{'ab' * 32}-g7.kvc",
    ],
)
def test_other_names_are_no_chunks(name):
    assert names.key_of(NS, name) is None


@given(PACKS)
def test_the_name_of_a_pack_says_what_it_is(pack):
    assert names.pack_at(NS, pack.below(NS)) == pack


@given(PACKS, PACKS)
def test_packs_sort_as_their_names_do(a, b):
    if a.time_ms != b.time_ms or a.nonce != b.nonce:
        assert (a < b) == (str(a) < str(b))


@given(PACKS, st.integers(-5, 1 << 49))
def test_listing_since_a_time_leaves_no_later_pack_out(pack, time_ms):
    assert (pack.below(NS) > names.packs_since(NS, time_ms)) == (
        pack.time_ms >= min(time_ms, (1 << 48) - 1)
    )


@pytest.mark.parametrize(
    "name",
    [
        f"{NS}/packs/018c251ec400-00000001-0.kvp",
        f"{NS}/packs/018c251ec400-00000001.kvp",
        f"{NS}/packs/018C251EC400-00000001-1.kvp",
        f"{NS}/packs/018c251ec400-00000001-1.kvp.tmp",
        f"{NS}/other/018c251ec400-00000001-1.kvp",
        f"{'0' * 32}/packs/018c251ec400-00000001-1.kvp",
    ],
)
def test_other_names_are_no_packs(name):
    assert names.pack_at(NS, name) is None


def test_a_new_pack_is_later_than_the_newest_whoevers_clock_is_behind():
    assert names.next_time_ms(2.0, None) == 2000
    assert names.next_time_ms(2.0, PackName(1000, 9, 1)) == 2000
    assert names.next_time_ms(2.0, PackName(5000, 9, 1)) == 5001
    assert names.next_time_ms(-1.0, None) == 0
