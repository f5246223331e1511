"""The ``obj`` tier on a SeaweedFS of its own, against bare obstore and against boto3.

    PYTHONPATH=src .venv/bin/python -m bench.obj [--rounds 7] [--root DIR] [--tiny]

The tier is driven as an engine drives it: jobs of 16 MiB, divided over its lanes, never more than
``REQUESTS`` requests at once. Bare obstore and boto3 have as many threads, each of which sends one
request after the other; they know no header and no checksum of ours, and what they get they leave
where the library puts it. boto3 is taken as it comes, and as somebody would set it who knows it:
without signatures and checksums of payloads. All take turns: every round measures each, the order
alternates, and a ratio is the median of the rounds' ratios. Client and server share the processor,
so rates are those of both together; processor seconds are those of this process alone. Prints::

    LIMIT obj.<put|get>.<size>              ours over bare obstore, in bytes per second
    RATIO obj.<put|get>.boto3_cpu[.256KiB]  ours over boto3, in bytes per processor second; 2 MiB
    RATE obj.<put|get>.<size> <GB/s: ours> <obstore> <boto3> <boto3, set>
    TIME obj.<put|get>.<size> <processor seconds per GB, of the same>
    NOTE obj.requests.<put|lookup|get> <per GB of chunks of 64 KiB: packed> <an object each>
"""

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import boto3
import obstore
from botocore.config import Config
from obstore.store import S3Store

from bench.hostmemory import PATIENCE_S, Memory, run_jobs
from bench.lines import median_of, remark
from kvtiers.chunks import ChunkLayout, GroupLayout, Key, Namespace, make_key
from kvtiers.cli.bare import on_threads
from kvtiers.tiers import build_tier
from kvtiers.tiers.base import Item, JobKind, StoreContext
from kvtiers.tiers.obj.client import open_client
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.store import ObjStore
from tests.servers.fake_s3 import FakeS3
from tests.servers.seaweedfs import SeaweedFS, seaweedfs

REQUESTS = 8
"""At once, of each side."""
SIZES = {"256KiB": 256 << 10, "2MiB": 2 << 20}
WITHOUT_SUFFIX = "2MiB"
ROUND_BYTES, TINY_BYTES = 1 << 26, 1 << 23
ROUNDS = 7
PACKED_CHUNK, PACKED_CHUNKS = 64 << 10, 1024
_VOLUME_MB = 1024
_NAMESPACE = Namespace({"bench": "obj"})

Act = Callable[[Sequence[Key]], None]


class Ours:
    """The tier, whose lanes hand requests to as many threads as the other sides have."""

    def __init__(self, server: SeaweedFS, bucket: str, memory: Memory) -> None:
        self._memory = memory
        self._tier: Any = build_tier(
            {
                "type": "obj",
                "url": f"s3://{bucket}/ours",
                "endpoint": server.endpoint,
                "allow_http": True,
                "max_requests": REQUESTS,
                "n_read_threads": REQUESTS // 2,
                "n_write_threads": REQUESTS // 2,
            },
            0,
            namespace=_NAMESPACE,
            layout=ChunkLayout((GroupLayout(0, memory.chunk_bytes, 16),)),
            clock=time.monotonic,
            wall_clock=time.time,
        )

    def put(self, keys: Sequence[Key]) -> None:
        run_jobs(self._tier, JobKind.STORE, keys, self._memory)

    def get(self, keys: Sequence[Key]) -> None:
        run_jobs(self._tier, JobKind.LOAD, keys, self._memory)

    def close(self) -> None:
        self._tier.shutdown(PATIENCE_S)


class Bare:
    """One call of obstore for each chunk."""

    def __init__(self, server: SeaweedFS, bucket: str, memory: Memory) -> None:
        self._memory = memory
        self._store = S3Store(
            bucket,
            prefix="bare",
            endpoint=server.endpoint,
            region=server.region,
            unsigned_payload=True,
            client_options={"allow_http": True, "timeout": timedelta(seconds=PATIENCE_S)},
        )

    def put(self, keys: Sequence[Key]) -> None:
        def one(slot: int) -> None:
            view = self._memory.slot(slot)
            obstore.put(self._store, keys[slot].hex(), view, use_multipart=False)

        on_threads(REQUESTS, range(len(keys)), one)

    def get(self, keys: Sequence[Key]) -> None:
        on_threads(
            REQUESTS, range(len(keys)), lambda s: obstore.get(self._store, keys[s].hex()).bytes()
        )

    def close(self) -> None:
        """It has nothing to close."""


class Boto:
    """One call of boto3 for each chunk."""

    settings: Mapping[str, Any] = {"s3": {"addressing_style": "path"}}

    def __init__(self, server: SeaweedFS, bucket: str, memory: Memory) -> None:
        self._memory, self._bucket, self._below = memory, bucket, type(self).__name__
        self._client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=server.region,
            config=Config(max_pool_connections=REQUESTS, **self.settings),
        )

    def put(self, keys: Sequence[Key]) -> None:
        def one(slot: int) -> None:
            name, view = f"{self._below}/{keys[slot].hex()}", self._memory.slot(slot)
            self._client.put_object(Bucket=self._bucket, Key=name, Body=bytes(view))

        on_threads(REQUESTS, range(len(keys)), one)

    def get(self, keys: Sequence[Key]) -> None:
        def one(slot: int) -> None:
            name = f"{self._below}/{keys[slot].hex()}"
            self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()

        on_threads(REQUESTS, range(len(keys)), one)

    def close(self) -> None:
        self._client.close()


