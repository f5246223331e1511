"""Chunks come over, whole: what a peer has, what it has below host memory, what it will compute."""

import threading
import time

import pytest

from kvtiers.chunks import ChunkLayout, GroupLayout, Lookup, Namespace, make_key
from kvtiers.events import ChunksDeclined, TransferFinished
from kvtiers.tiers import build_tier
from tests.unit.tiers.p2p.engines import (
    CHUNK_BYTES,
    LAYOUT,
    NAMESPACE,
    Engine,
    engines,
    keys,
    payload,
    source,
    until,
    with_options,
)

HITS = [Lookup.HIT] * 4


def below(layout=LAYOUT):
    return build_tier(
        {"type": "memory", "capacity_bytes": 1 << 30},
        1,
        namespace=NAMESPACE,
        layout=layout,
        clock=time.monotonic,
        wall_clock=time.time,
    )


def test_what_a_peer_has_is_pulled():
    names = keys(20)
    with engines() as (a, b):
        a.store(names[:12])
        request = b.request(source(a))
        assert b.pull(names, request) == [Lookup.HIT] * 12 + [Lookup.MISS] * 8
        b.must_have(names[:12])
        b.manager.on_request_finished(request)
        b.rest()
        a.rest()
        (moved,) = [e for e in b.events if isinstance(e, TransferFinished)]
        assert (moved.done, moved.failed, moved.bytes) == (12, 0, 12 * CHUNK_BYTES)


def test_both_ways_at_once():
    mine, theirs = keys(30, "a"), keys(30, "b")
    with engines() as (a, b):
        a.store(mine)
        b.store(theirs)
        pulling = threading.Thread(target=lambda: a.pull(theirs, a.request(source(b))))
        pulling.start()
        assert b.pull(mine, b.request(source(a))) == [Lookup.HIT] * 30
        pulling.join()
        a.must_have(theirs)
        b.must_have(mine)


def test_chunks_of_several_sizes():
    layout = ChunkLayout((GroupLayout(0, CHUNK_BYTES, 16), GroupLayout(3, 4096, 16, False)))
    names = [make_key(f"{i}".encode().ljust(32), group) for i in range(8) for group in (0, 3)]
    with engines(layout=layout) as (a, b):
        a.store(names)
        assert b.pull(names, b.request(source(a))) == [Lookup.HIT] * 16
        b.must_have(names)


def test_more_chunks_than_a_message_names():
    layout = ChunkLayout((GroupLayout(0, 4096, 16),))
    names = keys(2500)
    with engines(layout=layout, slots=3000) as (a, b):
        a.store(names[:2400])
        verdicts = b.pull(names, b.request(source(a)))
        assert verdicts == [Lookup.HIT] * 2400 + [Lookup.MISS] * 100
        b.must_have(names[:2400])


def test_a_producer_answers_from_all_its_tiers_while_its_engine_idles():
    names = keys(4)
    tier = below()
    with engines(1) as (b,):
        a = Engine(tiers=[tier])
        try:
            a.store(names)
            until(lambda: (a.step(), not a.manager.has_pending_work(time.monotonic()))[1])
            a.manager.reset()
            assert b.pull([*names, *keys(1, "no")], b.request(source(a))) == [*HITS, Lookup.MISS]
            b.must_have(names)
            a.must_have(names)  # they were promoted there
            until(lambda: (a.step(), not a.manager.has_pending_work(time.monotonic()))[1])
        finally:
            a.close()


def test_what_is_pulled_goes_down_to_the_tiers_below_and_never_back_to_the_peer():
    names = keys(4)
    tier = below()
    with engines(1) as (a,):
        b = Engine(tiers=[tier])
        try:
            a.store(names)
            assert b.pull(names, b.request(source(a))) == HITS
            until(lambda: (b.step(), len(tier.store._chunks) == 4)[1])
            declined = [e for e in b.events if isinstance(e, ChunksDeclined)]
            assert not declined
        finally:
            b.close()


def test_peers_do_not_go_round_in_circles():
    with engines(3) as (a, b, c):
        c.store(keys(4))
        b.request(source(c, "b"))  # a request of b's own that names c
        assert a.pull(keys(4), a.request(source(b))) == [Lookup.MISS] * 4


