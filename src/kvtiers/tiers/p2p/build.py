"""Puts the parts of a ``p2p`` tier together."""

import os
from collections.abc import Callable

from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.lanes import Mailbox, StartThread, start_daemon
from kvtiers.tiers.p2p.endpoint import Endpoint
from kvtiers.tiers.p2p.names import Names
from kvtiers.tiers.p2p.notes import ToTier
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.tier import P2PTier
from kvtiers.tiers.p2p.us import Identity


def build_configured(context: StoreContext, options: P2POptions) -> P2PTier:
    """The tier of a configuration. Raises ConfigError."""
    placed = options.placed(context.engine.replica, os.environ)
    here = f"{placed.advertised_host or placed.host}:{placed.port}"
    identity = Identity(context.namespace.id, context.layout, here)
    memory = context.engine.memory if placed.transport == "nixl" else None
    return build(
        context.label, placed, identity, context.clock, memory=None if memory is None else memory()
    )


def build(
    label: str,
    options: P2POptions,
    identity: Identity,
    clock: Callable[[], float],
    *,
    memory: memoryview | None = None,
    names: Names | None = None,
    start_thread: StartThread = start_daemon,
) -> P2PTier:
    """The tier called ``label``, e.g. ``2:p2p``, with its threads; ``options`` are ``placed``.

    ``memory`` is all of host memory, for transports that read it. Peers are answered with MISS
    until the tier is given a ``Parent`` to serve from. Raises ConfigError.
    """
    mailbox: Mailbox[ToTier] = Mailbox()
    endpoint = Endpoint(
        options,
        identity,
        mailbox.post,
        clock,
        memory=memory,
        names=names or Names(),
        start_thread=start_thread,
    )
    return P2PTier(label, options, endpoint, mailbox, clock)
