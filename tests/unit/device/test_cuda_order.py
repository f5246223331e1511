"""Our copier for CUDA over streams that run whenever they like, as far as events let them."""

import random
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from kvtiers.device import cuda_copier
from kvtiers.device.copier import Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.host_device import HostDevice
from kvtiers.device.plans import ChunkCopy, CopyPlan
from tests.unit.device.device_kv import Model, copy_now, tensors_of
from tests.unit.device.device_plans import BLOCKS, SLOTS, fresh_region

MODEL = Model("hnd", heads=2, layers=2, blocks_per_chunk=2)
GEOMETRY = MODEL.geometry(1, 0)


class Event:
    def __init__(self, stream: "Stream") -> None:
        self.stream, self.position = stream, len(stream.work)

    def has_happened(self) -> bool:
        return self.stream.ran >= self.position

    def done(self) -> bool:
        self.stream.device.run(self.stream.device.dice.randint(0, 3))
        return self.has_happened()

    def wait(self) -> None:
        while not self.has_happened():
            self.stream.device.run(1)

    def seconds_since(self, start: "Event") -> float:
        assert self.has_happened()
        assert start.has_happened()
        return 0.0


class Stream:
    def __init__(self, device: "Device") -> None:
        self.device, self.ran = device, 0
        self.work: list[Callable[[], bool]] = []
        """Each says whether it could be done."""

    def wait_for(self, event: Event) -> None:
        self.work.append(event.has_happened)

    def mark(self) -> Event:
        return Event(self)

    @contextmanager
    def running(self):
        self.device.current = self
        yield

    def is_idle(self) -> bool:
        return self.ran == len(self.work)

    def step(self) -> bool:
        done = not self.is_idle() and self.work[self.ran]()
        self.ran += done
        return done


class Device(HostDevice):
    def __init__(self, dice: random.Random) -> None:
        self.dice, self.model = dice, Stream(self)
        self.streams, self.current = [self.model], self.model

    def stream(self):
        self.streams.append(Stream(self))
        return self.streams[-1]

    def mark_model(self):
        return self.model.mark()

    def unmap_host(self):
        assert all(stream.is_idle() for stream in self.streams), "there is work left that uses it"

    def run(self, steps: int) -> None:
        """Let so many pieces of work happen, each on any stream that is free to go on."""
        for _ in range(steps):
            any(stream.step() for stream in self.dice.sample(self.streams, len(self.streams)))


def later(device: Device, operation, fails: float = 0.0):
    """``operation`` when its stream comes to it; or its launch fails."""

    def submit(*given):
        if device.dice.random() < fails:
            raise RuntimeError("told to fail")
        device.current.work.append(lambda: operation(*given) is None)

    return submit


def any_plan(dice: random.Random) -> CopyPlan:
    """A few chunks, some of them not whole."""
    chunks, blocks = [], dice.sample(range(BLOCKS), 6)
    for slot in dice.sample(range(SLOTS), dice.randint(1, 3)):
        there = [sub for sub in range(2) if dice.random() < 0.8]
        missing = tuple(sub for sub in range(2) if sub not in there)
        chunks.append(ChunkCopy(0, slot, tuple((sub, blocks.pop()) for sub in there), missing))
    return CopyPlan(tuple(chunks))


@pytest.mark.parametrize("fails", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_streams_do_it_is_as_if_one_job_followed_the_other(monkeypatch, seed, fails):
    dice = random.Random(seed)
    device = Device(dice)
    monkeypatch.setattr(cuda_copier, "_copy", later(device, cuda_copier._copy, fails))
    monkeypatch.setattr(cuda_copier, "_zero", later(device, cuda_copier._zero))
    pages = MODEL.pages(MODEL.logical(BLOCKS), 1, 0)
    ours, theirs = tensors_of(pages), tensors_of(pages)
    region, expected = fresh_region(GEOMETRY), fresh_region(GEOMETRY)
    made = CudaCopier(ours, memoryview(region), GEOMETRY, device, portion_bytes=500)
    jobs, outcomes = [], []
    for job in range(20):
        jobs.append((dice.choice(list(Direction)), any_plan(dice)))
        made.submit(job, *jobs[-1])
        device.run(dice.randint(0, 6))
        if dice.random() < 0.4:
            outcomes += made.poll()
        if dice.random() < 0.2:
            made.wait([dice.randrange(job + 1)])
        made.check()
    made.close()
    outcomes += made.poll()
    assert sorted(outcome.job_id for outcome in outcomes) == list(range(20))
    if fails:
        assert {outcome.ok for outcome in outcomes} == {True, False}
        return
    assert all(outcome.ok for outcome in outcomes)
    for direction, plan in jobs:
        assert copy_now(theirs, expected, GEOMETRY, direction, plan, CpuCopier).ok
    assert region == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
