"""``doctor``: each check says what was found and what to do; only a failure ends in 1."""

import json
import os
import resource
import socket
from pathlib import Path

import pytest

from kvtiers.cli import checks, diskchecks
from kvtiers.cli.checks import check_chunk, check_direct, check_disk, check_inodes
from kvtiers.cli.diskchecks import check_file_system, file_system, judge_speed
from kvtiers.cli.logchecks import check_segments
from kvtiers.cli.output import size
from kvtiers.cli.verdicts import Grade
from kvtiers.errors import ConfigError
from kvtiers.tiers.fs.urls import LAYOUTS
from kvtiers.tiers.urls import parse_url
from tests.unit.cli.cli_kit import (
    NAMESPACE,
    Tier,
    good,
    in_private_mounts,
    kvtiers,
    only_files,
    only_log,
    process,
    write_json,
)

SMALL = {"cpu_bytes_to_use": 4 << 20}


def graded(ran):
    return {check["check"]: check["grade"] for check in ran.json["checks"]}


def test_a_machine_alone(tmp_path):
    ran = good(kvtiers("doctor", "--json"))
    assert ran.json["ok"]
    assert list(graded(ran)) == ["python", "xxhash", "memory", "open files", "locked memory"]


@only_files
def test_a_tier_that_is_there(tier):
    ran = good(kvtiers("doctor", f"{tier.url}?capacity=64MiB", "--json"))
    grades = graded(ran)
    assert (grades["permissions"], grades["disk space"]) == ("ok", "ok")
    assert grades["chunk size"] == "warn"  # 8 KiB in a file each
    remedies = [c["remedy"] for c in ran.json["checks"] if c["grade"] != "ok"]
    assert all(remedies)
    assert any("blocks_per_chunk" in r for r in remedies)


def test_a_capacity_that_is_not_known_is_asked_for_in_a_url_that_works(tmp_path):
    (tmp_path / "empty").mkdir()
    absent, empty = f"fs://{tmp_path}/absent", f"fs://{tmp_path}/empty"
    for url, better in (
        (absent, f"{absent}?capacity=200GiB"),
        (f"{absent}?layout=files", f"{absent}?layout=files&capacity=200GiB"),
        (empty, f"{empty}?layout=files&capacity=200GiB"),
    ):
        ran = kvtiers("doctor", url, "--json")
        (space,) = [c["remedy"] for c in ran.json["checks"] if c["check"] == "disk space"]
        assert f"'{better}'" in space
        assert parse_url(better).capacity_bytes == 200 << 30


@only_log
def test_a_log_that_is_there(tier):
    ran = good(kvtiers("doctor", tier.new, "--json"))
    found = {c["check"]: c for c in ran.json["checks"]}
    assert "inodes" not in found
    assert {found[name]["grade"] for name in ("chunk size", "owner", "segments")} == {"ok"}
    assert found["owner"]["found"] == "no engine has the log open"
    assert found["segments"]["found"].startswith("3 of up to ")
    store = tier.open()
    ran = good(kvtiers("doctor", tier.new, "--json"))
    store.close()
    owner = next(c for c in ran.json["checks"] if c["check"] == "owner")
    assert (owner["grade"], owner["found"]) == ("warn", f"process {os.getpid()} has the log open")


@only_log
def test_a_capacity_that_a_log_cannot_keep(tier):
    ran = kvtiers("doctor", f"{tier.url}?capacity=100KiB", "--json")
    assert (ran.status, graded(ran)["capacity"]) == (1, "fail")


def test_the_bound_that_rules_here_is_the_one_that_counts(tier):
    """Of files the quota file says it, of a log its lock."""
    ran = good(kvtiers("doctor", tier.url, "--json"))
    said = next(c for c in ran.json["checks"] if c["check"] == "disk space")["found"]
    assert ("capacity is 1.0 GiB" if tier.layout == "files" else "capacity is 2.0 MiB") in said


