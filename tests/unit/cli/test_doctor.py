"""``doctor``: each check says what was found and what to do; only a failure ends in 1."""

import json
import os
import resource

import pytest

from kvtiers.cli import checks
from kvtiers.cli.checks import check_chunk, check_direct, check_disk, check_inodes
from kvtiers.cli.logchecks import check_local, check_segments, file_system
from kvtiers.cli.output import size
from kvtiers.cli.verdicts import Grade
from tests.unit.cli.cli_kit import (
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
    assert (ran.status, graded(ran)["segments"]) == (1, "fail")


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
    assert "local disk" in found


def test_a_share_of_a_disk_that_others_fill_is_no_failure_and_names_its_key():
    """README's own configuration on a disk with less than half of it free."""
    check = check_disk(free=69 << 30, ours=0, capacity=126 << 30, share=0.5)
    assert check.grade is Grade.WARN
    assert "126.0 GiB, 0.5 of the disk" in check.found
    assert "the oldest chunks leave" in check.remedy
    lower = float(check.remedy.rpartition("lower capacity_fraction to ")[2])
    assert 0 < lower * (252 << 30) <= 69 << 30
    assert "capacity_bytes" not in check.remedy


def test_a_share_of_a_disk_that_is_full_has_no_smaller_share_that_fits():
    check = check_disk(free=1 << 20, ours=0, capacity=126 << 30, share=0.5)
    assert check.grade is Grade.WARN
    assert "take another disk" in check.remedy


def test_whatever_is_wrong_with_a_share_the_remedy_names_it():
    assert "capacity_fraction" in check_inodes(1, 1 << 20, 4096, None, "capacity_fraction").remedy
    few = check_segments([], 8192, 1 << 17, "capacity_fraction")
    assert "raise capacity_fraction" in few.remedy


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
    ("kind", "grade"),
    [("ext4", Grade.OK), ("tmpfs", Grade.OK), ("nfs4", Grade.WARN), ("fuse.sshfs", Grade.WARN)],
)
def test_a_log_on_a_network_file_system_is_warned_of(tmp_path, kind, grade):
    (tmp_path / "mounts").write_text(f"1 1 8:1 / / rw - {kind} x rw\n")
    check = check_local("/", str(tmp_path / "mounts"))
    assert check.grade is grade
    assert kind in check.found
    assert check_local("/", str(tmp_path / "absent")).grade is Grade.WARN


@pytest.mark.parametrize(
    ("lengths", "chunk", "capacity", "grade"),
    [
        ([], None, None, Grade.OK),
        ([], 8192, 1 << 20, Grade.OK),
        ([], 8192, 1 << 17, Grade.FAIL),
        ([1 << 20] * 3, 8192, 3 << 20, Grade.OK),
        ([1 << 20] * 3, 8192, 2 << 20, Grade.WARN),
        ([1 << 20] * 3, 1 << 20, None, Grade.WARN),
    ],
)
def test_segments_suit_the_capacity_and_the_chunks(lengths, chunk, capacity, grade):
    assert check_segments(lengths, chunk, capacity).grade is grade


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
    assert (ran.status, graded(ran)["tier"]) == (1, "fail")


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
    assert check_disk(free, ours, capacity).grade is grade


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
