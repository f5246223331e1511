"""Payloads byte for byte as vLLM 0.32 made them, and what other publishers and liars send."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.kvevents.messages import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    MalformedEvent,
    decode,
    encode,
    encode_within,
)

STORED = bytes.fromhex(
    "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f"
    "72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000"
)
REMOVED = bytes.fromhex(
    "93cb00000000000000009183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739100a66d"
    "656469756da343505500"
)
GOLDEN = {
    STORED: Batch(1.5, [BlockStored([1, 2], None, [1, 2, 3, 4], 2, medium="GPU")], 0),
    REMOVED: Batch(0.0, [BlockRemoved([0], "CPU")], 0),
}


@pytest.mark.parametrize("payload", GOLDEN)
def test_bytes_are_those_of_vllm(payload: bytes) -> None:
    assert encode(GOLDEN[payload]) == payload
    assert decode(payload) == GOLDEN[payload]


def one_by_one(events: Iterable[object]) -> Iterator[object]:
    """Block by block what the events say."""
    for e in events:
        for i, block in enumerate(getattr(e, "block_hashes", [e])):
            if not isinstance(e, BlockStored):
                yield type(e), block
                continue
            size, parent = e.block_size, e.block_hashes[i - 1] if i else e.parent_block_hash
            extra = e.extra_keys and e.extra_keys[i]
            yield block, parent, e.token_ids[i * size : i * size + size], extra, e.medium


@pytest.mark.parametrize("max_bytes", [1, 250, 1000, 100_000])
def test_a_batch_is_cut_by_bytes_and_says_the_same(max_bytes: int) -> None:
    extra = [["salt", i] for i in range(30)]
    events = [
        BlockStored([*range(10, 40)], 9, [*range(120)], 4, medium="CPU", extra_keys=extra),
        BlockStored([7], None, [], 0, medium="STORAGE"),
        BlockRemoved([*range(1 << 60, (1 << 60) + 99)], "CPU"),
        AllBlocksCleared(),
    ]
    whole = Batch(2.5, events, 3)
    payloads = [*encode_within(whole, max_bytes)]
    batches = [*map(decode, payloads)]
    assert {(b.time, b.rank) for b in batches} == {(2.5, 3)}
    assert [*one_by_one(e for b in batches for e in b.events)] == [*one_by_one(events)]
    for payload, batch in zip(payloads, batches, strict=True):
        assert len(payload) <= max_bytes or len([*one_by_one(batch.events)]) == 1
    assert (len(batches) == 1) is (len(encode(whole)) <= max_bytes)


def test_everything_that_can_be_said_comes_back() -> None:
    batch = Batch(
        2.0,
        [
            BlockStored(
                [b"\x01" * 32, 2**64 - 1],
                b"\x02" * 32,
                [7, 8],
                1,
                3,
                "STORAGE",
                "ad",
                [["ad", ["img", 4]], None],
                1,
                "sliding_window",
                128,
                "REMOTE",
                "2:obj",
                "s",
            ),
            BlockRemoved([5], "STORAGE", 1, "REMOTE", "2:obj"),
            AllBlocksCleared(),
        ],
        7,
    )
    assert decode(encode(batch)) == batch


def test_arrays_of_older_publishers_are_read() -> None:
    array = ["BlockStored", [1], None, [1, 2], 2, None, "GPU"]
    read = decode(msgspec.msgpack.encode([1.0, [array, ["AllBlocksCleared"]]]))
    stored = BlockStored([1], None, [1, 2], 2, medium="GPU")
    assert read == Batch(1.0, [stored, AllBlocksCleared()])


def test_what_is_new_is_left_out_and_counted() -> None:
    new = {"type": "TierBlocksCleared", "tier": 1}
    known = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "reason": "evicted"}
    read = decode(msgspec.msgpack.encode([1.0, [new, known], None]))
    assert read == Batch(1.0, [BlockRemoved([1], "CPU")], None, unknown=1)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        [1.0],
        ["now", []],
        [1.0, [], 0, 0],
        [1.0, [], "first"],
        [1.0, [7]],
        [1.0, [[]]],
        [1.0, [{"block_hashes": [1]}]],
        [1.0, [{"type": "BlockStored", "block_hashes": [1]}]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": ["x"], "medium": None}]],
        [1.0, [["BlockRemoved", 5]]],
    ],
)
def test_what_is_not_whole_is_refused(value: object) -> None:
    with pytest.raises(MalformedEvent):
        decode(msgspec.msgpack.encode(value))


@given(
    st.binary(max_size=200)
    | st.sampled_from(sorted(GOLDEN)).flatmap(
        lambda good: st.tuples(
            st.integers(0, len(good) - 1), st.binary(min_size=1, max_size=9)
        ).map(lambda cut: good[: cut[0]] + cut[1] + good[cut[0] + len(cut[1]) :])
    )
)
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    with suppress(MalformedEvent):
        decode(payload)
