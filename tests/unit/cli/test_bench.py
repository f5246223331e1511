"""``bench tier``: figures of the real thing, and nothing is left of it."""

from collections import Counter
from pathlib import Path

import pytest

from kvtiers.cli import measure
from kvtiers.cli.bare import BareFiles, BareSegments
from kvtiers.cli.measure import percentile
from kvtiers.tiers.fs.files import FilesStore
from kvtiers.tiers.fs.names import chunk_path
from kvtiers.tiers.fs.trials import trial_folder
from tests.unit.cli.cli_kit import good, kvtiers, only_files

WORDS = ["--chunk-bytes", "64KiB", "--total-bytes", "4MiB"]


def test_it_measures_tier_and_disk(tier):
    before = tier.image()
    ran = good(kvtiers("bench", "tier", tier.url, *WORDS, "--json")).json
    assert [f["name"] for f in ran["figures"]] == [
        "tier written",
        "tier read",
        "disk written",
        "disk read",
    ]
    assert (ran["chunks"], ran["layout"]) == (64, tier.layout)
    for figures in ran["figures"]:
        assert figures["bytes_per_s"] > 0
        assert 0 < figures["p50_s"] <= figures["p99_s"]
    assert {k: v[2] for k, v in tier.image().items()} == {k: v[2] for k, v in before.items()}


def test_the_disk_alone_is_called_as_the_tier_calls_it(tier, monkeypatch):
    """Or a share of it would say nothing."""
    calls, real = [], measure.run_calls

    def noted(bare, act, lanes, first, end):
        calls.append((type(bare), bare.per_call, lanes, end - first))
        real(bare, act, lanes, first, end)

    monkeypatch.setattr(measure, "run_calls", noted)
    ran = good(kvtiers("bench", "tier", tier.url, *WORDS, "--json")).json
    shape = (BareFiles, 1) if tier.layout == "files" else (BareSegments, 64)
    assert calls == [(*shape, 8, 64), (*shape, 8 + 8, 64)]
    written, read, *disk = ran["figures"]
    for ours, most in zip((written, read), disk, strict=True):
        assert ours["share_of_disk"] == pytest.approx(ours["bytes_per_s"] / most["bytes_per_s"])
        assert most["share_of_disk"] is None
    text = good(kvtiers("bench", "tier", f"{tier.url}?direct_io=off", *WORDS)).out
    assert "OF THE DISK" in text
    assert "through the page cache" in text


@pytest.mark.parametrize("words", [["--chunk-bytes", "4KiB"], ["--chunk-bytes", "1MiB"]])
def test_one_chunk_or_many(tmp_path, layout, words):
    url = f"fs://{tmp_path}/new?layout={layout}"
    good(kvtiers("bench", "tier", url, *words, "--total-bytes", "1MiB"))
    assert list(tmp_path.iterdir()) == []


def test_large_chunks_need_large_segments(tmp_path):
    words = ["--chunk-bytes", "48MiB", "--total-bytes", "48MiB"]
    ran = good(kvtiers("bench", "tier", f"fs://{tmp_path}/new?layout=log", *words, "--json"))
    assert ran.json["chunks"] == 1


def test_it_is_measured_beside_the_owner_of_a_log(tier):
    store = tier.open()
    good(kvtiers("bench", "tier", tier.url, *WORDS))
    store.check()
    store.close()


def test_the_other_layout_is_measured_where_one_is_in_use(tier):
    """What ``doctor`` advises to try."""
    before = tier.image()
    other = "log" if tier.layout == "files" else "files"
    ran = good(kvtiers("bench", "tier", f"{tier.url}?layout={other}", *WORDS, "--json")).json
    assert ran["layout"] == other
    assert {k: v[2] for k, v in tier.image().items()} == {k: v[2] for k, v in before.items()}