def test_two_requests_share_what_one_pulls():
    with engines() as (a, b):
        a.store(keys(4))
        first, second = b.request(source(a, "1")), b.request(source(a, "2"))
        b.manager.lookup(keys(4)[0], second)
        assert b.pull(keys(4), first) == HITS
        assert b.pull(keys(4), second) == HITS


# -- prefill and decode ---------------------------------------------------------------------------


def test_decode_fetches_while_prefill_runs():
    names = keys(9)
    with engines() as (a, b):
        prefill = a.request({"remote_decoder": {"kv_request_id": "pd"}})
        assert prefill.wants_all
        a.store(names[:2], prefill)
        decode = b.request(source(a, "pd", "remote_prefiller"))
        for stored in range(2, 9, 3):
            came = names[:stored]
            until(lambda came=came: (_look(b, names, decode), came_in(b, came))[1])
            assert came_in(b, names) is False
            a.store(names[stored : stored + 3], prefill)
        assert b.pull(names[:8], decode) == [Lookup.HIT] * 8
        a.manager.on_request_finished(prefill)
        assert b.pull(names, decode)[:8] == [Lookup.HIT] * 8
        b.must_have(names[:8])
        b.manager.on_request_finished(decode)
        b.rest()
        a.rest()


def _look(engine, names, request):
    engine.manager.poll(time.monotonic())
    for key in names:
        engine.manager.lookup(key, request)
    engine.step()


def came_in(engine, names):
    """Whether the bytes are in host memory, though their job may not have ended."""
    fetching, ready = engine.manager._index.fetching, engine.manager._index.ready
    slots = [ready.get(key, fetching.get(key)) for key in names]
    return None not in slots and all(
        bytes(engine.view(slot, CHUNK_BYTES, False)) == payload(key)
        for slot, key in zip(slots, names, strict=True)
    )


def test_decode_may_come_first():
    names = keys(4)
    with engines() as (a, b):
        decode = b.request(source(a, "pd", "remote_prefiller"))
        _look(b, names, decode)
        until(lambda: (_look(b, names, decode), b.tier._jobs)[1])
        prefill = a.request({"remote_decoder": {"kv_request_id": "pd"}})
        a.store(names, prefill)
        a.manager.on_request_finished(prefill)
        assert b.pull(names, decode) == HITS
        b.must_have(names)


def test_what_prefill_did_not_store_is_a_miss_as_soon_as_it_has_ended():
    names = keys(6)
    with engines(options=with_options(park_deadline_s=60.0)) as (a, b):
        prefill = a.request({"remote_decoder": {"kv_request_id": "pd"}})
        decode = b.request(source(a, "pd", "remote_prefiller"))
        a.store(names[:4], prefill)
        until(lambda: (_look(b, names, decode), came_in(b, names[:4]))[1])
        began = time.monotonic()
        a.manager.on_request_finished(prefill)
        assert b.pull(names, decode) == [*HITS, Lookup.MISS, Lookup.MISS]
        assert time.monotonic() - began < 10
        b.must_have(names[:4])


def test_a_store_that_is_under_way_when_prefill_ends_is_waited_for():
    names = keys(4)
    with engines() as (a, b):
        prefill = a.request({"remote_decoder": {"kv_request_id": "pd"}})
        plan = a.manager.store(names, prefill)
        decode = b.request(source(a, "pd", "remote_prefiller"))
        _look(b, names, decode)
        until(lambda: (_look(b, names, decode), b.tier._jobs)[1])
        a.manager.on_request_finished(prefill)
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            a.view(slot, CHUNK_BYTES, True)[:] = payload(key)
        a.manager.complete_store(plan.keys)
        assert b.pull(names, decode) == HITS
        b.must_have(names)


def test_a_prefill_that_never_comes_is_a_miss_at_the_deadline():
    with engines(options=with_options(park_deadline_s=0.5)) as (a, b):
        began = time.monotonic()
        assert b.pull(keys(4), b.request(source(a, "pd", "remote_prefiller"))) == [Lookup.MISS] * 4
        assert 0.4 < time.monotonic() - began < 20
        b.rest()
        a.rest()


def test_a_request_that_is_finished_while_it_waits_frees_everything():
    with engines(options=with_options(park_deadline_s=60.0)) as (a, b):
        decode = b.request(source(a, "pd", "remote_prefiller"))
        until(lambda: (_look(b, keys(4), decode), b.tier._jobs)[1])
        b.manager.on_request_finished(decode)
        b.rest()
        a.rest()
        assert not b.manager._index.fetching


