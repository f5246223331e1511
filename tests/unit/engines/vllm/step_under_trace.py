"""A process that takes one scheduler step with an ``fs`` tier between two marks.

    python -m tests.unit.engines.vllm.step_under_trace busy|asleep|waiting files|log FOLDER

busy: every lane hangs in the store. asleep: the lanes have nothing to do, what they finished has
not been taken in. waiting: the step waits for a lock and makes a system call, to show that both
are seen.
"""

import gc
import mmap
import os
import sys
import threading
import time
from typing import Any

from bench.sides import BATCH, CHUNK_BYTES, TOKENS, Side, manager_over, request_keys
from kvtiers.chunks import ChunkLayout, GroupLayout, Namespace
from kvtiers.testing.gates import GatedStore
from kvtiers.tiers.base import StoreContext
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.runner import StoreTier, TierIdentity
from tests.unit.engines.vllm.syscalls import mark

SLOTS = 8 * BATCH
LANES = 4
STORES: dict[str, Any] = {"files": FilesStore, "log": LogStore}


class Rig:
    """A manager whose tier stores real files, with lanes that can be held."""

    def __init__(self, layout: str, root: str) -> None:
        memory = memoryview(mmap.mmap(-1, SLOTS * CHUNK_BYTES))
        inbox = Inbox()
        context = StoreContext(
            "fs",
            "1:fs",
            Namespace({"test": "syscalls"}),
            ChunkLayout((GroupLayout(0, CHUNK_BYTES, TOKENS),)),
            time.monotonic,
            time.time,
            inbox.removed,
        )
        self.gate = GatedStore(STORES[layout](context, root, capacity_bytes=1 << 30))
        half = LANES // 2
        options = RunnerOptions(n_read_threads=half, n_write_threads=half, min_slice_bytes=1)
        identity = TierIdentity("fs", "1:fs", "STORAGE", "LOCAL")
        self.tier = StoreTier(self.gate, identity, options, inbox, time.monotonic)

        def view(slot: int, nbytes: int, writable: bool) -> memoryview:
            whole = memory[slot * CHUNK_BYTES :][:nbytes]
            return whole if writable else whole.toreadonly()

        self.side = Side(manager_over(self.tier, SLOTS, CHUNK_BYTES, view))
        self._stored = 0
        self._promoted = 0
        self._recent: list[Any] = []
        for _ in range(2 * SLOTS // BATCH):
            self.prepare()()
            self.tier.drain_jobs(30)

    def prepare(self) -> Any:
        """A step: hits, chunks on disk, chunks nowhere, a store and its end. Keys are made here."""
        hits, stored = self._recent, request_keys(self._stored)
        below = request_keys(self._promoted)[: BATCH // 2] if self._stored > SLOTS else []
        nowhere = request_keys((1 << 40) + self._stored)
        self._stored += BATCH
        self._promoted += BATCH if below else 0
        self._recent = stored
        side, manager = self.side, self.side.manager

        def step() -> None:
            asks, looks, stores = (side.request(n) for n in (hits, [*below, *nowhere], stored))
            for name in hits:
                manager.lookup(name, asks)
            for name in [*below, *nowhere]:
                manager.lookup(name, looks)
            output = manager.prepare_store(stored, stores)
            assert len(output.keys_to_store) == BATCH
            manager.complete_store(set(output.keys_to_store), stores)
            side.step()
            for context in (asks, looks, stores):
                side.finish(context)

        return step

    def hold_all_lanes(self) -> None:
        """From here on each lane hangs in the store."""
        self.gate.hold("read", "write")
        self.prepare()()
        self.gate.wait_until_held(count=LANES)

    def close(self) -> None:
        """Everything must have worked."""
        self.gate.release()
        self.tier.drain_jobs(30)
        self.side.step()
        assert not self.side.manager.inert
        self.side.manager.core.check()
        self.tier.shutdown(30)


def misbehaving() -> None:
    """Waits for a lock, and asks the system for something."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=0.001)
    os.stat(".")


def main(scenario: str, layout: str, root: str) -> None:
    """Take the step between two marks."""
    sys.setswitchinterval(60)  # the interpreter's own lock is not what is looked for
    rig = Rig(layout, root)
    if scenario == "busy":
        rig.hold_all_lanes()
    step = misbehaving if scenario == "waiting" else rig.prepare()
    gc.collect()
    gc.disable()
    os.write(1, b"ready\n")
    sys.stdin.readline()
    mark()
    step()
    mark()
    rig.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
