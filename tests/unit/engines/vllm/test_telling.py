"""What is said of a chunk is what GPU events say of the same blocks."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvtiers.chunks import make_key
from kvtiers.config import parse_config
from kvtiers.engines.vllm.describing import materialize
from kvtiers.engines.vllm.telling import ReadyEvents, build_tracker
from kvtiers.events import PRIMARY, ChunksFound, ChunksRemoved, ChunksStored, Reason
from kvtiers.hashing import event_hash
from kvtiers.kvevents.spans import Place

PLACES = {PRIMARY: Place("CPU", "LOCAL", PRIMARY), "1:fs": Place("STORAGE", "LOCAL", "1:fs")}


def digest(n):
    return bytes([n]) * 32


def request(tokens=64, per_hash=4, **facts):
    """A request as vLLM has it, with a hash for each ``per_hash`` tokens."""
    plain = {"mm_features": [], "lora_request": None, "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(
        request_id="r",
        all_token_ids=[*range(tokens)],
        block_hashes=[digest(n + 1) for n in range(tokens // per_hash)],
        **(plain | facts),
    )


def group(blocks=1, per_block=8, per_hash=4, idx=0, kind="full_attention", window=None):
    return SimpleNamespace(
        group_idx=idx,
        tokens_per_block=per_block,
        tokens_per_chunk=blocks * per_block,
        hashes_per_chunk=blocks * per_block // per_hash,
        kv_event_group_spec=SimpleNamespace(
            kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window
        ),
    )


@pytest.fixture
def tracker():
    made = []

    def build(config, extra=None, algorithm="sha256", places=PLACES):
        settings = parse_config(
            {"cpu_bytes_to_use": 1, "self_describing_kv_events": True, **(extra or {})}
        )
        made.append(build_tracker(settings, places, [config], "n", algorithm))
        return made[-1]

    yield build
    for each in made:
        each.announcer.close(10)


def said(tracker):
    """What vLLM takes once all is said."""
    assert tracker.announcer.flush(20)
    return [*tracker.take_events(())]


def test_blocks_of_a_chunk_with_their_parent(tracker):
    config = group(blocks=2)
    it = tracker(config)
    key = make_key(digest(8), 0)
    it.record_store(request(), config, 1, key)
    it.announcer(ChunksStored(PRIMARY, (key,)))
    (event,) = said(it)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [event_hash(digest(6)), event_hash(digest(8))]
    assert event.parent_block_hash == event_hash(digest(4))
    assert event.token_ids == [*range(16, 32)]
    assert (event.block_size, event.medium, event.group_idx) == (8, "CPU", 0)
    assert event.kv_cache_spec_kind == "full_attention"
    assert event.extra_keys is None
    it.announcer(ChunksRemoved(PRIMARY, (key,), Reason.EVICTED))
    (gone,) = said(it)
    assert isinstance(gone, BlockRemoved)
    assert gone.block_hashes == event.block_hashes
    assert not it.pending


def test_salt_adapter_and_pictures(tracker):
    config = group(blocks=2)
    it = tracker(config)
    picture = SimpleNamespace(identifier="pic", mm_position=SimpleNamespace(offset=10, length=3))
    adapter = SimpleNamespace(lora_name="ad", name="ad", lora_path="/p", adapter_id=3)
    asked = request(cache_salt="s", lora_request=adapter, mm_features=[picture])
    keys = [make_key(digest(4), 0), make_key(digest(8), 0)]
    for n, key in enumerate(keys):
        it.record_store(asked, config, n, key)
    it.announcer(ChunksStored(PRIMARY, tuple(keys)))
    (event,) = said(it)
    assert (event.lora_id, event.lora_name) == (3, "ad")
    plain = [[list(k) if isinstance(k, tuple) else k for k in block] for block in event.extra_keys]
    assert plain == [["ad", "s"], ["ad", ["pic", 2]], ["ad"], ["ad"]]


def test_windows_and_states_that_end_within_a_block(tracker):
    config = group(per_block=32, kind="mamba")
    it = tracker(config)
    key = make_key(digest(5), 0)
    it.record_partial_store(request(), config, 20, key)
    it.announcer(ChunksStored(PRIMARY, (key,)))
    (event,) = said(it)
    assert (event.block_size, event.token_ids) == (4, [*range(20)])
    assert event.kv_cache_spec_kind == "mamba"
    it.record_partial_lookup(request(), config, 20, make_key(digest(9), 0))
    assert not it.announcer.notes._captured, "nobody wants it"


def test_what_another_engine_stored_is_described_by_who_asks_for_it(tracker):
    config = group()
    it = tracker(config)
    key = make_key(digest(2), 0)
    it.announcer(ChunksFound("1:fs", (key,)))
    (bare,) = said(it)
    assert bare.token_ids == []
    it.record_lookup(request(), config, 0, key)
    back, whole = said(it)
    assert (type(back), whole.token_ids) == (BlockRemoved, [*range(8)])
    it.record_lookup(request(), config, 0, key)
    assert said(it) == []


def test_hashes_only_capture_nothing(tracker):
    config = group()
    it = tracker(config, {"self_describing_kv_events": False})
    key = make_key(digest(2), 0)
    it.record_store(request(), config, 0, key)
    it.record_partial_store(request(), config, 4, key)
    assert not it.announcer.notes._captured
    it.announcer(ChunksStored(PRIMARY, (key,)))
    (event,) = said(it)
    assert (event.token_ids, event.block_hashes) == ([], [event_hash(digest(2))])


@pytest.mark.parametrize("lacks", ["tokens", "hashes", "a hash"])
def test_a_request_that_does_not_know_is_passed_over(tracker, lacks):
    config, asked = group(), request()
    if lacks == "tokens":
        del asked.all_token_ids[4:]
    elif lacks == "hashes":
        del asked.block_hashes[1:]
    else:
        asked.block_hashes[1] = None
    it = tracker(config)
    it.record_store(asked, config, 0, make_key(digest(2), 0))
    assert materialize(tuple(it.announcer.notes._captured))[1] is None


def test_descriptions_are_kept_where_asked_for_or_beside_the_disk(tracker, tmp_path):
    disk = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": 1 << 20}
    it = tracker(group(), {"secondary_tiers": [disk]})
    assert str(tmp_path / "kv" / ".kv-events" / "n") in repr(it)
    asked = {"kv_event_descriptions_directory": str(tmp_path / "told")}
    it = tracker(group(), {"secondary_tiers": [disk], **asked})
    assert str(tmp_path / "told" / "n") in repr(it)


def test_random_hashes_are_not_kept(tracker, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    asked = {"kv_event_descriptions_directory": str(tmp_path)}
    assert "without a name" in repr(tracker(group(), asked, algorithm="xxhash"))


def test_a_folder_that_cannot_be_used_is_said(tracker, tmp_path, caplog):
    (tmp_path / "n").write_text("in the way")
    it = tracker(group(), {"kv_event_descriptions_directory": str(tmp_path)})
    assert "will not outlive this process" in caplog.text
    assert "without a name" in repr(it)


def test_no_more_is_taken_than_was_said():
    ready = ReadyEvents()
    ready.check()
    assert repr(ready) == "<ReadyEvents 0>"
    ready._taken = 1
    with pytest.raises(AssertionError, match="more was taken than was said"):
        ready.check()


@pytest.mark.parametrize("tiers", [["obj"], ["kv", "obj"]])
def test_descriptions_that_would_not_outlive_the_engine_are_said(tracker, tmp_path, caplog, tiers):
    labels = [f"{n}:{name}" for n, name in enumerate(tiers, start=1)]
    places = {PRIMARY: Place("CPU")} | {n: Place("STORAGE", "REMOTE", n) for n in labels}
    tracker(group(), {"kv_event_descriptions_directory": str(tmp_path)}, places=places)
    tracker(group(), places={PRIMARY: Place("CPU")})
    assert caplog.text == "", "they do, or nothing does that they describe"
    tracker(group(), places=places)
    (record,) = caplog.records
    assert f"what is in {', '.join(labels)} tell hashes only" in record.getMessage()
    assert "kv_event_descriptions_directory" in record.getMessage()
