"""Our copier for CUDA against the one for the CPU, on a machine with torch, numpy and a GPU.

    python scripts/check_cuda.py [--device cuda:0] [--directory /dev/shm] [--mib 256]

Needs no network, no engine and no installation: this file and ``src`` beside it. Four checks:

exact    every geometry and plan below: the bytes in host memory, and on the device after loading
order    a store takes what the model wrote before it, a load what a store before it stored
speed    GB/s of stores and loads beside bare pinned memcpy (said, not judged)
overlap  a store beside matrix products that take as long alone (said, not judged)

``--device cpu`` is a dry run: host memory in the device's place. Prints ``OK`` or ``WRONG`` for
each check, and exits with the number of those that are wrong.
"""

import argparse
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from kvtiers.device.copier import Copier, Direction
from kvtiers.device.cpu import CpuCopier
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.geometry import Geometry, GroupGeometry, PageMap, Run, opaque_page
from kvtiers.device.host_device import HostDevice
from kvtiers.device.plans import CopyPlan, plan_copies
from kvtiers.device.streams import CudaDevice, Device
from kvtiers.host.region import Region

BLOCKS, SLOTS = 24, 8
OLD = 0x6E


@dataclass(frozen=True)
class Case:
    """One rank's view of a model, and transfers of (group sizes, first blocks)."""

    name: str
    geometry: Geometry
    page_bytes: Sequence[int]
    """Of each KV tensor, padding included."""
    shared: bool = False
    """Whether the tensors lie in one storage."""

    def tensors(self, device: torch.device | str, blocks: int = BLOCKS) -> list[torch.Tensor]:
        """Empty KV tensors."""
        if self.shared:
            shape = (len(self.page_bytes), blocks, self.page_bytes[0])
            return list(torch.empty(shape, dtype=torch.int8, device=device))
        return [torch.empty(blocks, n, dtype=torch.int8, device=device) for n in self.page_bytes]


def slice_of_rank(tensor: int, run: int, count: int, ranks: int, rank: int) -> PageMap:
    """``count`` runs of ``run`` bytes, between those of other ranks."""
    runs = (Run(0, rank * run, run, count, run, ranks * run),)
    return PageMap(tensor, count * run, ranks * count * run, runs)


def one_group(pages: Sequence[PageMap], blocks_per_chunk: int = 1, rank: int = 0) -> Geometry:
    return Geometry((GroupGeometry(0, 16, tuple(pages)),), blocks_per_chunk, rank)


def cases() -> Iterator[Case]:
    """What vLLM lays out, and what its copy worker cannot make."""
    kib = 1 << 10
    whole = [slice_of_rank(t, 64 * kib, 1, 1, 0) for t in range(4)]
    for shared in (True, False):
        yield Case(f"whole pages, shared={shared}", one_group(whole), [64 * kib] * 4, shared)
    yield Case("three blocks a chunk", one_group(whole, 3), [64 * kib] * 4)
    for rank in (0, 1):
        heads = [slice_of_rank(t, 8 * kib, 1, 2, rank) for t in range(4)]
        yield Case(f"heads outermost, rank {rank} of 2", one_group(heads, 2, rank), [8 * kib] * 4)
        rows = [slice_of_rank(t, 4 * kib, 16, 4, rank) for t in range(4)]
        yield Case(f"tokens outermost, rank {rank} of 4", one_group(rows, 2, rank), [64 * kib] * 4)
        latent = PageMap(0, 18 * kib, 18 * kib, (Run(0, 0, 18 * kib),), 2, rank)
        yield Case(f"MLA, writer {rank} of 2", one_group([latent], 2, rank), [18 * kib])
    odd = [PageMap(t, 1001, 1001, (Run(0, 0, 1001),)) for t in range(2)]
    yield Case("pages of 1001 bytes, padded", one_group(odd, 2), [1024] * 2)
    for rank in (0, 1):
        state = GroupGeometry(0, 64, (opaque_page(0, 34 * kib, 2, rank),))
        attention = GroupGeometry(
            1, 16, tuple(slice_of_rank(t, 4 * kib, 8, 2, rank) for t in (1, 0))
        )
        hybrid = Geometry((state, attention), 2, rank)
        yield Case(f"state and attention, rank {rank} of 2", hybrid, [36 * kib] * 2)


def widest(geometry: Geometry) -> int:
    """Granules of the largest chunk: so far apart no two chunks of any size meet."""
    return max(geometry.span(group.group) for group in geometry.groups)


