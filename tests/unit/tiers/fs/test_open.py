import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtiers.chunks import Namespace
from kvtiers.errors import ConfigError
from kvtiers.tiers.fs import FsOptions
from kvtiers.tiers.fs.scratch import Scratch, sweep
from tests.unit.tiers.fs.fs_kit import Folder, capacity, read, write
from tests.unit.tiers.tier_kit import NAMESPACE, payload

MANIFEST = f"{NAMESPACE.id}/manifest.json"


def complaint(folder: Folder, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        folder.open(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_manifest_says_what_the_bytes_are(folder: Folder) -> None:
    folder.open().close()
    assert (folder.root / MANIFEST).read_text() == '{"format":1,"model":"m"}'
    folder.open().close()
    folder.open(Namespace({"model": "other"})).close()


def test_manifest_that_disagrees_is_refused(folder: Folder) -> None:
    folder.open().close()
    (folder.root / MANIFEST).write_bytes(b'{"format":1,"model":"\xff"}')
    text = complaint(folder)
    assert text.startswith("root_dir holds ")
    assert MANIFEST in text
    assert "disagrees" in text
    assert "move the folder" in text
    assert not (folder.root / NAMESPACE.id / "tmp").exists()


def test_chunks_that_lost_their_manifest_get_it_again(folder: Folder) -> None:
    store = folder.open()
    write(store, 1)
    store.close()
    (folder.root / MANIFEST).unlink()
    store = folder.open()
    assert (folder.root / MANIFEST).exists()
    assert read(store, 1) == [payload(1)]
    store.close()


@pytest.mark.parametrize("stranger", ["notes.txt", "00/notes.txt", "000/x"])
def test_other_files_without_a_manifest_are_refused(folder: Folder, stranger: str) -> None:
    store = folder.open()
    write(store, 1)
    store.close()
    (folder.root / MANIFEST).unlink()
    theirs = folder.root / NAMESPACE.id / stranger
    theirs.parent.mkdir(exist_ok=True)
    theirs.touch()
    text = complaint(folder)
    assert f"has no manifest.json that says what it is, but {stranger.removesuffix('/x')}" in text
    assert str(folder.root / NAMESPACE.id) in text


def test_a_manifest_that_is_a_fifo_does_not_hang(folder: Folder) -> None:
    folder.open().close()
    (folder.root / MANIFEST).unlink()
    os.mkfifo(folder.root / MANIFEST)
    assert "disagrees" in complaint(folder)


@pytest.mark.parametrize("name", ["/tmp/a\0b", "/tmp/\ud800"])
def test_a_root_that_is_no_path(name: str) -> None:
    with pytest.raises(ConfigError, match="no path has such a name") as caught:
        FsOptions(root_dir=name)
    str(caught.value).encode()


def test_an_empty_namespace_folder_is_somebody_else_just_starting(folder: Folder) -> None:
    (folder.root / NAMESPACE.id / "tmp").mkdir(parents=True)
    folder.open().close()


def test_root_that_is_a_file(folder: Folder) -> None:
    folder.root.write_text("hello")
    assert "root_dir is" in complaint(folder)
    assert "a file is in the way" in complaint(folder)
    folder.root = folder.root / "below"
    assert "a file is in the way" in complaint(folder)


def test_root_with_other_things(folder: Folder) -> None:
    (folder.root / "photos").mkdir(parents=True)
    text = complaint(folder)
    assert "root_dir is" in text
    assert "holds other things (photos)" in text
    assert "name an empty folder" in text
    assert os.listdir(folder.root) == ["photos"]


def test_a_name_like_a_namespace_does_not_make_a_root_ours(folder: Folder) -> None:
    (folder.root / "photos").mkdir(parents=True)
    (folder.root / ("0" * 32)).mkdir()
    (folder.root / ("0" * 32) / "manifest.json").write_text("{}")
    assert "holds other things (photos)" in complaint(folder)
    (folder.root / "photos").rmdir()
    folder.open().close()
    (folder.root / "photos").mkdir()
    folder.open().close()


def test_root_beside_hidden_things_and_vllms_own_tier(folder: Folder) -> None:
    for name in (".snapshot", "lost+found", "Qwen_Qwen3-0.6B_fcca4633a2a1_r0"):
        (folder.root / name).mkdir(parents=True)
    folder.open().close()


def test_unwritable_root(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.root.mkdir()
    real = os.pwritev
    for code in (errno.EROFS, errno.EACCES, errno.EIO, errno.ENOSPC):

        def pwritev(*_: object, code: int = code) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "pwritev", pwritev)
        assert f"cannot write ({os.strerror(code)})" in complaint(folder)
    monkeypatch.setattr(os, "pwritev", real)
    folder.open().close()


def test_root_that_cannot_be_made(folder: Folder) -> None:
    folder.root = Path("/proc/kvtiers")
    assert "root_dir is /proc/kvtiers, where kvtiers cannot write" in complaint(folder)


def test_tilde_and_relative_paths(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.root.parent))
    home, folder.root = folder.root, Path("~/kv")
    folder.open().close()
    assert (home / MANIFEST).exists()


def test_capacity_below_one_chunk(folder: Folder) -> None:
    for given in (0, -1, 8192 + 4096, capacity(1) - 101):
        assert complaint(folder, capacity_bytes=given).startswith(f"capacity_bytes is {given}, le")
    assert not folder.root.exists()


def test_capacity_above_the_file_system(folder: Folder) -> None:
    text = complaint(folder, capacity_bytes=1 << 60)
    assert text.startswith(f"capacity_bytes is {1 << 60}, more than the ")
    assert f"of the file system that holds {folder.root}" in text


def test_capacity_as_a_share(folder: Folder) -> None:
    info = os.statvfs(folder.root.parent)
    store = folder.open(capacity_fraction=0.01)
    assert f"/{int(0.01 * info.f_blocks * info.f_frsize)} bytes" in repr(store)
    store.close()
    text = complaint(folder, capacity_fraction=1e-12)
    assert text.startswith("capacity_fraction is 1e-12, which is ")
    assert "less than one chunk needs" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "capacity_bytes is missing"),
        ({"capacity_bytes": 1 << 30, "capacity_fraction": 0.5}, "capacity_fraction is stated besi"),
        ({"capacity_fraction": 0.0}, "capacity_fraction is 0: give a share above 0 and up to 0.95"),
        ({"capacity_fraction": 0.96}, "capacity_fraction is 0.96: give"),
        ({"capacity_fraction": -0.1}, "capacity_fraction is -0.1: give"),
        (
            {"eviction": "external", "capacity_bytes": 1 << 30},
            'capacity_bytes is stated, but eviction is "external"',
        ),
        (
            {"eviction": "external", "capacity_fraction": 0.5},
            'capacity_fraction is stated, but eviction is "external"',
        ),
    ],
)
def test_exactly_one_bound_is_stated(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FsOptions(root_dir="/x", **options)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_an_external_root_takes_no_bound_and_the_default_needs_one() -> None:
    assert FsOptions(root_dir="/x", eviction="external").capacity_bytes is None
    assert FsOptions(root_dir="/x", capacity_bytes=1).eviction == "own"


def dead_scratch(namespace: Path, name: str = "1-dead") -> Path:
    dead = namespace / "tmp" / name
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "0").write_text("half a chunk")
    return dead