# -- what a producer keeps, and for how long ------------------------------------------------------


def test_what_a_peer_was_told_of_stays_until_it_fetched_or_the_deadline():
    names = keys(4)
    with engines(options=with_options(hold_deadline_s=0.4), slots=8) as (a, b):
        a.store(names)
        request = b.request(source(a))
        until(
            lambda: (
                (b.manager.poll(0), b.tier.lookup(names, request.context))[1] == HITS
                or b.tier.on_schedule_end()
            )
        )
        assert len(a.parent._pins) == 1
        until(lambda: not a.parent._pins)
        a.rest()


def test_no_more_is_kept_for_peers_than_may_be():
    names = keys(8)
    with engines(options=with_options(max_pinned_fraction=0.25), slots=16) as (a, b):
        a.store(names)
        assert b.pull(names, b.request(source(a))) == [*HITS, *[Lookup.MISS] * 4]
        a.parent.check()
        until(lambda: not a.parent._pins)
        a.rest()


def test_a_reset_of_the_producer_gives_no_wrong_bytes():
    names = keys(4)
    with engines() as (a, b):
        a.store(names)
        request = b.request(source(a))
        until(
            lambda: (
                (b.manager.poll(0), b.tier.lookup(names, request.context))[1] == HITS
                or b.tier.on_schedule_end()
            )
        )
        orphans = a.manager.reset()
        a.manager.release_device(orphans)
        a.memory[:] = bytes(len(a.memory))
        assert b.pull(names, request) == [Lookup.MISS] * 4
        until(lambda: not a.parent._pins)
        a.manager.check()


# -- who does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"namespace": Namespace({"model": "other"})}, "it is another model"),
        (
            {"layout": ChunkLayout((GroupLayout(0, CHUNK_BYTES, 32),))},
            "give both the same block size",
        ),
    ],
)
def test_a_peer_of_another_model_is_refused_in_plain_words_on_both_sides(theirs, words, caplog):
    with engines(1) as (b,):
        a = Engine(label="other", **theirs)
        try:
            a.store(keys(4))
            assert b.pull(keys(4), b.request(source(a))) == [Lookup.MISS] * 4
            lines = [record.getMessage() for record in caplog.records if words in record.message]
            assert any("engine0 was refused" in line for line in lines), caplog.text
            assert any(f"127.0.0.1:{a.port} is left alone" in line for line in lines), caplog.text
            b.rest()
        finally:
            a.close()


def test_more_peers_than_are_served_are_told_so(caplog):
    with engines(3, options=with_options(max_peers=1)) as (a, b, c):
        a.store(keys(4))
        assert b.pull(keys(4), b.request(source(a))) == HITS
        assert c.pull(keys(4), c.request(source(a))) == [Lookup.MISS] * 4
        assert "I serve 1 peers: max_peers" in caplog.text


def test_ten_peers_at_once():
    names = keys(40)
    patient = with_options(silence_deadline_s=15.0, lookup_deadline_s=10.0, load_deadline_s=10.0)
    with engines(1, options=patient) as (a,), engines(10, options=patient) as consumers:
        a.store(names)
        results = {}

        def work(engine):
            results[engine] = engine.pull(names, engine.request(source(a, f"r{id(engine)}")))

        threads = [threading.Thread(target=work, args=(e,)) for e in consumers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for engine in consumers:
            assert results[engine] == [Lookup.HIT] * 40
            engine.must_have(names)
        a.rest()


def test_hostile_params_are_a_miss_with_one_warning(caplog):
    with engines(1) as (b,):
        for params in ({"remote_kv_source": 1}, {"remote_kv_source": {"remote_port": -1}}):
            assert b.pull(keys(2), b.request(params)) == [Lookup.MISS] * 2
        assert caplog.text.count("kv_transfer_params are ignored") == 1


def test_an_idle_engine_does_not_step_and_its_threads_sleep():
    with engines() as (a, b):
        a.store(keys(4))
        assert b.pull(keys(4), b.request(source(a))) == HITS
        b.rest()
        a.rest()
        turns = []
        for engine in (a, b):
            waits = engine.endpoint._loop._patience
            engine.endpoint._loop._patience = lambda w=waits: (turns.append(1), w())[1]
        time.sleep(0.5)
        assert not b.manager.has_pending_work(time.monotonic())
        assert len(turns) < 40  # a ping each 0.2 s, and the timers of the session
