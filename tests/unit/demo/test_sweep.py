from kvtiers.demo.history import characters
from kvtiers.demo.plan import BLOCK_TOKENS, MAX_MODEL_LEN, Mode, ModelGeometry
from kvtiers.demo.sweep import DEVICE_BLOCKS, HOST_CHUNKS, POOLS, pool_visits, sweep_plan

SMOL = ModelGeometry(layers=30, kv_heads=3, head_size=64)


def _chunks(requests):
    # 4 to 4.9 characters a token.
    sizes = [characters(r.messages) for r in requests]
    return sum(s / 4.9 // BLOCK_TOKENS for s in sizes), sum(s / 4 // BLOCK_TOKENS for s in sizes)


def test_pools_fit_what_they_claim_to_fit():
    (_, device), (least, host), (neither, _) = (_chunks(second) for _, second in pool_visits())
    assert device < DEVICE_BLOCKS < least
    assert host < HOST_CHUNKS < neither
    assert DEVICE_BLOCKS * BLOCK_TOKENS > MAX_MODEL_LEN


def test_pools_share_no_conversation():
    seen = [r.messages[0].content for first, _ in pool_visits() for r in first]
    assert len(seen) == sum(p.conversations for p in POOLS)
    assert len({text[:80] for text in seen}) == len(seen)


def test_configurations_differ_in_their_tiers_only():
    plans = {m: sweep_plan(m, SMOL, {"type": "t"}) for m in (Mode.NONE, Mode.HOST, Mode.DISK)}
    assert {p.device_blocks for p in plans.values()} == {DEVICE_BLOCKS}
    assert plans[Mode.NONE].offload is None
    host, disk = (
        dict(plans[m].offload["kv_connector_extra_config"]) for m in (Mode.HOST, Mode.DISK)
    )
    assert disk.pop("secondary_tiers") == [{"type": "t"}]
    assert host == disk