def test_sweep_leaves_alone_what_is_not_certainly_ours(folder: Folder) -> None:
    folder.open().close()
    namespace, precious = folder.root / NAMESPACE.id, folder.root.parent / "precious"
    others = [dead_scratch(folder.root / ("0" * 32)), dead_scratch(namespace, "holiday")]
    unlocked = dead_scratch(namespace, "2-unlocked")
    (unlocked / "lock").unlink()
    full = dead_scratch(namespace, "3-full")
    (full / "photo.jpg").touch()
    dead_scratch(precious)
    os.symlink(precious / "tmp" / "1-dead", namespace / "tmp" / "4-link")
    linked = folder.root / Namespace({"model": "linked"}).id
    linked.mkdir()
    (linked / "manifest.json").write_text(Namespace({"model": "linked"}).manifest())
    os.symlink(precious / "tmp", linked / "tmp")
    assert sweep(str(folder.root)) == 0
    for path in [*others, precious / "tmp" / "1-dead"]:
        assert sorted(os.listdir(path)) == ["0", "lock"]
    assert os.listdir(unlocked) == ["0"]
    assert os.listdir(full) == ["photo.jpg"]


@pytest.mark.parametrize("call", ["chmod", "open"])
def test_a_scratch_folder_that_is_cleared_while_it_is_made_is_made_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real, times = getattr(os, call), [3]

    def clear_then(path: str, *args: int, **where: int) -> object:
        made = path.removesuffix("/lock")
        if times[0] and os.path.basename(os.path.dirname(made)) == "tmp":
            times[0] -= 1
            shutil.rmtree(made)
        return real(path, *args, **where)

    monkeypatch.setattr(os, call, clear_then)
    scratch = Scratch(str(folder.root))
    assert times == [0]
    assert os.listdir(scratch.folder) == ["lock"]
    scratch.close()


def test_a_closed_scratch_folder_does_not_close_anothers_file(folder: Folder) -> None:
    scratch = Scratch(str(folder.root))
    scratch.close()
    others = [os.open(folder.root, os.O_RDONLY) for _ in range(8)]
    scratch.close()
    for fd in others:
        os.close(fd)


def test_sweep_takes_dead_scratch_folders_only(folder: Folder) -> None:
    folder.open().close()
    namespace = folder.root / NAMESPACE.id
    live = Scratch(str(namespace))
    dead = dead_scratch(namespace)
    assert sweep(str(folder.root)) == 1
    assert not dead.exists()
    assert Path(live.folder).exists()
    assert live.path() != live.path()
    live.close()
    assert not Path(live.folder).exists()


WRITER = """
import itertools, sys
from pathlib import Path
from typing import Any
sys.path[:0] = sys.argv[2:]
from tests.unit.tiers.fs.fs_kit import Folder, capacity, write
folder = Folder(Path(sys.argv[1]))
folder.let_promises_end()
store = folder.open(capacity_bytes=capacity(40))
for n in itertools.count():
    assert write(store, n) == [None]
    print(n, flush=True)
"""


def test_killed_writer_leaves_no_torn_chunk_and_no_litter(folder: Folder) -> None:
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder.root), *sys.path],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        while int(child.stdout.readline()) < 60:
            continue
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        assert child.wait(30) == -signal.SIGKILL

        litter = list((folder.root / NAMESPACE.id / "tmp").iterdir())
        assert litter, "the killed one could not clean up"
        store = folder.open(capacity_bytes=capacity(40))
        assert not any(path.exists() for path in litter)
        found = [int.from_bytes(e.key[:32], "big") for e in store.scan()]
        assert len(found) >= 38
        assert read(store, *found) == [payload(n) for n in found]
        assert store.used_bytes == folder.disk_bytes()
        store.check()
        store.close()
