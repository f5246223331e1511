"""Which engine, and which of its tiers, holds how much of a prompt: told by the events of many."""
