"""Which engine, and which of its tiers, holds how much of a prompt, told by KV-cache events.

Pure: ``places`` (what an engine says of its tiers and groups), ``blocks`` and ``presence`` (who
holds which block), ``reach`` (how far along a prompt).
"""
