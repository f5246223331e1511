"""Which engine, and which of its tiers, holds how much of a prompt, told by KV-cache events.

Pure: ``places`` (what an engine says of its tiers and groups), ``blocks`` and ``presence`` (who
holds which block), ``reach`` (how far along a prompt), ``course`` (what a number in a stream
means), ``snapshot``, ``questions``, ``options``. What is done stands in ``sockets``, ``follower``
(one engine), ``shared`` (Valkey), ``counters``, ``service``, ``run``.
"""
