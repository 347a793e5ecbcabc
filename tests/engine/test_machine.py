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


def test_memory_and_swap(tmp_path: Path) -> None:
    text = "MemTotal:   24000000 kB\nMemFree:  12 kB\nSwapTotal:    1000 kB\nHugePages_Total:   0\n"
    assert machine.host_memory(tree(tmp_path, {"proc/meminfo": text})) == 24_001_000 * 1024
    assert machine.host_memory(str(tmp_path / "nothing")) is None
    assert (machine.host_memory() or 0) > 1 << 20