class SetBoto(Boto):
    """Without what the other sides do not do either."""

    settings = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": "path", "payload_signing_enabled": False},
    }


def new_keys(start: str, count: int) -> list[Key]:
    """Keys that were never used before, spread as digests are."""
    digests = (hashlib.sha256(f"{start}/{number}".encode()).digest() for number in range(count))
    return [make_key(digest, 0) for digest in digests]


def timed(act: Act, keys: Sequence[Key]) -> tuple[float, float]:
    """Seconds that it takes, and processor seconds of this process."""
    began, began_cpu = time.perf_counter(), time.process_time()
    act(keys)
    return time.perf_counter() - began, time.process_time() - began_cpu


def measure_size(server: SeaweedFS, name: str, rounds: int, total: int) -> None:
    """Print the figures of one chunk size."""
    memory, bucket = Memory(SIZES[name], total), server.new_bucket()
    sides = {"ours": Ours, "bare": Bare, "boto3": Boto, "set": SetBoto}
    opened: dict[str, Any] = {side: cls(server, bucket, memory) for side, cls in sides.items()}
    took: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):  # the first one makes connections and does not count
        if number == 1:
            took.clear()
        keys = new_keys(f"{name}/{number}", memory.slots)
        for act in ("put", "get"):
            for side in list(opened)[:: 1 if number % 2 else -1]:
                if (side, act) == ("ours", "get"):
                    memory.spoil()
                measured = timed(getattr(opened[side], act), keys)
                took.setdefault((side, act), []).append(measured)
                if not memory.intact():
                    raise SystemExit("wrong bytes came back")
    for side in opened.values():
        side.close()
    for act in ("put", "get"):
        _print(name, act, total, {side: took[side, act] for side in sides})


def _print(name: str, act: str, total: int, took: dict[str, list[tuple[float, float]]]) -> None:
    ours, bare, boto = took["ours"], took["bare"], took["boto3"]
    limits = [b / a for (a, _), (b, _) in zip(ours, bare, strict=True)]
    median_of("LIMIT", f"obj.{act}.{name}", limits)
    suffix = "" if name == WITHOUT_SUFFIX else f".{name}"
    ratios = [b / a for (_, a), (_, b) in zip(ours, boto, strict=True)]
    median_of("RATIO", f"obj.{act}.boto3_cpu{suffix}", ratios)
    rates = [total / median(t for t, _ in took[side]) / 1e9 for side in took]
    costs = [median(c for _, c in took[side]) / total * 1e9 for side in took]
    for kind, values in (("RATE", rates), ("TIME", costs)):
        remark(kind, f"obj.{act}.{name}", " ".join(f"{value:.2f}" for value in values))


def count_requests(chunks: int) -> None:
    """Print how many requests small chunks take, packed and not; a counting server is asked."""
    counts = [_requests(chunks, pack_below) for pack_below in (PACKED_CHUNK + 1, 0)]
    per_gb = 1e9 / (chunks * PACKED_CHUNK)
    for act in counts[0]:
        texts = [f"{count[act] * per_gb:.0f}" for count in counts]
        remark("NOTE", f"obj.requests.{act}", " ".join(texts))


def _requests(chunks: int, pack_below: int) -> dict[str, int]:
    """Requests of writing, looking up and reading, 64 chunks a call."""
    memory = Memory(PACKED_CHUNK, chunks * PACKED_CHUNK)
    keys = new_keys("requests", memory.slots)
    found: dict[str, int] = {}
    with FakeS3() as server:
        writer, reader = (_store(server, pack_below) for _ in range(2))
        for act, call in (
            ("put", lambda some: writer.write(_items(memory, some))),
            ("lookup", lambda some: reader.contains([keys[slot] for slot in some])),
            ("get", lambda some: reader.read(_items(memory, some))),
        ):
            before = server.asked()
            for at in range(0, len(keys), 64):
                _must(call(range(at, min(at + 64, len(keys)))))
            found[act] = server.asked() - before
        writer.close()
        reader.close()
    return found


def _items(memory: Memory, slots: Iterable[int]) -> list[Item]:
    keys = new_keys("requests", memory.slots)
    return [Item(keys[slot], memory.slot(slot)) for slot in slots]


def _must(results: Sequence[Any]) -> None:
    if any(result is not None and result is not True for result in results):
        raise SystemExit(f"kvtiers: {results}")


def _store(server: FakeS3, pack_below: int) -> ObjStore:
    layout = ChunkLayout((GroupLayout(0, PACKED_CHUNK, 16),))
    context = StoreContext(
        "obj", "1:obj", _NAMESPACE, layout, time.monotonic, time.time, lambda keys, why: None
    )
    options = ObjOptions(url="s3://bucket/ours", endpoint=server.endpoint, allow_http=True)
    return ObjStore(context, open_client(options), pack_below_bytes=pack_below)


def measure(
    rounds: int = ROUNDS,
    total: int = ROUND_BYTES,
    chunks: int = PACKED_CHUNKS,
    root: str | None = None,
) -> None:
    """Print all figures."""
    with seaweedfs(root, _VOLUME_MB) as server:
        os.environ.update(server.credentials)
        for name in SIZES:
            measure_size(server, name, rounds, total)
    count_requests(chunks)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="The obj tier against obstore and boto3")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--root", help="where the server may have its files")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    given = parser.parse_args()
    if given.tiny:
        measure(2, TINY_BYTES, 64, given.root)
    else:
        measure(given.rounds, root=given.root)


if __name__ == "__main__":
    main()
