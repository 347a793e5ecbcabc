"""Facts of a machine, from recorded trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorlift.engine import machine

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def v2(root: Path, quotas: dict[str, str], mount: str = V2_MOUNT, group: str = "/a/b/c") -> str:
    files = {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mount}
    files |= {f"sys/fs/cgroup/{folder}cpu.max": text for folder, text in quotas.items()}
    return tree(root, files)


def test_the_least_quota_of_all_ancestors_holds(tmp_path: Path) -> None:
    root = v2(tmp_path, {"a/": "150000 100000", "a/b/": "max 100000", "a/b/c/": "800000 100000"})
    assert machine.cpu_quota(root) == 1.5
    assert machine.usable_cpus(root, range(8)) == 2
    assert machine.usable_cpus(root, [3]) == 1


def test_a_quarter_of_a_cpu_is_one(tmp_path: Path) -> None:
    root = v2(tmp_path, {"a/b/c/": "25000 100000"})
    assert machine.cpu_quota(root) == 0.25
    assert machine.usable_cpus(root, range(8)) == 1


def test_no_quota(tmp_path: Path) -> None:
    root = v2(tmp_path, {"a/": "max 100000"})
    assert machine.cpu_quota(root) is None
    assert machine.usable_cpus(root, range(5)) == 5


def test_a_container_sees_its_own_subtree(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace(" / /sys", " /docker/x /sys")
    root = v2(tmp_path, {"": "50000 100000", "in/": "max 100000"}, mount, "/docker/x/in")
    assert machine.cpu_quota(root) == 0.5
    assert machine.usable_cpus(root, range(8)) == 1


def test_groups_outside_of_the_mount_fall_to_its_root(tmp_path: Path) -> None:
    root = v2(tmp_path, {"": "300000 100000"}, group="/../../elsewhere")
    assert machine.cpu_quota(root) == 3


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/a/b\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT + V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "),
        "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
    }
    assert machine.cpu_quota(tree(tmp_path, files)) == 2.5


def test_spaces_in_mount_points(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup ", "/my\\040groups ")
    files = {
        "proc/self/cgroup": "0::/x\n",
        "proc/self/mountinfo": mount,
        "my groups/x/cpu.max": "200000 100000",
    }
    assert machine.cpu_quota(tree(tmp_path, files)) == 2


@pytest.mark.parametrize("text", ["", "rubbish", "0::", "0::/a\nx"])
def test_a_tree_that_says_nothing(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": text})
    assert machine.cpu_quota(root) is None
    assert machine.last_level_cache(root, [0]) is None
    assert machine.usable_cpus(root, [0, 1]) == 2


def cache(cpu: int, index: int, level: int, size: str, shared: str, kind: str = "Unified") -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}/"
    facts = {"level": str(level), "size": size, "shared_cpu_list": shared, "type": kind}
    return {folder + name: text + "\n" for name, text in facts.items()}


def test_each_cache_that_our_cpus_reach_counts_once(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for cpu in range(8):
        files |= cache(cpu, 0, 1, "32K", str(cpu), "Instruction")
        files |= cache(cpu, 2, 2, "512K", str(cpu))
        files |= cache(cpu, 3, 3, "32768K", f"{cpu // 4 * 4}-{cpu // 4 * 4 + 3}")
    root = tree(tmp_path, files)
    assert machine.last_level_cache(root, range(8)) == 64 << 20
    assert machine.last_level_cache(root, [1, 2]) == 32 << 20
    assert machine.last_level_cache(root, [9]) is None


def test_this_machine() -> None:
    assert 1 <= machine.usable_cpus() <= len(machine.affinity())


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "1", "SLURM_NTASKS_PER_NODE": "2"}, 2),
        # Slurm writes "8(x2),4" where nodes differ: no number for this one.
        ({"SLURM_NTASKS_PER_NODE": "8(x2),4", "LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "9" * 5000}, 1),
        ({"LOCAL_WORLD_SIZE": "\u00b2"}, 1),  # a digit, and no number
    ],
)
def test_ranks_by_what_launchers_say(environ: dict[str, str], ranks: int) -> None:
    assert machine.local_ranks(environ) == ranks


def test_ranks_divide_cpus_and_quota(tmp_path: Path) -> None:
    files = {"sys/devices/system/cpu/online": "0-15\n"}
    root = tree(tmp_path, files)
    assert machine.usable_cpus(root, range(16), ranks=4) == 4
    assert machine.usable_cpus(root, range(16), ranks=32) == 1
    # A launcher gave each rank CPUs of its own: they are not divided once more.
    assert machine.usable_cpus(root, range(4), ranks=4) == 4
    v2(tmp_path, {"a/": "600000 100000"})
    assert machine.usable_cpus(root, range(16), ranks=4) == 2
    assert machine.usable_cpus(root, range(4), ranks=4) == 2


def test_ranks_divide_the_cache(tmp_path: Path) -> None:
    files = {"sys/devices/system/cpu/online": "0-7\n"}
    for cpu in range(8):
        files |= cache(cpu, 3, 3, "32768K", f"{cpu // 4 * 4}-{cpu // 4 * 4 + 3}")
    root = tree(tmp_path, files)
    assert machine.last_level_cache(root, range(8), ranks=4) == 16 << 20
    # Bound to CPUs of its own: the rank beside it shares the cache of four, those on the other one do not.
    assert machine.last_level_cache(root, [0, 1], ranks=4) == 16 << 20
    assert machine.last_level_cache(root, range(4), ranks=2) == 32 << 20


GPU = "0000:3b:00.0"


def two_nodes(root: Path, node: str = "1", online: str = "0-1") -> str:
    return tree(
        root,
        {
            "sys/devices/system/node/online": online + "\n",
            "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
            "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
            f"sys/bus/pci/devices/{GPU}/numa_node": node + "\n",
        },
    )


def test_cpus_near_a_device(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    assert machine.cpus_near(GPU, root, range(16)) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert machine.cpus_near(GPU, root, [0, 1, 5]) == {5}
    assert machine.cpus_near(GPU, root, [0, 1]) == frozenset()
    assert machine.cpus_near("0000:af:00.0", root, range(16)) == frozenset()


@pytest.mark.parametrize(("node", "online"), [("-1", "0-1"), ("0", "0"), ("7", "0-1"), ("", "0-1")])
def test_no_cpus_are_nearer(tmp_path: Path, node: str, online: str) -> None:
    assert machine.cpus_near(GPU, two_nodes(tmp_path, node, online), range(16)) == frozenset()


def test_memory_and_swap(tmp_path: Path) -> None:
    text = "MemTotal:   24000000 kB\nMemFree:  12 kB\nSwapTotal:    1000 kB\nHugePages_Total:   0\n"
    assert machine.host_memory(tree(tmp_path, {"proc/meminfo": text})) == 24_001_000 * 1024
    assert machine.host_memory(str(tmp_path / "nothing")) is None
    assert (machine.host_memory() or 0) > 1 << 20