def test_a_share_of_the_disk_is_held_against_it(tmp_path):
    config = with_tier(root_dir=str(tmp_path / "x"), capacity_fraction=0.5, layout="log")
    ran = kvtiers("doctor", "--config", json.dumps(config), "--json")
    found = {c["check"]: c["found"] for c in ran.json["checks"]}
    disk = os.statvfs(tmp_path)
    assert f"capacity is {size(int(0.5 * disk.f_blocks * disk.f_frsize))}" in found["disk space"]
    assert "file system" in found


def test_a_share_of_a_disk_that_others_fill_is_no_failure_and_names_its_key():
    """README's own configuration on a disk with less than half of it free."""
    check = check_disk("fs:///x", free=69 << 30, ours=0, capacity=126 << 30, share=0.5)
    assert check.grade is Grade.WARN
    assert "126.0 GiB, 0.5 of the disk" in check.found
    assert "the oldest chunks leave" in check.remedy
    lower = float(check.remedy.rpartition("lower capacity_fraction to ")[2])
    assert 0 < lower * (252 << 30) <= 69 << 30
    assert "capacity_bytes" not in check.remedy


def test_a_share_of_a_disk_that_is_full_has_no_smaller_share_that_fits():
    check = check_disk("fs:///x", free=1 << 20, ours=0, capacity=126 << 30, share=0.5)
    assert check.grade is Grade.WARN
    assert "take another disk" in check.remedy


def test_whatever_is_wrong_with_a_share_the_remedy_names_it():
    assert "capacity_fraction" in check_inodes(1, 1 << 20, 4096, None, "capacity_fraction").remedy


def test_a_share_reaches_the_check_of_a_tier_that_is_there(tmp_path):
    """A file system of which nearly all is taken by somebody else."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    config = write_json(
        tmp_path / "kv.json", with_tier(root_dir=f"{mounted}/kv", capacity_fraction=0.5)
    )
    for made in (":", f"mkdir -m 700 {mounted}/kv"):
        ran = in_private_mounts(f"""
            mount -t tmpfs -o size=4m,mode=700 tmpfs {mounted} || exit 9
            head -c 3000000 /dev/zero > {mounted}/theirs
            {made}
            exec "$0" -m kvtiers.cli doctor --config {config} --json
        """)
        found = next(c for c in ran.json["checks"] if c["check"] == "disk space")
        assert (ran.status, found["grade"]) == (0, "warn")
        assert "lower capacity_fraction to " in found["remedy"]


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/root rw
30 22 0:5 / /mnt rw - nfs4 server:/export rw
31 30 0:6 / /mnt/a\\040b rw shared:1 - xfs /dev/sdb rw
32 22 0:7 / /over rw - ext4 /dev/sdc rw
33 22 0:8 / /over rw - fuse.glusterfs server rw
34 22 0:9 / /mnt2
""".splitlines()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/var/x", "ext4"),
        ("/mnt", "nfs4"),
        ("/mnt/x", "nfs4"),
        ("/mnt2", "ext4"),
        ("/mnt/a b/c", "xfs"),
        ("/over/x", "fuse.glusterfs"),
    ],
)
def test_which_file_system_holds_a_folder(folder, kind):
    assert file_system(MOUNTS, folder) == kind


@pytest.mark.parametrize(
    ("kind", "grades"),
    [
        ("ext4", ["ok", "ok"]),
        ("nfs4", ["ok", "warn"]),
        ("fuse.sshfs", ["ok", "warn"]),
        ("tmpfs", ["warn", "warn"]),
        ("cgroup2", ["fail", "fail"]),
        ("proc", ["fail", "fail"]),
    ],
)
def test_a_file_system_is_fit_or_not(tmp_path, kind, grades):
    """A log has one owner, so one that hosts share is not for it."""
    (tmp_path / "mounts").write_text(f"1 1 8:1 / / rw - {kind} x rw\n")
    checks = [check_file_system("/", layout, str(tmp_path / "mounts")) for layout in LAYOUTS]
    assert [check.grade.value for check in checks] == grades
    assert all(kind in check.found for check in checks)
    absent = check_file_system("/", "files", str(tmp_path / "absent"))
    assert absent.grade is Grade.WARN


