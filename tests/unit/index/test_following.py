"""What the index knows of an engine whose batches are lost, that restarts, or says nonsense."""

import asyncio
import logging
from itertools import pairwise

import pytest

from kvtiers.index.course import Course, Turn
from kvtiers.index.parts import BLOCKS_AT_ONCE, parts
from kvtiers.index.sockets import replayed
from kvtiers.kvevents.messages import AllBlocksCleared
from tests.unit.index.index_kit import (
    Now,
    Publisher,
    following,
    held,
    on_a_loop,
    removed,
    stored,
    until,
)
from tests.unit.test_checks import broken


@on_a_loop
async def test_what_was_said_before_is_replayed_and_the_rest_followed(tmp_path):
    async with Publisher(tmp_path) as engine:
        await engine.say(stored(1, 2))
        await engine.say(removed(2))
        async with following(engine) as follower:
            await until(lambda: held(follower, 1, 2) == (1, True))
            await engine.say(stored(2, medium="CPU"))
            await until(lambda: held(follower, 1, 2) == (2, True))
            await engine.say(AllBlocksCleared())
            await until(lambda: held(follower, 1, 2) == (0, True))
        assert follower.counts.gaps == 0


@on_a_loop
async def test_an_engine_that_has_said_nothing_yet_is_known_whole(tmp_path):
    async with Publisher(tmp_path) as engine, following(engine) as follower:
        await until(lambda: follower.pod.complete)
        assert held(follower, 1) == (0, True)


@on_a_loop
async def test_a_gap_is_filled_by_a_replay(tmp_path):
    async with Publisher(tmp_path) as engine, following(engine) as follower:
        await engine.say(stored(1))
        await until(lambda: held(follower, 1) == (1, True))
        await engine.say(stored(2), lost=True)
        await engine.say(removed(1), lost=True)
        await engine.say(stored(3))
        await until(lambda: follower.course.next == 4)
        assert held(follower, 1) == (0, True)
        assert held(follower, 2, 3) == (2, True)
        assert follower.counts.gaps == 1
        assert engine.asked[-1] == 1


@on_a_loop
async def test_a_gap_that_cannot_be_filled_clears_the_pod(tmp_path):
    """Nobody knows what was removed meanwhile."""
    async with Publisher(tmp_path, keeps=2) as engine, following(engine) as follower:
        await engine.say(stored(1))
        await until(lambda: held(follower, 1) == (1, True))
        for block in (2, 3, 4):
            await engine.say(stored(block), lost=True)
        await engine.say(stored(5))
        await until(lambda: held(follower, 5) == (1, False))
        assert held(follower, 4, 5) == (2, False), "of what is kept nothing is lost"
        assert held(follower, 1)[0] == held(follower, 3)[0] == 0


@on_a_loop
async def test_without_replays_a_gap_clears_the_pod(tmp_path):
    async with Publisher(tmp_path, replays=False) as engine, following(engine) as follower:
        await until(lambda: follower.connected)
        await engine.say(stored(1))
        await until(lambda: held(follower, 1) == (1, True))
        await engine.say(stored(2), lost=True)
        await engine.say(stored(3))
        await until(lambda: held(follower, 3) == (1, False))
        assert held(follower, 1) == held(follower, 2) == (0, False)


@on_a_loop
async def test_who_comes_late_without_replays_is_incomplete(tmp_path):
    async with Publisher(tmp_path, replays=False) as engine:
        await engine.say(stored(1))
        async with following(engine) as follower:
            await until(lambda: follower.connected)
            await engine.say(stored(2))
            await until(lambda: held(follower, 2) == (1, False))


@on_a_loop
async def test_a_hole_in_a_replay_is_asked_for_again(tmp_path):
    """A publisher drops what its peer is too slow for."""
    async with Publisher(tmp_path) as engine:
        for block in range(1, 6):
            await engine.say(stored(block))
        engine.drops = {2, 3}
        async with following(engine) as follower:
            await until(lambda: held(follower, 1, 2, 3, 4, 5) == (5, True))
        assert engine.asked == [0, 2]


@on_a_loop
async def test_a_bug_starts_one_engine_over_and_ends_nothing(tmp_path, caplog):
    clock = Now()
    async with Publisher(tmp_path) as engine, following(engine, clock) as follower:
        await engine.say(stored(1))
        await until(lambda: held(follower, 1) == (1, True))
        apply = follower.presence.apply

        def fail(*told):
            follower.presence.apply = apply
            raise RuntimeError("a bug")

        follower.presence.apply = fail
        await engine.say(stored(2))
        await until(lambda: held(follower, 1, 2) == (0, False))
        clock.now += 60
        await until(lambda: held(follower, 1, 2) == (2, True))
    assert "e is started over" in caplog.text


@on_a_loop
async def test_a_stream_that_comes_and_goes_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "kvtiers.index")
    publisher = Publisher(tmp_path)
    async with following(publisher) as follower:
        async with publisher:
            await until(lambda: follower.connected)
        await until(lambda: not follower.connected)
        async with publisher:
            await until(lambda: follower.connected)
    at = f"e: the stream at {publisher.endpoint} is"
    said = [r.message for r in caplog.records if r.message.startswith(at)]
    assert said == [f"{at} connected", f"{at} lost", f"{at} connected"]


@pytest.mark.parametrize("replays", [True, False])
@on_a_loop
async def test_a_restart_clears_the_pod_and_is_told_of_again(tmp_path, replays):
    publisher = Publisher(tmp_path, replays=replays)
    async with following(publisher) as follower:
        async with publisher as engine:
            await until(lambda: follower.connected)
            for block in (1, 2, 3):
                await engine.say(stored(block))
            await until(lambda: held(follower, 1, 2, 3) == (3, True))
        await until(lambda: not follower.connected)
        assert held(follower, 1, 2, 3)[0] == 3, "it may come back"
        async with publisher as engine:
            await until(lambda: follower.connected)
            await engine.say(stored(7))
            await until(lambda: held(follower, 7) == (1, True))
            assert held(follower, 1) == (0, True)
            assert follower.counts.restarts == 1


