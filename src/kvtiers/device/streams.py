"""What a copier asks of an accelerator: pinned memory, streams, events.

On CUDA in plain torch. For dry runs and tests ``device.host_device`` has host memory in its place.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from kvtiers.errors import ConfigError

_REGISTER_BYTES = 64 << 30
"""Per call: drivers have refused more at once."""
_PORTABLE_AND_MAPPED = 1 | 2


class Event(Protocol):
    """A point in the work of a stream. Methods raise RuntimeError if that work failed."""

    def done(self) -> bool:
        """Whether the work before it has ended. Never blocks."""

    def wait(self) -> None:
        """Block until it has."""

    def seconds_since(self, start: "Event") -> float:
        """Between the event ``start`` and this one; both are done."""


class Stream(Protocol):
    """Work of the accelerator in order of submission, beside other streams."""

    def wait_for(self, event: Event) -> None:
        """Let work submitted from now on begin when ``event`` is done. Does not block."""

    def mark(self) -> Event:
        """An event behind the work submitted so far."""

    def running(self) -> AbstractContextManager[Any]:
        """Inside, torch operations are submitted to this stream."""


class Device(Protocol):
    """One accelerator, as one copier sees it. All calls on the model's thread."""

    kind: str
    """Of its tensors: ``tensor.device.type``."""

    def map_host(self, buffer: memoryview) -> torch.Tensor:
        """Pin ``buffer``; a tensor of bytes on the device that is this very memory.

        Raises ConfigError if it cannot be pinned.
        """

    def unmap_host(self) -> None:
        """Unpin it, when no work that uses it is left. Twice is fine."""

    def stream(self) -> Stream:
        """A new stream."""

    def mark_model(self) -> Event:
        """An event behind all that the model has submitted so far."""

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """``rows`` as a table of int64 on the device, usable in the stream that is running."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw = torch.cuda.Event(enable_timing=True)
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()

    def seconds_since(self, start: Event) -> float:
        return float(_of_cuda(start).elapsed_time(self.raw)) / 1e3


def _of_cuda(event: Event) -> torch.cuda.Event:
    assert isinstance(event, _CudaEvent), "the event is another device's"
    return event.raw


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._raw = torch.cuda.Stream(device)

    def wait_for(self, event: Event) -> None:
        self._raw.wait_event(_of_cuda(event))

    def mark(self) -> _CudaEvent:
        return _CudaEvent(self._raw)

    def running(self) -> AbstractContextManager[Any]:
        inside: AbstractContextManager[Any] = torch.cuda.stream(self._raw)
        return inside


class _Pinned:
    """Host memory in the words of the CUDA array interface, version 3.

    Addresses are the same on both sides (unified virtual addressing), and torch takes host memory
    that is registered for memory of the device.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|i1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice:
    """A device of CUDA. Not run so far: see ``scripts/check_cuda.py``."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: list[int] = []
        self._memory: torch.Tensor | None = None

    def map_host(self, buffer: memoryview) -> torch.Tensor:
        """Pin ``buffer``; a tensor of bytes on the device that is this very memory."""
        self._memory = torch.frombuffer(buffer, dtype=torch.int8)
        address, size = self._memory.data_ptr(), self._memory.numel()
        register = torch.cuda.cudart().cudaHostRegister
        with torch.cuda.device(self._device):
            for start in range(0, size, _REGISTER_BYTES):
                part = min(_REGISTER_BYTES, size - start)
                code = int(register(address + start, part, _PORTABLE_AND_MAPPED))
                if code != 0:
                    self.unmap_host()
                    raise ConfigError(
                        f"cudaHostRegister cannot pin {size} bytes of host memory (error {code}): "
                        "lower cpu_bytes_to_use, or raise the limit of locked memory "
                        "(ulimit -l, in a container --ulimit memlock=-1)",
                        key="cpu_bytes_to_use",
                    )
                self._registered.append(address + start)
            return torch.as_tensor(_Pinned(address, size), device=self._device)

    def unmap_host(self) -> None:
        """Unpin it, when no work that uses it is left."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())
        self._memory = None

    def stream(self) -> _CudaStream:
        """A new stream."""
        return _CudaStream(self._device)

    def mark_model(self) -> _CudaEvent:
        """An event behind all that the model has submitted so far."""
        return _CudaEvent(torch.cuda.current_stream(self._device))

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """``rows`` as a table on the device; torch keeps the pinned original while it is read."""
        pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=True)
        return pinned.to(self._device, non_blocking=True)

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant, if any."""
        assert self._memory is not None or not self._registered, "unmapped, but still pinned"

    def __repr__(self) -> str:
        return f"<CudaDevice {self._device}: {len(self._registered)} ranges pinned>"