@pytest.mark.parametrize(
    ("lengths", "chunk", "capacity", "grade"),
    [
        ([], None, None, Grade.OK),
        ([], 8192, 1 << 20, Grade.OK),
        ([1 << 20] * 3, 8192, 3 << 20, Grade.OK),
        ([1 << 20] * 3, 8192, 2 << 20, Grade.WARN),
        ([1 << 20] * 3, 1 << 20, None, Grade.WARN),
    ],
)
def test_segments_suit_the_capacity_and_the_chunks(lengths, chunk, capacity, grade):
    assert check_segments(lengths, chunk, capacity).grade is grade


# -- a root that is absent ------------------------------------------------------------------------


def rows(ran):
    return {check["check"]: check for check in ran.json["checks"]}


@pytest.mark.parametrize("root", ["/proc/x", "/proc/self/x/y"])
def test_where_no_files_are_stored_nothing_is_tried(root):
    ran = kvtiers("doctor", f"fs://{root}", "--chunk-bytes", "64KiB", "--json")
    assert (ran.status, rows(ran)["file system"]["grade"]) == (1, "fail")
    assert "which stores no files" in rows(ran)["file system"]["found"]
    assert {"permissions", "disk space", "chunk size"}.isdisjoint(rows(ran))
    assert not os.path.exists(root)


def test_a_file_in_the_way_of_a_root(tmp_path):
    (tmp_path / "file").touch()
    ran = kvtiers("doctor", f"fs://{tmp_path}/file/below/kv?capacity=1GiB", "--json")
    assert (ran.status, rows(ran)["permissions"]["grade"]) == (1, "fail")
    assert rows(ran)["permissions"]["found"] == f"{tmp_path}/file is in the way"


