"""What operators see of one engine: its tiers now, its metrics, and the life of a request."""
