import pytest

from kvtiers.errors import KVTiersError
from kvtiers.host.limits import Limit, available_memory, container_limits

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def reader(files):
    def read(path):
        if path not in files:
            raise FileNotFoundError(2, "No such file", path)
        return files[path]

    return read


def v2(path, limit, used, cache=0):
    folder = f"/sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\nfile 99\nactive_file {cache}\ninactive_file 0\n",
    }


def v1(path, limit, used, cache=0):
    folder = f"/sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 7\ntotal_active_file 0\n"
        f"total_inactive_file {cache}\n",
    }


def inside(group, *groups, mounts=V2_MOUNT, root="/"):
    """What is left, by folder, when this process is in ``group`` and such groups are mounted."""
    files = {"/proc/self/cgroup": f"{group}\n", "/proc/self/mountinfo": mounts.format(root=root)}
    for group_files in groups:
        files.update(group_files)
    limits = container_limits(reader(files))
    left = {x.path.removeprefix("/sys/fs/cgroup").rpartition("/")[0]: x.left for x in limits}
    assert len(left) == len(limits)
    return left


def test_the_machine_speaks_in_kibibytes():
    meminfo = "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:      5 kB\n"
    assert available_memory(reader({"/proc/meminfo": meminfo})) == 5 * 1024


def test_a_machine_that_does_not_say():
    with pytest.raises(KVTiersError, match="/proc/meminfo does not say MemAvailable"):
        available_memory(reader({"/proc/meminfo": "MemTotal: 9 kB\n"}))
    with pytest.raises(KVTiersError, match="/proc/meminfo failed"):
        available_memory(reader({}))


def test_no_groups_no_limits():
    assert container_limits(reader({})) == []


def test_a_container_leaves_what_is_not_used():
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2("", 16 * GIB, 6 * GIB),
    }
    assert container_limits(reader(files)) == [Limit("/sys/fs/cgroup/memory.max", 10 * GIB)]


def test_no_limit_is_none():
    assert inside("0::/a", v2("/a", "max", GIB)) == {}


def test_every_group_above_counts_and_none_beside_or_below():
    groups = [
        v2("/a", 50 * GIB, 4 * GIB),
        v2("/a/b", "max", 4 * GIB),
        v2("/a/b/c", 9 * GIB, 4 * GIB),
        v2("/b", 1, 1),
        v2("/a/b/c/d", 1, 1),
    ]
    assert inside("0::/a/b/c", *groups) == {"/a": 46 * GIB, "/a/b/c": 5 * GIB}


def test_page_cache_gives_way_but_a_tmpfs_does_not():
    """``active_file`` and ``inactive_file`` are without tmpfs, which ``file`` has as well."""
    assert inside("0::/", v2("", 16 * GIB, 15 * GIB, cache=8 * GIB)) == {"": 9 * GIB}


def test_without_statistics_all_that_is_used_is_used():
    files = v2("", 16 * GIB, 15 * GIB, cache=8 * GIB)
    del files["/sys/fs/cgroup/memory.stat"]
    assert inside("0::/", files) == {"": GIB}


def test_more_used_than_allowed_leaves_nothing():
    assert inside("0::/", v2("", GIB, 2 * GIB)) == {"": 0}


def test_version_1_with_the_folders_of_the_machine():
    group = "9:name=systemd:/x\n4:memory:/docker/1\n1:cpu,cpuacct:/docker/1"
    inner, outer = v1("/docker/1", 8 * GIB, 3 * GIB, cache=GIB), v1("", 1 << 62, 0)
    assert inside(group, inner, outer, mounts=V1_MOUNTS) == {
        "/memory/docker/1": 6 * GIB,
        "/memory": 1 << 62,
    }


def test_version_1_where_only_the_containers_own_folder_is_mounted():
    """Without a cgroup namespace the mount shows a part of the tree; its paths are the host's."""
    groups = [v1("", 8 * GIB, GIB), v1("/sub", 4 * GIB, GIB)]
    seen = {"mounts": V1_MOUNTS, "root": "/docker/1"}
    assert inside("4:memory:/docker/1", *groups, **seen) == {"/memory": 7 * GIB}
    assert inside("4:memory:/docker/1/sub", *groups, **seen) == {
        "/memory": 7 * GIB,
        "/memory/sub": 3 * GIB,
    }


@pytest.mark.parametrize(
    ("group", "root"),
    [("0::/../elsewhere", "/"), ("0::/kubepods/pod1/c", "/inner")],
)
def test_a_path_that_the_mount_does_not_show_stands_for_its_top(group, root):
    assert inside(group, v2("", 8 * GIB, GIB), root=root) == {"": 7 * GIB}


def test_both_versions_at_once():
    mounts = V1_MOUNTS + V2_MOUNT.replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
    groups = [v1("/a", 8 * GIB, GIB), v2("/unified/a", 4 * GIB, GIB)]
    assert inside("4:memory:/a\n0::/a", *groups, mounts=mounts) == {
        "/memory/a": 7 * GIB,
        "/unified/a": 3 * GIB,
    }


def test_a_kernel_without_the_memory_controller():
    assert inside("1:cpu,cpuacct:/a", mounts=V1_MOUNTS) == {}


def test_this_machine_can_be_asked():
    assert available_memory() > 0
    assert all(limit.left >= 0 for limit in container_limits())