def test_a_root_that_cannot_be_made_is_found_out_by_making_one(tmp_path):
    """Whatever the modes say: here nobody may write, root included."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    ran = in_private_mounts(f"""
        mount -t tmpfs -o ro,mode=777 tmpfs {mounted} || exit 9
        exec "$0" -m kvtiers.cli doctor fs://{mounted}/kv --chunk-bytes 64KiB --json
    """)
    assert (ran.status, rows(ran)["permissions"]["grade"]) == (1, "fail")
    assert "Read-only file system" in rows(ran)["permissions"]["found"]
    assert rows(ran)["file system"]["grade"] == "warn"  # memory
    assert "chunk size" not in rows(ran)


@pytest.mark.parametrize("there", [True, False])
def test_a_capacity_that_an_engine_refuses_is_a_failure_in_its_words(tmp_path, layout, there):
    root = tmp_path / "kv"
    if there:
        root.mkdir(0o700)
    url = f"fs://{root}?layout={layout}&capacity="
    ran = kvtiers("doctor", f"{url}16KiB", "--json")
    assert (ran.status, rows(ran)["capacity"]["grade"]) == (1, "fail")
    needed = int(rows(ran)["capacity"]["remedy"].split("at least ")[1].split()[0])
    assert graded(good(kvtiers("doctor", f"{url}{needed}", "--json")))["capacity"] == "ok"
    assert kvtiers("doctor", f"{url}{needed - 1}", "--json").status == 1
    tier = Tier(tmp_path / "real", layout)
    with pytest.raises(ConfigError, match="give at least"):
        tier.open(capacity_bytes=16 << 10)


def test_a_capacity_is_held_to_chunks_that_are_said(tmp_path, layout, monkeypatch):
    url = f"fs://{tmp_path}/kv?layout={layout}&capacity="
    monkeypatch.setattr(diskchecks, "TRIAL_BYTES", 4 << 20)
    words = ["--chunk-bytes", "1MiB", "--json"]
    ran = kvtiers("doctor", f"{url}1MiB", *words)
    assert (ran.status, rows(ran)["capacity"]["grade"]) == (1, "fail")
    ran = kvtiers("doctor", f"{url}12MiB", *words)
    few = rows(ran)["capacity"]
    assert few["grade"] == ("warn" if layout == "files" else "fail")  # a log needs 16
    if layout == "files":
        assert "room for 11 chunks of 1.0 MiB" in few["found"]
        assert few["remedy"] == "raise capacity_bytes"
    assert graded(kvtiers("doctor", f"{url}64MiB", *words))["capacity"] == "ok"


def test_a_share_that_is_too_small_is_called_a_share(tmp_path, layout):
    config = with_tier(root_dir=f"{tmp_path}/x", capacity_fraction=1e-12, layout=layout)
    ran = kvtiers("doctor", "--config", json.dumps(config), "--json")
    assert (ran.status, rows(ran)["capacity"]["grade"]) == (1, "fail")
    assert rows(ran)["capacity"]["remedy"].startswith("capacity_fraction ")


def test_chunks_of_a_size_are_tried_on_the_disk_and_nothing_stays(tmp_path, tier, monkeypatch):
    monkeypatch.setattr(diskchecks, "TRIAL_BYTES", 8 << 20)
    monkeypatch.setattr(diskchecks, "TRIAL_CHUNKS", 64)
    for root, folder in ((tier.root, tier.root), (tmp_path / "new" / "kv", tmp_path)):
        before = set(folder.rglob("*"))
        url = f"fs://{root}?layout={tier.layout}"
        ran = good(kvtiers("doctor", url, "--chunk-bytes", "16KiB", "--json"))
        found = rows(ran)["chunk size"]
        assert found["found"].startswith(f"16.0 KiB a chunk, layout {tier.layout}: writes ")
        assert found["found"].count("% of the disk") == 2
        assert set(folder.rglob("*")) == before
    large = good(kvtiers("doctor", f"{url}&capacity=1GiB", "--chunk-bytes", "4MiB", "--json"))
    assert rows(large)["chunk size"]["found"].endswith("no call is larger")


@pytest.mark.parametrize(
    ("layout", "ours", "grade", "advice"),
    [
        ("files", [0.4e9, 0.9e9], Grade.OK, ""),
        ("files", [0.3e9, 0.9e9], Grade.WARN, "use layout=log"),
        ("log", [0.9e9, 0.3e9], Grade.WARN, "raise blocks_per_chunk"),
    ],
)
def test_chunks_that_leave_most_of_the_disk_unused_are_advised_against(layout, ours, grade, advice):
    check = judge_speed("64.0 KiB a chunk", layout, ours, [1e9, 1e9])
    assert check.grade is grade
    assert check.remedy.startswith(advice)
    assert f"writes {ours[0] / 1e9:.2f} GB/s, {ours[0] / 1e7:.0f}% of the disk" in check.found


def test_a_disk_without_room_for_a_trial_is_not_tried(tmp_path):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    ran = in_private_mounts(f"""
        mount -t tmpfs -o size=4m,mode=700 tmpfs {mounted} || exit 9
        exec "$0" -m kvtiers.cli doctor fs://{mounted}/kv --chunk-bytes 64KiB --json
    """)
    assert (ran.status, rows(ran)["chunk size"]["grade"]) == (0, "warn")
    assert "not tried" in rows(ran)["chunk size"]["found"]


def test_it_leaves_nothing_behind(tier):
    before = set(tier.root.rglob("*"))
    good(kvtiers("doctor", tier.url))
    assert set(tier.root.rglob("*")) == before


def with_tier(**options):
    return {**SMALL, "secondary_tiers": [{"type": "fs", **options}]}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("as_file", [True, False])
def test_a_configuration_as_it_is_given_to_the_engine(tmp_path, wrapped, as_file):
    root = tmp_path / "a b?c"
    extra = with_tier(root_dir=str(root), capacity_bytes=1e6)
    config = {"kv_connector": "K", "kv_connector_extra_config": extra} if wrapped else extra
    given = write_json(tmp_path / "kv.json", config) if as_file else json.dumps(config)
    ran = good(kvtiers("doctor", "--config", given, "--json"))
    found = {c["check"]: c["found"] for c in ran.json["checks"]}
    assert found["permissions"] == f"{root} will be made in {tmp_path}"
    assert not root.exists()
    root.mkdir(0o700)
    assert graded(kvtiers("doctor", "--config", given, "--json"))["permissions"] == "ok"


def test_too_much_memory_is_a_failure_with_the_engines_words(tmp_path):
    config = json.dumps({"cpu_bytes_to_use": 1 << 50})
    ran = kvtiers("doctor", "--config", config, "--json")
    assert ran.status == 1
    assert graded(ran)["memory"] == "fail"
    remedy = next(c["remedy"] for c in ran.json["checks"] if c["check"] == "memory")
    assert "cpu_bytes_to_use needs" in remedy
    assert "fail" in kvtiers("doctor", "--config", config).out


def test_a_region_directory_that_is_absent_is_a_failure(tmp_path):
    config = json.dumps({**SMALL, "region_directory": str(tmp_path / "absent")})
    assert graded(kvtiers("doctor", "--config", config, "--json"))["memory"] == "fail"


def test_a_disk_that_is_too_small_is_a_failure(tmp_path):
    config = json.dumps(with_tier(root_dir=str(tmp_path / "x"), capacity_bytes=1 << 60))
    ran = kvtiers("doctor", "--config", config, "--json")
    assert (ran.status, graded(ran)["disk space"]) == (1, "fail")


def test_a_file_where_the_tier_should_be_is_a_failure(tmp_path):
    (tmp_path / "x").touch()
    config = json.dumps(with_tier(root_dir=str(tmp_path / "x"), capacity_bytes=1 << 20))
    ran = kvtiers("doctor", "--config", config, "--json")
    assert (ran.status, graded(ran)["start"]) == (1, "fail")


@pytest.mark.parametrize(
    ("free", "ours", "capacity", "grade"),
    [
        (100, 0, None, Grade.WARN),
        (100, 0, 90, Grade.OK),
        (100, 0, 95, Grade.WARN),
        (100, 0, 101, Grade.FAIL),
        (10, 91, 101, Grade.WARN),
        (0, 100, 90, Grade.OK),
    ],
)
def test_disk_space_counts_what_is_ours_already(free, ours, capacity, grade):
    assert check_disk("fs:///x", free, ours, capacity).grade is grade


@pytest.mark.parametrize(
    ("chunk", "layout", "grade"),
    [
        (64 << 10, "files", Grade.WARN),
        (64 << 10, "log", Grade.OK),
        (256 << 10, "files", Grade.OK),
        (None, "files", Grade.OK),
    ],
)
def test_small_chunks_want_another_layout(chunk, layout, grade):
    assert check_chunk(chunk, layout).grade is grade


def test_inodes_may_end_before_bytes_do():
    assert check_inodes(10, 1 << 20, 4096, None).grade is Grade.WARN
    assert check_inodes(10, 1 << 20, 4096, 40960).grade is Grade.OK


@pytest.mark.parametrize(
    ("works", "wanted", "grade"),
    [
        (True, "on", Grade.OK),
        (False, "auto", Grade.WARN),
        (False, "on", Grade.FAIL),
        (False, "off", Grade.OK),
    ],
)
def test_direct_io(monkeypatch, tmp_path, works, wanted, grade):
    monkeypatch.setattr(checks, "_direct_works", lambda root: works)
    assert check_direct(str(tmp_path), wanted).grade is grade


def test_a_folder_that_others_can_read_is_warned_of(tier):
    tier.root.chmod(0o755)
    assert graded(good(kvtiers("doctor", tier.url, "--json")))["permissions"] == "warn"


def test_few_open_files_and_little_locked_memory_are_warned_of():
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))

    ran = good(process("doctor", "--config", json.dumps(SMALL), "--json", preexec_fn=limited))
    assert (graded(ran)["open files"], graded(ran)["locked memory"]) == ("warn", "warn")


def test_a_configuration_that_is_not_there_is_named_once(tmp_path):
    ran = kvtiers("doctor", "--config", tmp_path / "absent.json")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.count("absent.json") == 1
    assert "cannot be read: No such file or directory" in ran.err


def test_the_tiers_of_a_configuration_and_one_more(tmp_path, tier):
    config = with_tier(root_dir=str(tmp_path / "new"), capacity_bytes=1 << 20)
    ran = good(kvtiers("doctor", tier.url, "--config", json.dumps(config), "--json"))
    assert len({c["tier"] for c in ran.json["checks"]}) == 3


def test_each_tier_is_looked_at_once_and_its_rows_say_whose_they_are(tmp_path, tier):
    """The call names a folder that is configured: its options are those of the configuration."""
    mine = {"type": "fs", "root_dir": str(tier.root), "layout": tier.layout}
    config = {**SMALL, "secondary_tiers": [{**mine, "capacity_bytes": 1 << 22}]}
    given = f"{tier.url}/?capacity=1TiB"
    ran = good(kvtiers("doctor", given, "--config", json.dumps(config), "--json"))
    assert [c["check"] for c in ran.json["checks"]].count("disk space") == 1
    alone = good(kvtiers("doctor", given, "--config", json.dumps(config))).out
    assert "capacity is 4.0 MiB" in alone
    assert "TIER" not in alone

    other = {"type": "fs", "root_dir": f"{tmp_path}/new", "capacity_bytes": 1 << 20}
    config["secondary_tiers"].append(other)
    lines = good(kvtiers("doctor", "--config", json.dumps(config))).out.splitlines()
    assert "TIER" in lines[0]
    about = [line for line in lines if "disk space" in line]
    assert [str(tier.root) in line for line in about] == [True, False]
    assert [f"{tmp_path}/new" in line for line in about] == [False, True]


def test_a_connector_without_its_settings_is_told_that_they_are_missing():
    ran = kvtiers("doctor", "--config", '{"kv_connector": "KVTiersConnector"}')
    assert (ran.status, ran.out) == (2, "")
    assert "kv_connector_extra_config is missing" in ran.err


def test_a_full_disk_is_found_by_writing_to_it(tmp_path):
    """A file system of one page: it has room for a folder and for nothing in it."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    script = f"""
        mount -t tmpfs -o size=4k,mode=700 tmpfs {mounted} || exit 9
        exec "$0" -m kvtiers.cli doctor fs://{mounted} --json
    """
    ran = in_private_mounts(script)
    assert ran.status == 1
    assert graded(ran)["direct I/O"] == "fail"
    assert os.listdir(mounted) == []


def both_layouts(root):
    Tier(root, "log").fill()
    (root / ".kvtiers-quota").touch()


def damaged_manifest(root):
    Tier(root).fill()
    (root / NAMESPACE.id / "manifest.json").write_text("")


def somebody_elses(root):
    (root / "log").mkdir(parents=True)
    (root / "mine").touch()


def entry(name, make):
    def put(root):
        (root / name).parent.mkdir(parents=True)
        make(root / name)

    return put


REFUSED = {
    "a log, layout left out": (None, lambda root: Tier(root, "log").fill()),
    "files, layout log": ("log", lambda root: Tier(root).fill()),
    "a log of no chunks": ("files", entry("log", os.mkdir)),
    "files of no chunks": ("log", entry(".kvtiers-quota", Path.touch)),
    "both layouts": ("log", both_layouts),
    "others in it": ("log", somebody_elses),
    "a damaged manifest": ("files", damaged_manifest),
    "an account that is a folder": (None, entry(".kvtiers-quota", os.mkdir)),
    "an account that is a fifo": (None, entry(".kvtiers-quota", os.mkfifo)),
    "a lock that is a folder": ("log", entry("log/lock", os.mkdir)),
    "a lock that is a fifo": ("log", entry("log/lock", os.mkfifo)),
    "a log that is a file": ("log", entry("log", Path.touch)),
    "a log that is a dangling link": ("log", entry("log", lambda path: path.symlink_to("gone"))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_root_that_an_engine_refuses_fails_in_the_words_of_the_engine(tmp_path, name):
    layout, put = REFUSED[name]
    put(tmp_path / "kv")
    tier = Tier(tmp_path / "kv", layout or "files")
    before = tier.image()
    options = {} if layout is None else {"layout": layout}
    config = with_tier(root_dir=str(tier.root), capacity_bytes=64 << 20, **options)
    ran = kvtiers("doctor", "--config", json.dumps(config), "--json")
    (start,) = [check for check in ran.json["checks"] if check["check"] == "start"]
    assert {k: v[2] for k, v in tier.image().items()} == {k: v[2] for k, v in before.items()}
    assert (ran.status, start["grade"]) == (1, "fail")
    with pytest.raises(ConfigError) as refused:
        tier.open(capacity_bytes=64 << 20)
    assert start["remedy"] == str(refused.value)


@only_files
def test_eviction_is_held_against_that_of_engines_that_live(tier):
    tier = Tier(tier.root.with_name("shared"))
    store = tier.open(eviction="external")
    own = with_tier(root_dir=str(tier.root), capacity_bytes=1 << 30)
    external = with_tier(root_dir=str(tier.root), eviction="external")
    ran = kvtiers("doctor", "--config", json.dumps(own), "--json")
    assert (ran.status, graded(ran)["start"]) == (1, "fail")
    (start,) = [check for check in ran.json["checks"] if check["check"] == "start"]
    assert 'says "external"' in start["remedy"]
    good(kvtiers("doctor", "--config", json.dumps(external)))
    good(kvtiers("doctor", tier.url))
    store.close()
    good(kvtiers("doctor", "--config", json.dumps(own)))


BY_NIXL = {"transport": "nixl", "plaintext_data": True}


@pytest.mark.parametrize(
    ("options", "grade", "told"),
    [
        ({"port": 0}, "ok", "answers at 127.0.0.1"),
        ({"host": "10.0.0.7"}, "fail", "keys is missing: 10.0.0.7 can be reached by others"),
        (
            {"port": 0, "keys": "/nowhere/p2p.key", "allowed_peers": ["y" * 40]},
            "fail",
            "cannot be read: No such file",
        ),
        ({"port": 0, **BY_NIXL}, "ok", "answers at 127.0.0.1"),
        ({"port": 0, **BY_NIXL, "backends": ["NOPE"]}, "fail", "backends name NOPE: NIXL has "),
    ],
)
def test_a_tier_of_peers_is_asked_what_an_engine_asks(options, grade, told):
    config = json.dumps({**SMALL, "secondary_tiers": [{"type": "p2p", **options}]})
    ran = kvtiers("doctor", "--config", config, "--json")
    (check,) = [c for c in ran.json["checks"] if c["check"] == "peers"]
    assert check["grade"] == grade
    assert told in f"{check['found']} {check['remedy']}"
    assert ran.status == (grade == "fail")


def test_a_port_of_peers_that_is_taken_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tier = {"type": "p2p", "port": taken.getsockname()[1]}
        config = json.dumps({**SMALL, "secondary_tiers": [tier]})
        ran = good(kvtiers("doctor", "--config", config, "--json"))
    (check,) = [c for c in ran.json["checks"] if c["check"] == "peers"]
    assert check["grade"] == "warn"
    assert "in use" in check["found"]
