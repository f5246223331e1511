"""Host memory in the place of an accelerator, for a copier that works on streams.

For dry runs of ``scripts/check_cuda.py`` and for tests: nothing in the package builds one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvtiers.device.streams import Event, Stream


class DoneEvent:
    """An event that has happened."""

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def seconds_since(self, start: Event) -> float:
        """No time passes between events that have happened."""
        return 0.0


class HostStream:
    """A stream whose work is done when it is submitted."""

    def wait_for(self, event: Event) -> None:
        """Wait at once."""
        event.wait()

    def mark(self) -> Event:
        """An event behind work that is done."""
        return DoneEvent()

    def running(self) -> AbstractContextManager[Any]:
        """Work is done where it is submitted anyway."""
        return nullcontext()


class HostDevice:
    """A device whose memory is the host's: everything is done at once."""

    kind = "cpu"

    def map_host(self, buffer: memoryview) -> torch.Tensor:
        """``buffer`` itself."""
        return torch.frombuffer(buffer, dtype=torch.int8)

    def unmap_host(self) -> None:
        """Nothing is pinned."""

    def stream(self) -> Stream:
        """A new stream."""
        return HostStream()

    def mark_model(self) -> Event:
        """The model is not beside us."""
        return DoneEvent()

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """``rows`` as a table."""
        return torch.tensor(rows, dtype=torch.int64)
