"""The manager that vLLM talks to, while a thread serves peers from the same core."""

from kvtiers.chunks import Lookup
from kvtiers.engines.vllm.events import KVEvents
from kvtiers.engines.vllm.manager import VllmManager
from tests.unit.tiers.p2p.engines import engines, keys, source


def over(engine):
    return VllmManager(
        engine.manager,
        clock=lambda: 0.0,
        stats=None,
        events=KVEvents(False, describe=False),
        sink=engine.events.append,
        on_shutdown=lambda: None,
    )


def test_one_that_is_inert_gives_nothing_to_peers():
    with engines() as (producer, consumer):
        producer.store(keys(4))
        assert consumer.pull(keys(2), consumer.request(source(producer))) == [Lookup.HIT] * 2
        over(producer).become_inert("a test")
        assert consumer.pull(keys(4)[2:], consumer.request(source(producer))) == [Lookup.MISS] * 2


def test_its_lock_is_the_one_that_serving_takes():
    with engines(1) as (engine,):
        assert over(engine).lock is engine.manager.exclusive