def test_a_bounded_tier_is_neither_filled_nor_asked(tier):
    """Its capacity is for its chunks: the measurement has a folder of its own."""
    before = tier.image()
    good(kvtiers("bench", "tier", f"{tier.url}?capacity=100KiB", *WORDS))
    assert {k: v[2] for k, v in tier.image().items()} == {k: v[2] for k, v in before.items()}


@only_files
def test_chunks_lie_spread_over_the_folders_as_those_of_engines_do(tier, monkeypatch):
    stored = set()
    write = FilesStore.write

    def noted(store, items):
        stored.update(item.key for item in items)
        return write(store, items)

    monkeypatch.setattr(FilesStore, "write", noted)
    good(kvtiers("bench", "tier", tier.url, *WORDS))
    per_folder = Counter(chunk_path(key).partition("/")[0] for key in stored)
    assert per_folder.total() == 64 + 64, "those of the throughput, and one at a time"
    assert max(per_folder.values()) <= 8


@only_files
def test_a_chunk_that_does_not_come_back_is_an_error(tier, monkeypatch):
    read = FilesStore.read

    def one_lost(store, items):
        store.delete([items[0].key])
        return read(store, items)

    monkeypatch.setattr(FilesStore, "read", one_lost)
    before = tier.image()
    ran = kvtiers("bench", "tier", tier.url, *WORDS)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.count("\n") == 1
    assert {k: v[2] for k, v in tier.image().items()} == {k: v[2] for k, v in before.items()}


def test_what_others_put_into_its_new_folder_meanwhile_stays(tmp_path, monkeypatch):
    root = tmp_path / "new"

    def beside_others(options, chunk, count, advance):
        (root / "theirs").touch()
        return measure.measure_tier(options, chunk, count, advance)

    monkeypatch.setattr("kvtiers.cli.commands.bench.measure_tier", beside_others)
    good(kvtiers("bench", "tier", f"fs://{root}", *WORDS))
    assert [path.name for path in root.iterdir()] == ["theirs"]


def test_what_it_keeps_is_a_tier_for_the_other_tools(tmp_path, layout):
    url = f"fs://{tmp_path}/a b".replace(" ", "%20")
    ran = good(kvtiers("bench", "tier", f"{url}?layout={layout}", *WORDS, "--keep"))
    assert "stays, 128 chunks: those of the throughput, and 64 one at a time" in ran.out
    assert f"kvtiers ls {url}\n" in ran.out
    assert not [p for p in (tmp_path / "a b").iterdir() if p.name.startswith(".kvtiers-bench")]
    (found,) = good(kvtiers("ls", url, "--json")).json["namespaces"]
    assert found["chunks"] == 64 + 64, "those of the throughput, and one at a time"
    assert good(kvtiers("verify", url, "--json")).json["chunks"] == 128
    good(kvtiers("migrate", url, f"fs://{tmp_path}/copy?capacity=1GiB"))
    good(kvtiers("gc", f"fs://{tmp_path}/copy", "--max-bytes", "1MiB"))


def test_it_keeps_nothing_among_other_things(tier):
    before = tier.image()
    ran = kvtiers("bench", "tier", tier.url, *WORDS, "--keep")
    assert (ran.status, ran.out) == (2, "")
    assert "is no empty folder" in ran.err
    assert tier.image() == before


def test_percentiles():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(100)), 0.99) == 99
    assert percentile([1.0], 0.99) == 1.0


def test_what_a_killed_measurement_left_goes_with_the_next_one_or_with_gc(tier):
    for number in range(2):
        left = tier.root / f".kvtiers-bench-{number}"
        left.mkdir()
        (left / "much").write_bytes(bytes(4096))
    with trial_folder(str(tier.root)) as living:
        good(kvtiers("gc", tier.url, "--dry-run"))
        assert (tier.root / ".kvtiers-bench-0").exists()
        ran = good(kvtiers("gc", tier.url, "--json")).json
        assert ran["temporary"] == 2
        assert Path(living).exists()
    assert not list(tier.root.glob(".kvtiers-bench-*"))
