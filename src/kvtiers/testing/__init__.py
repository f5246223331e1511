"""The conformance kit: what a store, a tier or a policy owes, as tests that it can be put to.

Subclass :class:`StoreLaws`, :class:`StoreTierLaws`, :class:`TierLaws` or :class:`PolicyLaws` in a
test module, define the hooks, and run pytest. It needs nothing but the package itself.
"""

from kvtiers.testing.faults import Fault, FaultyStore, What, When
from kvtiers.testing.gates import Gate, GatedStore
from kvtiers.testing.laws import LawBroken, Laws, hook, law, laws_of, must, run
from kvtiers.testing.policy_laws import PolicyLaws
from kvtiers.testing.store_laws import StoreLaws
from kvtiers.testing.store_tier_laws import StoreTierLaws
from kvtiers.testing.tier_laws import TierLaws
from kvtiers.testing.values import LAYOUT, NAMESPACE, ManualClock, Slots, chunk, content

__all__ = [
    "LAYOUT",
    "NAMESPACE",
    "Fault",
    "FaultyStore",
    "Gate",
    "GatedStore",
    "LawBroken",
    "Laws",
    "ManualClock",
    "PolicyLaws",
    "Slots",
    "StoreLaws",
    "StoreTierLaws",
    "TierLaws",
    "What",
    "When",
    "chunk",
    "content",
    "hook",
    "law",
    "laws_of",
    "must",
    "run",
]
