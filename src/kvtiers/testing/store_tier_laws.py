"""The laws of tiers for a tier that ``kvtiers.tiers.runner`` makes of a chunk store."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast
from weakref import WeakKeyDictionary

from kvtiers.chunks import Key
from kvtiers.testing.gates import GatedStore
from kvtiers.testing.rig import Held
from kvtiers.testing.store_laws import StoreLaws
from kvtiers.testing.tier_laws import TierLaws
from kvtiers.tiers.base import SecondaryTierManager, StoreContext
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.runner import StoreTier, TierIdentity

_PAUSE_S = 0.05
_INBOXES: WeakKeyDictionary[SecondaryTierManager, Inbox] = WeakKeyDictionary()
_OPTIONS = RunnerOptions(n_read_threads=2, n_write_threads=2, min_slice_bytes=1)


class StoreTierLaws(TierLaws):
    """Subclass it and name the laws class of the store, whose hooks are used."""

    store_laws: ClassVar[type[StoreLaws]]
    tier_type: ClassVar[type[StoreTier]] = StoreTier
    deadline_s = max(_OPTIONS.store_deadline_s, _OPTIONS.load_deadline_s)

    def make(self, place: Path, context: StoreContext) -> SecondaryTierManager:
        """A tier over the store, with a gate between them."""
        inbox = Inbox()
        store = self.store_laws().make(place, replace(context, on_removed=inbox.removed))
        self.persistent = store.capabilities.persistent
        identity = TierIdentity("laws", "1:laws", "STORAGE", "LOCAL")
        tier = self.tier_type(GatedStore(store), identity, _OPTIONS, inbox, context.clock)
        _INBOXES[tier] = inbox
        return tier

    def hold(self, tier: SecondaryTierManager) -> Held:
        """Close the gate."""
        gate = _gate(tier)
        gate.hold()
        return gate

    def peek(self, tier: SecondaryTierManager, name: Key) -> bytes | None:
        """As the laws of the store do."""
        return self.store_laws().peek(_gate(tier).inner, name)

    def seed(self, tier: SecondaryTierManager, name: Key, record: bytes) -> None:
        """As the laws of the store do."""
        self.store_laws().seed(_gate(tier).inner, name, record)

    def pause(self, tier: SecondaryTierManager) -> None:
        """Wait for a note from a lane, not for long: it may have come already."""
        _INBOXES[tier].wait(_PAUSE_S)


def _gate(tier: SecondaryTierManager) -> GatedStore:
    return cast(GatedStore, cast(StoreTier, tier).store)
