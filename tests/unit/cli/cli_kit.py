"""A tier on a real folder, filled by the store that engines use, and commands run on it."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Namespace
from kvtiers.cli import main
from kvtiers.errors import KVTiersError
from kvtiers.hashing import chunk_keys, seed_id
from kvtiers.tiers.base import Item, StoreContext
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.files_place import FilesPlace
from kvtiers.tiers.fs.log import LogStore
from kvtiers.tiers.fs.log_place import LogPlace
from kvtiers.tiers.fs.names import chunk_path
from kvtiers.tiers.fs.tools import FsURL
from tests.unit.tiers.fs.fs_kit import flip
from tests.unit.tiers.tier_kit import ManualClock, filled

ROOT = Path(__file__).resolve().parents[3]
CHUNK = 8192
TOKENS = list(range(100, 164))
"""Four chunks of 16 tokens."""
WALL = 1_700_000_000.0


only_files = pytest.mark.parametrize("layout", ["files"])
only_log = pytest.mark.parametrize("layout", ["log"])


def manifest(model: str = "m", **fields: Any) -> Namespace:
    """What an engine writes, as far as tools read it."""
    span = {"group": 0, "kind": "FullAttentionSpec", "window_tokens": None, "layers": ["a"]}
    known = {
        "format": 1,
        "model": {"digest": f"digest-of-{model}"},
        "kv_dtype": "bfloat16",
        "hash_algorithm": "sha256",
        "hash_seed": seed_id(None),
        "tokens_per_hash": 16,
        "groups": [{**span, "tokens_per_block": 16, "blocks_per_chunk": 1}],
        "bytes": {"blocks_per_chunk": 1},
    }
    return Namespace({**known, **fields})


def group(
    index: int, kind: str = "FullAttentionSpec", blocks: int = 1, window: int | None = None
) -> dict[str, Any]:
    """A KV-cache group in a manifest."""
    return {
        "group": index,
        "kind": kind,
        "tokens_per_block": 16,
        "blocks_per_chunk": blocks,
        "window_tokens": window,
        "layers": [],
    }


NAMESPACE = manifest()
OTHER = manifest("other")
KEYS = chunk_keys(TOKENS, 0, 16, 16)
"""Of the prompt ``TOKENS``."""


CAPACITY = {"files": 1 << 30, "log": 2 << 20}
"""A log makes its segments at their full length: a small one is quick."""


class Tier:
    """A folder with a tier in it."""

    def __init__(self, root: Path, layout: str = "files") -> None:
        self.root = root
        self.layout = layout
        self.url = f"fs://{root}"
        self.new = f"{self.url}?layout={layout}&capacity={CAPACITY[layout]}"
        """As a command has to call it that makes it."""
        self.prompt = KEYS

    def open(
        self, namespace: Namespace = NAMESPACE, wall: ManualClock | None = None, **options: Any
    ) -> FilesStore | LogStore:
        layout = ChunkLayout((GroupLayout(0, CHUNK, 16),))
        clock, wall = ManualClock(), wall or ManualClock(WALL)
        context = StoreContext(
            "fs", "1:fs", namespace, layout, clock, wall, lambda keys, reason: None
        )
        if "eviction" not in options:
            options.setdefault("capacity_bytes", CAPACITY[self.layout])
        made: type[FilesStore] | type[LogStore] = FilesStore
        if self.layout == "log":
            made = LogStore
        return made(context, str(self.root), **options)

    @property
    def place_type(self) -> type[FilesPlace] | type[LogPlace]:
        return FilesPlace if self.layout == "files" else LogPlace

    def place(self) -> FilesPlace | LogPlace:
        return self.place_type(FsURL(str(self.root)), lambda sentence: None)

    def fill(
        self, keys: Sequence[Key] = KEYS, namespace: Namespace = NAMESPACE, used_at: float = WALL
    ) -> "Tier":
        """Write ``keys``; in files each is a second later used than the one before."""
        store = self.open(namespace, ManualClock(used_at))
        items = [Item(k, filled(KEYS.index(k) if k in KEYS else 99, CHUNK)) for k in keys]
        assert store.write(items) == [None] * len(keys)
        store.close()
        if self.layout == "files":
            for i, k in enumerate(keys):
                os.utime(self.file(k, namespace), (used_at + i, used_at + i))
        return self

    def file(self, key: Key, namespace: Namespace = NAMESPACE) -> Path:
        """Of layout ``files``."""
        return self.root / namespace.id / chunk_path(key)

    def payload_at(self, key: Key, namespace: Namespace = NAMESPACE) -> tuple[Path, int]:
        """The file of a chunk, and where in it its payload begins."""
        if self.layout == "files":
            return self.file(key, namespace), PAGE_BYTES
        at = LogPlace(FsURL(str(self.root)), pytest.fail)._snapshot(namespace.id).index.find(key)
        assert at is not None
        return self.root / "log" / f"{at.segment:08d}.kvs", at.page * PAGE_BYTES

    def damage(self, key: Key, namespace: Namespace = NAMESPACE) -> None:
        """Flip a bit of its payload; twice, and it is intact again."""
        path, at = self.payload_at(key, namespace)
        flip(path, at + CHUNK - 1)

    def overwrite(self, key: Key, by: Key) -> None:
        """``key`` holds what ``by`` does, its header included if it has one."""
        if self.layout == "files":
            shutil.copy(self.file(by), self.file(key))
            return
        source, at = self.payload_at(by)
        payload = source.read_bytes()[at : at + CHUNK]
        path, at = self.payload_at(key)
        with path.open("r+b") as f:
            f.seek(at)
            f.write(payload)

    def forget(self, key: Key, namespace: Namespace = NAMESPACE) -> None:
        """The chunk is no more."""
        store = self.open(namespace)
        store.delete([key])
        store.close()

    def chunks(self, namespace: Namespace = NAMESPACE) -> dict[Key, bytes]:
        """What is stored and intact."""
        place = self.place()
        keys = [entry.key for entry in place.entries(namespace.id)]
        read = place.read(namespace.id, keys)
        return {k: bytes(got) for k, got in read if not isinstance(got, KVTiersError)}

    def numbers(self, namespace: Namespace = NAMESPACE) -> list[int]:
        """Which of ``KEYS`` are stored."""
        return [i for i, k in enumerate(KEYS) if k in self.chunks(namespace)]

    def image(self) -> dict[str, tuple[int, int, bytes]]:
        """Everything in the folder, to see that nothing changes."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            info = path.lstat()
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[str(path)] = (info.st_mode, info.st_mtime_ns, data)
        return found


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class _Text(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), "utf-8", write_through=True)

    def text(self) -> str:
        self.flush()
        self.seek(0)
        return self.read()


def kvtiers(*words: object) -> Ran:
    """Run a command in this process."""
    out, err = _Text(), _Text()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as e:
            status = int(e.code or 0)
    return Ran(status, out.text(), err.text())


def process(*words: object, **options: Any) -> Ran:
    """Run a command as an operator does."""
    return process_of([sys.executable, "-m", "kvtiers.cli", *map(str, words)], **options)


def process_of(argv: list[str], **options: Any) -> Ran:
    ran = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        **options,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def in_private_mounts(script: str) -> Ran:
    """Run a shell script that may mount what only it sees; ``$0`` is Python."""
    return process_of(["unshare", "-rm", "sh", "-c", script, sys.executable])


def good(ran: Ran) -> Ran:
    assert (ran.status, ran.err) == (0, "")
    return ran


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path