@on_a_loop
async def test_a_restarted_engine_that_has_said_more_than_before_is_told_from_the_old(tmp_path):
    """By its last batch, not by its number."""
    publisher = Publisher(tmp_path)
    async with following(publisher) as follower:
        async with publisher as engine:
            await engine.say(stored(1))
            await until(lambda: held(follower, 1) == (1, True))
        await until(lambda: not follower.connected)
        async with publisher as engine:
            await engine.say(stored(2))
            await engine.say(stored(3))
            await until(lambda: held(follower, 2, 3) == (2, True))
            assert held(follower, 1) == (0, True)


@on_a_loop
async def test_a_lost_connection_costs_nothing(tmp_path):
    publisher = Publisher(tmp_path)
    async with following(publisher) as follower:
        async with publisher as engine:
            await engine.say(stored(1))
            await until(lambda: held(follower, 1) == (1, True))
            kept = engine.ring
        await until(lambda: not follower.connected)
        async with publisher as engine:
            engine.ring, engine.seq = kept, 1
            await engine.say(stored(2), lost=True)
            await until(lambda: held(follower, 1, 2) == (2, True))
            assert follower.counts.restarts == 0
            assert 0 in engine.asked, "the last batch is asked for"


@on_a_loop
async def test_an_engine_that_stays_away_is_forgotten(tmp_path):
    publisher, clock = Publisher(tmp_path), Now()
    async with following(publisher, clock, forget_after_s=60) as follower:
        async with publisher as engine:
            await engine.say(stored(1))
            await until(lambda: held(follower, 1) == (1, True))
        await until(lambda: not follower.connected)
        clock.now += 59
        assert held(follower, 1) == (1, True)
        clock.now += 2
        await until(lambda: held(follower, 1) == (0, False))
        async with publisher as engine:
            await engine.say(stored(1))
            await until(lambda: held(follower, 1) == (1, True))


@on_a_loop
async def test_a_replay_that_does_not_come_is_asked_for_later(tmp_path):
    clock = Now()
    async with Publisher(tmp_path) as engine:
        engine.silent = True
        await engine.say(stored(1))
        async with following(engine, clock, replay_timeout_s=0.2, retry_s=5) as follower:
            await until(lambda: follower.counts.failed_replays)
            await engine.say(stored(2))
            await until(lambda: held(follower, 2) == (1, False))
            engine.silent = False
            clock.now += 11
            await until(lambda: held(follower, 1, 2) == (2, True))


@on_a_loop
async def test_a_batch_that_cannot_be_read_is_skipped(tmp_path):
    async with Publisher(tmp_path) as engine, following(engine) as follower:
        await engine.say(stored(1))
        await engine.say(payload=b"\xc1")
        await engine.say(stored(2))
        await until(lambda: held(follower, 1, 2) == (2, False))
        assert follower.counts.undecodable == 1


class Endless:
    """A context, and its socket: a publisher whose replay never ends, and that never lets wait."""

    def __init__(self):
        self.sent = 0

    def socket(self, kind):
        return self

    def setsockopt(self, *option):
        pass

    connect = close = setsockopt

    async def send_multipart(self, frames):
        pass

    async def recv_multipart(self):
        self.sent += 1
        return [b"", b"topic", self.sent.to_bytes(8, "big"), b""]


@on_a_loop
async def test_a_replay_that_never_ends_is_ended_and_others_have_their_turn():
    loop = asyncio.get_running_loop()
    turns = []

    async def others():
        while True:
            turns.append(publisher.sent)
            await asyncio.sleep(0)

    publisher = Endless()
    beside = asyncio.create_task(others())
    with pytest.raises(TimeoutError):
        async for _ in replayed(publisher, "tcp://127.0.0.1:1", 0, loop.time() + 0.1):
            pass
    beside.cancel()
    assert publisher.sent > 100
    assert max(b - a for a, b in pairwise(turns)) <= 64


def test_a_batch_is_applied_in_parts_from_where_all_was_cleared():
    many = range(2 * BLOCKS_AT_ONCE + 1)
    clear = AllBlocksCleared()
    storm = [stored(1), clear] * 1000
    found = list(parts([*storm, stored(*many), removed(*many), *[stored()] * BLOCKS_AT_ONCE]))
    assert found[0] == [clear]
    told = [event for part in found for event in part]
    assert told.count(clear) == 1
    assert [len(event.block_hashes) for event in told[1:7]] == [*[BLOCKS_AT_ONCE] * 2, 1] * 2
    assert [event.parent_block_hash for event in told[1:4]] == [
        None,
        BLOCKS_AT_ONCE - 1,
        2 * BLOCKS_AT_ONCE - 1,
    ]
    assert len(told) == 7 + BLOCKS_AT_ONCE
    assert max(map(len, found)) <= BLOCKS_AT_ONCE
    assert list(parts([])) == []


def test_numbers_decide_what_is_done():
    course = Course()
    assert course.live(7) is Turn.START_OVER
    course.applied(7)
    assert [course.live(n) for n in (8, 10)] == [Turn.APPLY, Turn.CATCH_UP]
    course.applied(11)
    assert [course.live(n) for n in (11, 12, 12)] == [Turn.SKIP, Turn.APPLY, Turn.START_OVER]
    course.reconnected()
    assert course.live(3) is Turn.SKIP
    course.check()
    assert repr(course) == "<Course next 12, live 3>"
    course.next = -1
    with broken("the first batch is 0"):
        course.check()
