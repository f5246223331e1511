"""Pinning, with what torch calls of CUDA replaced: streams and events are torch's own."""

from contextlib import nullcontext

import pytest
import torch

from kvtiers.device import streams
from kvtiers.device.streams import CudaDevice
from kvtiers.errors import ConfigError

PART = 4096
DEVICE = torch.device("cuda", 3)


class Cudart:
    """The two calls of the CUDA runtime, of which registering fails from the n-th on."""

    def __init__(self, fails_from: int = 99) -> None:
        self.fails_from = fails_from
        self.pinned: dict[int, int] = {}
        self.flags: set[int] = set()

    def cudaHostRegister(self, address, size, flags):
        if len(self.pinned) >= self.fails_from:
            return 2
        self.pinned[address] = size
        self.flags.add(flags)
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    def use(cudart: Cudart) -> CudaDevice:
        monkeypatch.setattr(streams, "_REGISTER_BYTES", PART)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch, "as_tensor", lambda made, device: (made, device))
        return CudaDevice(DEVICE)

    return use


def test_a_region_is_pinned_in_parts_and_seen_from_the_device_where_it_lies(cuda):
    cudart, buffer = Cudart(), bytearray(2 * PART + 100)
    device = cuda(cudart)
    pinned, where = device.map_host(memoryview(buffer))
    described = pinned.__cuda_array_interface__
    start = described["data"][0]
    assert where == DEVICE
    assert (described["shape"], described["typestr"]) == ((len(buffer),), "|i1")
    assert cudart.pinned == {start: PART, start + PART: PART, start + 2 * PART: 100}
    assert cudart.flags == {3}
    device.check()
    assert repr(device) == "<CudaDevice cuda:3: 3 ranges pinned>"
    device.unmap_host()
    device.unmap_host()
    device.check()
    assert cudart.pinned == {}
    buffer.clear()  # raises BufferError while anybody has a view of it


def test_what_cannot_be_pinned_is_refused_and_nothing_stays_pinned(cuda):
    cudart = Cudart(fails_from=2)
    device = cuda(cudart)
    with pytest.raises(ConfigError) as caught:
        device.map_host(memoryview(bytearray(3 * PART)))
    assert "cannot pin 12288 bytes of host memory (error 2): lower" in str(caught.value)
    assert cudart.pinned == {}
    device.check()
