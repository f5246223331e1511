from kvtiers.host.policies import load_policy
from kvtiers.testing import PolicyLaws


class TestLru(PolicyLaws):
    def make(self, capacity):
        return load_policy("lru", capacity=capacity)


class TestArc(PolicyLaws):
    def make(self, capacity):
        return load_policy("arc", capacity=capacity)
