"""What ``doctor`` looks at of a ``p2p`` tier: whether it would answer peers."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from socket import create_server

from kvtiers.cli.verdicts import Check, Grade
from kvtiers.config import TierSpec
from kvtiers.errors import ConfigError
from kvtiers.tiers.options import parse
from kvtiers.tiers.p2p.options import P2POptions


def check_peers(specs: Sequence[TierSpec]) -> Iterator[Check]:
    """Address, keys and transport of each such tier, as an engine's first replica takes them."""
    for spec in specs:
        if spec.type == "p2p" and spec.module_path is None:
            yield _check(parse(P2POptions, spec.options).placed(0, os.environ))


def _check(options: P2POptions) -> Check:
    try:
        from kvtiers.tiers.p2p.nixl import new_agent
        from kvtiers.tiers.p2p.security import bind_address, security_of
    except ImportError:
        remedy = "pip install 'kvtiers[p2p]', or pyzmq"
        return Check("peers", Grade.FAIL, "ZeroMQ is not installed", remedy)
    try:
        address = bind_address(options)
        security_of(options)
        if options.transport == "nixl":
            with redirect_stdout(sys.stderr):  # where NIXL would tell of itself
                new_agent(options.backends, options.num_threads)  # which ends at once
    except ConfigError as e:
        return Check("peers", Grade.FAIL, "an engine refuses to start", str(e))
    try:
        with closing(create_server((address, options.port or 0))):
            pass
    except OSError as e:
        found = f"{address}, port {options.port}: {e.strerror}"
        return Check("peers", Grade.WARN, found, "an engine may have it already; else give another")
    keys = "with keys" if options.keys else "without keys, so for this machine only"
    return Check("peers", Grade.OK, f"answers at {address}, port {options.port}, {keys}")
