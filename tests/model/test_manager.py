"""The manager against a simulated world: at random by Hypothesis, and along seeded walks."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtiers.events import ChunksRemoved
from kvtiers.tiers.base import JobOutcome, JobReleased
from tests.model.simulation import ACTIONS, OFTEN, Simulation


def of_kind(number):
    """A simulation under one of sixteen configurations."""
    policy, fraction = ("lru", "arc")[number % 2], (0.5, 1.0)[number // 2 % 2]
    return Simulation(policy, fraction, number // 4 % 2 * 2, sized=number // 8 % 2 == 1)


class Machine(RuleBasedStateMachine):
    """One rule per action of the simulation."""

    simulation = None

    @initialize(choice=st.integers(0, 15))
    def begin(self, choice):
        self.simulation = of_kind(choice)

    @invariant()
    def what_must_hold(self):
        if self.simulation:
            self.simulation.check()

    def teardown(self):
        if self.simulation:
            self.simulation.settle()


def _rule(action):
    def act(self, data):
        getattr(self.simulation, action)(lambda n: data.draw(st.integers(0, n - 1)))

    act.__name__ = action
    return rule(data=st.data())(act)


for _action in ACTIONS:
    setattr(Machine, _action, _rule(_action))

TestManager = Machine.TestCase
TestManager.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def walk(seed, steps=1000):
    """A random walk of one seed to its end; the simulation it was in."""
    rng = random.Random(seed)
    simulation = of_kind(seed)
    for _ in range(steps):
        action = rng.choice((*ACTIONS, *OFTEN))
        getattr(simulation, action)(rng.randrange)
        simulation.check()
    simulation.settle()
    return simulation


@pytest.mark.parametrize("block", range(8))
def test_along_random_walks_everything_that_must_hold_holds(block):
    for seed in range(block * 25, block * 25 + 25):
        walk(seed)


def test_the_same_seed_gives_the_same_events():
    logs = [repr(walk(seed=7).events) for _ in range(3)]
    assert logs[0] == logs[1] == logs[2]
    assert len(logs[0]) > 1000


def test_walks_get_somewhere():
    """Or the rest would prove little."""
    kinds = {}
    for seed in range(20):
        for event in walk(seed).events:
            name = (
                type(event).__name__,
                getattr(event, "hop", None),
                getattr(event, "reason", None),
            )
            kinds[name] = kinds.get(name, 0) + 1
    assert len(kinds) >= 20, sorted(map(str, kinds))


def first(_):
    return 0


def storing():
    """A simulation in which a request's first chunk is on its way to host memory."""
    simulation = Simulation(fraction=1.0)
    simulation.new_request(first)
    simulation.begin_store(first)
    return simulation


def test_a_reset_says_nothing_of_chunks_that_were_never_stored():
    simulation = storing()
    simulation.reset(first)
    assert not [e for e in simulation.events if isinstance(e, ChunksRemoved)]
    simulation.check()


@pytest.mark.parametrize("claim", [JobReleased, lambda i: JobOutcome(i, ())])
def test_a_tier_cannot_let_go_of_the_memory_that_another_uses(claim):
    simulation = storing()
    simulation._end_store(simulation.stores[0])
    simulation._step(0.1)
    near, far = simulation.tiers
    (job,) = near.jobs.values()
    near.time_out(job)
    far.say_again(claim(job.id))
    simulation._step(0.1)
    simulation.check()
    assert sum(simulation.index.hold_counts().values()) == 2, "one for each tier"
    near.release(job)
    simulation.settle()