def plans(geometry: Geometry, rng: random.Random) -> Iterator[CopyPlan]:
    """In order, backwards, anywhere, and chunks that begin and end in the middle."""
    groups, per_chunk = len(geometry.groups), geometry.blocks_per_chunk
    for order in ("up", "down", "any"):
        sizes = [per_chunk * 2 + (1 if per_chunk > 1 else 0)] * groups
        firsts = [rng.randrange(per_chunk) for _ in range(groups)]
        blocks = list(range(BLOCKS))
        slots = list(range(0, SLOTS * widest(geometry), widest(geometry)))
        if order == "down":
            blocks.reverse()
            slots.reverse()
        elif order == "any":
            rng.shuffle(blocks)
            rng.shuffle(slots)
        chunks = sum(
            -(-(first % per_chunk + size) // per_chunk)
            for first, size in zip(firsts, sizes, strict=True)
        )
        yield plan_copies(sizes, firsts, blocks[: sum(sizes)], slots[:chunks], geometry)


def run(copier: Copier, *jobs: tuple[Direction, CopyPlan]) -> float:
    """Do ``jobs``, submitted at once; seconds until the last has ended. Raises if one fails."""
    began = time.perf_counter()
    for number, (direction, plan) in enumerate(jobs):
        copier.submit(number, direction, plan)
    copier.wait(range(len(jobs)))
    seconds = time.perf_counter() - began
    failed = [outcome for outcome in copier.poll() if not outcome.ok]
    if failed:
        raise RuntimeError(f"copies failed: {failed}")
    return seconds


class Bench:
    """The device under test, and regions to copy to."""

    def __init__(self, device: torch.device, directory: str) -> None:
        self.device = device
        self.directory = directory

    def opened(self) -> Device:
        return CudaDevice(self.device) if self.device.type == "cuda" else HostDevice()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def region(self, geometry: Geometry, slots: int = SLOTS) -> Region:
        """A region like an engine's, whose name is gone already."""
        granules = slots * widest(geometry)
        name = f"check-cuda-{os.getpid()}"  # another check on this machine has regions of its own
        region = Region.attach(name, {}, granules, geometry.granule_bytes, self.directory)
        region.unlink()
        return region

    def copier(self, tensors: list[torch.Tensor], region: Region, geometry: Geometry) -> CudaCopier:
        return CudaCopier(tensors, region.buffer, geometry, self.opened())


def exact(bench: Bench) -> str:
    """Stores and loads of all cases, byte for byte as the copier of the CPU does them."""
    rng, copies = random.Random(1), 0
    for case in cases():
        case.geometry.check()
        for plan in plans(case.geometry, rng):
            _compare(bench, case, plan)
            copies += 1
    return f"{copies} stores and loads"


def _compare(bench: Bench, case: Case, plan: CopyPlan) -> None:
    geometry = case.geometry
    on_device, on_cpu = case.tensors(bench.device), case.tensors("cpu")
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        theirs.random_(-128, 128)
        ours.copy_(theirs)
    with bench.region(geometry) as one, bench.region(geometry) as two:
        for region in (one, two):
            region.buffer[:] = bytes([OLD]) * len(region.buffer)
        ours_copies = bench.copier(on_device, one, geometry)
        theirs_copies = CpuCopier(on_cpu, two.buffer, geometry)
        try:
            run(ours_copies, (Direction.STORE, plan))
            run(theirs_copies, (Direction.STORE, plan))
            if one.buffer != two.buffer:
                raise AssertionError(f"{case.name}: {plan!r} was stored wrongly")
            for tensor in (*on_device, *on_cpu):
                tensor.fill_(3)
            run(ours_copies, (Direction.LOAD, plan))
            run(theirs_copies, (Direction.LOAD, plan))
        finally:
            ours_copies.close()
            theirs_copies.close()
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        if not torch.equal(ours.cpu(), theirs):
            raise AssertionError(f"{case.name}: {plan!r} was loaded wrongly")


def work(bench: Bench, size: int) -> Callable[[int], torch.Tensor]:
    """Matrix products on the model's stream: ``work(n)`` submits ``n`` of them."""
    matrix = torch.randn(size, size, device=bench.device)

    def submit(times: int) -> torch.Tensor:
        result = matrix
        for _ in range(times):
            result = torch.tanh(result @ matrix)
        return result

    return submit


def order(bench: Bench, size: int) -> str:
    """The model writes after long work; a store follows at once, and a load of what it stored."""
    page = 256 << 10
    geometry = one_group([slice_of_rank(t, page, 1, 1, 0) for t in range(4)])
    tensors = [torch.zeros(BLOCKS, page, dtype=torch.int8, device=bench.device) for _ in range(4)]
    compute = work(bench, size)
    there = plan_copies([4], [0], [0, 1, 2, 3], [0, 1, 2, 3], geometry)
    elsewhere = plan_copies([4], [0], [9, 8, 7, 6], [0, 1, 2, 3], geometry)
    with bench.region(geometry) as region:
        copier = bench.copier(tensors, region, geometry)
        try:
            for value in range(1, 6):
                compute(20)
                for tensor in tensors:
                    tensor.fill_(value)
                run(copier, (Direction.STORE, there), (Direction.LOAD, elsewhere))
                if set(bytes(region.buffer[: 4 * geometry.slot_bytes])) != {value}:
                    raise AssertionError("a store did not wait for the model")
                for tensor in tensors:
                    tensor.zero_()
                compute(20)
                copier.submit(9, Direction.LOAD, elsewhere)
                copier.wait([9])
                if any(bool((t[6:10] != value).any()) for t in tensors):
                    raise AssertionError("a load did not wait for the model, or not for a store")
                copier.poll()
        finally:
            copier.close()
    return "5 rounds"


def speed(bench: Bench, total: int, rounds: int = 7) -> str:
    """Medians of ``rounds``: stores, loads, and one bare copy of as many bytes each way."""
    kib, said = 1 << 10, []
    shapes = {
        "pages of 64 KiB": [slice_of_rank(t, 64 * kib, 1, 1, 0) for t in range(16)],
        "rows of 4 KiB": [slice_of_rank(t, 4 * kib, 16, 2, 0) for t in range(16)],
    }
    bare = _bare(bench, total, rounds)
    said.append(f"bare {bare[0]:.1f} out, {bare[1]:.1f} in")
    for name, pages in shapes.items():
        geometry = one_group(pages)
        blocks = max(1, total // (16 * 64 * kib))
        case = Case(name, geometry, [64 * kib] * 16)
        tensors = case.tensors(bench.device, 2 * blocks)
        with bench.region(geometry, blocks) as region:
            copier = bench.copier(tensors, region, geometry)
            rng = random.Random(2)
            rates = []
            for direction in Direction:
                times = []
                for _ in range(rounds + 1):
                    chosen = rng.sample(range(2 * blocks), blocks)
                    slots = rng.sample(range(blocks), blocks)
                    plan = plan_copies([blocks], [0], chosen, slots, geometry)
                    times.append(run(copier, (direction, plan)))
                rates.append(blocks * 16 * 64 * kib / statistics.median(times[1:]) / 1e9)
            copier.close()
        shares = [rate / limit for rate, limit in zip(rates, bare, strict=True)]
        said.append(
            f"{name} {rates[0]:.1f} out ({shares[0]:.2f}), {rates[1]:.1f} in ({shares[1]:.2f})"
        )
    return "GB/s: " + "; ".join(said)


def _bare(bench: Bench, total: int, rounds: int) -> tuple[float, float]:
    is_cuda = bench.device.type == "cuda"
    host = torch.empty(total, dtype=torch.int8, pin_memory=is_cuda)
    device = torch.empty(total, dtype=torch.int8, device=bench.device)
    rates = []
    for target, source in ((host, device), (device, host)):
        times = []
        for _ in range(rounds + 1):
            bench.sync()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            bench.sync()
            times.append(time.perf_counter() - began)
        rates.append(total / statistics.median(times[1:]) / 1e9)
    return rates[0], rates[1]


def overlap(bench: Bench, total: int, size: int) -> str:
    """1.0: as long as the longer of the two alone; 2.0 at most: one after the other."""
    page = 1 << 20
    blocks = max(1, total // page)
    geometry = one_group([slice_of_rank(0, page, 1, 1, 0)])
    tensors = [torch.zeros(blocks, page, dtype=torch.int8, device=bench.device)]
    plan = plan_copies([blocks], [0], range(blocks), range(blocks), geometry)
    compute = work(bench, size)

    def timed(times: int, copies: bool) -> float:
        bench.sync()
        began = time.perf_counter()
        if copies:
            copier.submit(1, Direction.STORE, plan)
        compute(times)
        copier.wait([1])
        bench.sync()
        copier.poll()
        return time.perf_counter() - began

    with bench.region(geometry, blocks) as region:
        copier = bench.copier(tensors, region, geometry)
        timed(1, True)
        copy = statistics.median(timed(0, True) for _ in range(5))
        once = statistics.median(timed(4, False) for _ in range(5)) / 4
        times = max(1, round(copy / once))
        alone = statistics.median(timed(times, False) for _ in range(5))
        both = statistics.median(timed(times, True) for _ in range(5))
        copier.close()
    return (
        f"store {copy * 1e3:.2f} ms, {times} products {alone * 1e3:.2f} ms, both "
        f"{both * 1e3:.2f} ms = {both / max(copy, alone):.2f} of the longer"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; how many checks were wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="or cpu, for a dry run")
    parser.add_argument("--directory", default="/dev/shm", help="where regions are made")
    parser.add_argument("--mib", type=int, default=256, help="moved at once to measure speed")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given.device):
        parser.error(f"--device is {given.device}, but must be cpu, cuda or cuda:N")
    if given.mib < 1:
        parser.error(f"--mib is {given.mib}, but must be 1 or more")
    device = torch.device(given.device)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        print(f"WRONG: torch sees {count} CUDA devices, not {device}; --device cpu is a dry run")
        return 1
    if device.type == "cpu":
        torch.set_num_threads(1)
    bench, total = Bench(device, given.directory), given.mib << 20
    size = 4096 if device.type == "cuda" else 64
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory, dry run"
    print(f"{name}, torch {torch.__version__}", flush=True)
    checks: dict[str, Callable[[], str]] = {
        "exact": lambda: exact(bench),
        "order": lambda: order(bench, size),
        "speed": lambda: speed(bench, total),
        "overlap": lambda: overlap(bench, total, size),
    }
    wrong = 0
    for check, do in checks.items():
        began = time.perf_counter()
        try:
            verdict, text = "OK", do()
        except Exception as e:  # the next check may still tell something
            verdict, text = "WRONG", f"{type(e).__name__}: {e}"
            wrong += 1
        print(f"{verdict} {check}: {text} ({time.perf_counter() - began:.1f} s)", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
