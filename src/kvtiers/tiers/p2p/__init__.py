"""The ``p2p`` tier: chunks of other engines, host memory to host memory.

Nothing here is imported before a tier is built: ZeroMQ is an extra (``pip install kvtiers[p2p]``).
"""
