"""Measuring under names of its own on a key-value server, and the server alone by bare calls."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtiers.tiers.kv import refuse_missing_client
from kvtiers.tiers.kv.options import KvOptions

if TYPE_CHECKING:
    from kvtiers.tiers.kv.trial import ServerTrial


@contextmanager
def server_trial(options: KvOptions) -> "Iterator[ServerTrial]":
    """A trial of which nothing is left; what a kill leaves goes by itself in an hour.

    Raises ConfigError.
    """
    refuse_missing_client()
    from kvtiers.tiers.kv.trial import ServerTrial

    trial = ServerTrial(options)
    try:
        yield trial
    finally:
        trial.clear()


class BareValues:
    """A value for each chunk, and nothing else. See :class:`~kvtiers.cli.bare.Bare`."""

    per_call = 1

    def __init__(self, trial: "ServerTrial", chunk: int) -> None:
        self._trial = trial
        self._chunk = chunk
        self._payload = memoryview(secrets.token_bytes(chunk))
        self._local = threading.local()

    def write(self, first: int, end: int) -> None:
        """One call."""
        self._trial.put(first, self._payload)

    def read(self, first: int, end: int) -> None:
        """One call."""
        self._trial.get(first, self._place())

    def _place(self) -> memoryview:
        """Memory of this thread's own, as host memory is there already."""
        try:
            place: memoryview = self._local.place
        except AttributeError:
            place = self._local.place = memoryview(bytearray(self._chunk))
        return place

    def close(self) -> None:
        """The trial has the connections."""
