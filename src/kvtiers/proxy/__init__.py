"""``kvtiers proxy``: a small OpenAI-compatible front for engines that exchange chunks.

What is decided (which worker, which roles, what is refused) stands in modules without I/O:
``options``, ``asked``, ``affinity``, ``holders``, ``workers``, ``router``, ``bodies``, ``headers``,
``replies``. What is done stands in ``gate``, ``upstream``, ``lookup``, ``serving``, ``front``,
``counters``, ``run``.
"""
