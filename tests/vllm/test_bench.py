"""Every figure of ``make bench``, at a size that proves nothing: names, format, sound numbers."""

import math

import pytest

from bench import (
    copy,
    flat,
    fs_files,
    fs_log,
    imports,
    index,
    io_steps,
    kv,
    manager,
    obj,
    observe,
    p2p_ttft,
    ttft,
)
from bench.lines import figures_in, is_ours, remarks_in, spreads_in

OPERATIONS = (
    "lookup_many_hit",
    "lookup_one_hit",
    "lookup_one_miss",
    "store",
    "load",
    "touch",
    "store_evict",
    "arc_store_evict",
)


def printed(capsys):
    """The lines since the last call, each of which must be of a kind that is known."""
    lines = capsys.readouterr().out.splitlines()
    assert all(is_ours(line) for line in lines), lines
    return lines


def figures_of(lines):
    found = {f"{f.kind} {f.name}": f.value for f in figures_in(lines)}
    assert all(math.isfinite(value) for value in found.values()), found
    positive = {name: value for name, value in found.items() if not name.startswith("FLAT manager")}
    assert all(value > 0 for value in positive.values()), found
    return found


def test_manager_beside_upstream(capsys):
    manager.measure(manager.TINY)
    lines = printed(capsys)
    found = figures_of(lines)
    assert found.keys() == {f"RATIO manager.{op}" for op in (*OPERATIONS, "store_evict_1m")}
    assert found.keys() == spreads_in(lines).keys()


def test_manager_beside_a_bare_dictionary(capsys):
    flat.measure(flat.TINY)
    operations = ("lookup_hit", "lookup_miss", "touch", "load", "store_evict")
    assert figures_of(printed(capsys)).keys() == {f"FLAT manager.{op}" for op in operations}


def test_the_index(capsys):
    index.measure(index.TINY, rounds=3)
    lines = printed(capsys)
    assert figures_of(lines).keys() == {"COST index.lookup_ms", "COST index.block_bytes"}
    assert [name for _, name, _ in remarks_in(lines)] == ["index.apply"]


def test_what_watching_costs(capsys):
    observe.measure(observe.TINY, rounds=3)
    lines = printed(capsys)
    assert figures_of(lines).keys() == {"SHARE observe.metrics"}
    assert [name for _, name, _ in remarks_in(lines)] == ["observe.request"]


def test_the_copier_beside_memcpy(capsys):
    copy.measure(threads=2, rounds=7, tiny=True)
    names = ("LIMIT copy.contiguous", "LIMIT copy.strided", "FLAT copy.two_ranks")
    assert figures_of(printed(capsys)).keys() == set(names)


def test_fs_log(tmp_path, monkeypatch):
    monkeypatch.setattr(fs_log, "bytes_per_round", lambda chunk_bytes: 1 << 23)
    lines = list(fs_log.lines(["512KiB", fs_log.INDEX], 2, str(tmp_path), chunks=2000))
    moved = {f"fs.log.{act}.512KiB" for act in ("write", "fresh_write", "read")}
    assert figures_of(lines).keys() == {
        *(f"{kind} {name}" for kind in ("RATIO", "LIMIT") for name in moved),
        *(f"COST fs.log.{name}" for name in ("index_bytes", "open_s", "open_killed_s")),
    }


def test_fs_files(tmp_path, monkeypatch):
    monkeypatch.setattr(fs_files, "bytes_per_round", lambda chunk_bytes: 1 << 22)
    monkeypatch.setattr(fs_files, "LOOKUP_KEYS", 2048)
    lines = list(fs_files.lines(["512KiB", fs_files.LOOKUP], 2, str(tmp_path)))
    assert figures_of(lines).keys() == {
        "RATIO fs.files.write.512KiB",
        "LIMIT fs.files.write.512KiB",
        "RATIO fs.files.read.512KiB",
        "LIMIT fs.files.read.512KiB",
        "RATIO fs.files.lookup",
    }
    assert "fs.files" in {name for kind, name, _ in remarks_in(lines) if kind == "MODE"}


def test_obj_beside_obstore_and_boto3(capsys, tmp_path, s3):
    """``s3`` puts the environment back as it was."""
    obj.measure(2, obj.TINY_BYTES, 64, str(tmp_path))
    lines = printed(capsys)
    assert figures_of(lines).keys() == {
        *(f"LIMIT obj.{act}.{size}" for act in ("put", "get") for size in obj.SIZES),
        *(f"RATIO obj.{act}.boto3_cpu{size}" for act in ("put", "get") for size in ("", ".256KiB")),
    }
    counted = {name: text.split() for kind, name, text in remarks_in(lines) if kind == "NOTE"}
    for act in ("put", "lookup", "get"):
        packed, unpacked = map(float, counted[f"obj.requests.{act}"])
        assert packed < unpacked
    assert list(tmp_path.iterdir()) == []


def test_kv(capsys):
    kv.measure(2, kv.TINY_BYTES)
    names = {f"kv.{act}{size}" for act in ("put", "get") for size in ("", ".2MiB")}
    lines = printed(capsys)
    assert figures_of(lines).keys() == {f"LIMIT {name}" for name in names}
    assert {name for kind, name, _ in remarks_in(lines) if kind == "RATE"} == names


@pytest.mark.parametrize(("layout", "name"), [("files", "io"), ("log", "io_log")])
def test_steps_at_work(capsys, tmp_path, layout, name):
    io_steps.measure(str(tmp_path), io_steps.TINY, layout)
    lines = printed(capsys)
    assert figures_of(lines).keys() == {f"FLAT {name}.step_p99"}
    assert name in {name for kind, name, _ in remarks_in(lines) if kind == "MODE"}


@pytest.mark.parametrize(("layout", "names"), [("files", ["host", "disk"]), ("log", ["log"])])
def test_time_to_first_token(capsys, tmp_path, checkpoint, layout, names):
    ttft.measure(str(checkpoint("llama")), str(tmp_path), ttft.TINY, layout)
    lines = [line for line in capsys.readouterr().out.splitlines() if is_ours(line)]
    assert figures_of(lines).keys() == {f"RATIO ttft.{name}" for name in names}
    assert f"ttft.{names[-1]}" in {name for kind, name, _ in remarks_in(lines) if kind == "MODE"}


def test_time_to_first_token_with_prefill_elsewhere(capsys, checkpoint):
    p2p_ttft.measure(str(checkpoint("llama")), ttft.TINY)
    lines = [line for line in capsys.readouterr().out.splitlines() if is_ours(line)]
    assert figures_of(lines).keys() == {"RATIO p2p.ttft"}
    times = {name: text.split()[0] for kind, name, text in remarks_in(lines) if kind == "TIME"}
    assert times.keys() == {"p2p.freed", "p2p.taken", "p2p.ttft"}
    assert 0 <= float(times["p2p.freed"]) < 10_000 > float(times["p2p.taken"])


def test_cold_files_can_still_be_read(tmp_path):
    (tmp_path / "a.kvc").write_bytes(b"x")
    ttft.make_cold(str(tmp_path))
    assert (tmp_path / "a.kvc").read_bytes() == b"x"


def test_import(capsys):
    imports.measure(1)
    ((kind, name, text),) = remarks_in(capsys.readouterr().out.splitlines())
    own, everything = map(float, text.split()[:2])
    assert (kind, name) == ("TIME", "import.kvtiers")
    assert 0 < own < everything
