"""What operators see of one engine: its tiers now, its metrics, and the life of a request."""

from kvtiers.observe.client import ObserverClient, why

__all__ = ["ObserverClient", "why"]
