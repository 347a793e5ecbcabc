"""Facts of this machine: CPUs that may be used, and the cache that they reach.

Everything is read below a root folder, so that a recorded tree of another machine can be asked as well.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "affinity",
    "cpu_quota",
    "cpus_near",
    "host_memory",
    "last_level_cache",
    "local_ranks",
    "usable_cpus",
]

# What torchrun, Open MPI and Slurm say of the processes that they start on a machine.
_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
# Of a number of processes. Python refuses to read one of thousands.
_MOST_DIGITS = 9


def affinity() -> frozenset[int]:
    """The CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def local_ranks(environ: Mapping[str, str] | None = None) -> int:
    """Processes like this one on the machine, as their launcher says; 1 where none does."""
    environ = os.environ if environ is None else environ
    for name in _RANKS:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) > 1:
            return int(text)
    return 1


def usable_cpus(root: str = "/", cpus: Iterable[int] | None = None, ranks: int = 1) -> int:
    """CPUs for one of so many ranks by affinity and by the least cgroup quota, rounded up; at least 1."""
    ours = frozenset(affinity() if cpus is None else cpus)
    count = len(ours) // _sharers(ours, _online(root), ranks)
    quota = cpu_quota(root)
    return max(1, count if quota is None else min(count, math.ceil(quota / ranks)))


def _sharers(ours: frozenset[int], within: frozenset[int], ranks: int) -> int:
    """How many of the ranks use our CPUs: all, unless each was given so few that none has to share.

    ``within``: the CPUs that the ranks were given theirs of; empty where that is not known.
    """
    return 1 if 0 < len(ours) * ranks <= len(within) else ranks


def cpu_quota(root: str = "/") -> float | None:
    """The least quota over this process's cgroup and its ancestors (v1, v2), in CPUs; None: no limit."""
    quotas = [quota for folder in _cpu_groups(Path(root)) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def cpus_near(pci_address: str, root: str = "/", cpus: Iterable[int] | None = None) -> frozenset[int]:
    """Our CPUs on the NUMA node of a PCI device, such as "0000:3b:00.0".

    Empty where nothing is to be chosen: one node, a node that is not known, or none of our CPUs on it.
    """
    if len(_cpu_list(_text(Path(root, "sys/devices/system/node/online")))) < 2:
        return frozenset()
    node = _text(Path(root, "sys/bus/pci/devices", pci_address, "numa_node"))
    if not node.isdigit():  # -1: the firmware does not say
        return frozenset()
    there = _cpu_list(_text(Path(root, f"sys/devices/system/node/node{node}/cpulist")))
    return there & frozenset(affinity() if cpus is None else cpus)


def last_level_cache(root: str = "/", cpus: Iterable[int] | None = None, ranks: int = 1) -> int | None:
    """Bytes of the last-level caches that the CPUs reach, each once, for one of so many ranks.

    None where it is not known.
    """
    ours = frozenset(affinity() if cpus is None else cpus)
    caches: dict[tuple[int, str], int] = {}
    for cpu in ours:
        found: dict[int, tuple[str, int]] = {}
        for index in Path(root, f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, size = _text(index / "level"), _kib(_text(index / "size"))
            if level.isdigit() and size and _text(index / "type") != "Instruction":
                found[int(level)] = (_text(index / "shared_cpu_list") or str(cpu), size)
        if found:
            level_last = max(found)
            caches[level_last, found[level_last][0]] = found[level_last][1]
    reached = frozenset[int]().union(*(_cpu_list(shared) for _, shared in caches))
    # Ranks that have CPUs of their own share a cache as far as it has CPUs for them.
    sharers = (
        min(ranks, -(-len(reached) // len(ours))) if _sharers(ours, _online(root), ranks) == 1 else ranks
    )
    return sum(caches.values()) // max(sharers, 1) or None


def _online(root: str) -> frozenset[int]:
    return _cpu_list(_text(Path(root, "sys/devices/system/cpu/online")))


def _cpu_list(text: str) -> frozenset[int]:
    """Numbers of a list as the kernel writes it: "0-3,8"."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def host_memory(root: str = "/") -> int | None:
    """Bytes of memory and swap that the machine has in all; None where it is not known."""
    facts = dict(re.findall(r"^(\w+): +(\d+) kB$", _text(Path(root, "proc/meminfo")), re.MULTILINE))
    return (int(facts["MemTotal"]) + int(facts.get("SwapTotal", 0))) * 1024 if "MemTotal" in facts else None


class _Mount(NamedTuple):
    root: str
    point: str
    kind: str
    options: tuple[str, ...]


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Folders of the cgroups whose quota holds for this process, innermost first."""
    mounts = list(_cgroup_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for mount in mounts:
            unified = number == "0" and not controllers and mount.kind == "cgroup2"
            legacy = mount.kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in mount.options
            if unified or legacy:
                yield from _ancestors(root / mount.point.lstrip("/"), _inside(path, mount.root))


def _cgroup_mounts(root: Path) -> Iterator[_Mount]:
    # See proc(5), /proc/pid/mountinfo: fields 4 and 5 are root and mount point, after " - " come type,
    # source, options.
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) >= 5 and len(kinds) >= 3 and kinds[0] in ("cgroup", "cgroup2"):
            yield _Mount(_unescaped(fields[3]), _unescaped(fields[4]), kinds[0], tuple(kinds[2].split(",")))


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _inside(path: str, mount_root: str) -> str:
    """The part of a cgroup's path below what is mounted; in a container only a subtree may be."""
    if mount_root != "/" and (path == mount_root or path.startswith(mount_root + "/")):
        return path[len(mount_root) :]
    return path


def _ancestors(mount_point: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield mount_point.joinpath(*parts[:count])


def _quota_of(folder: Path) -> float | None:
    """CPUs that a cgroup allows. cpu.max is "max 100000" or "quota period"; in v1, -1 is no limit."""
    unified = _text(folder / "cpu.max").split()
    if len(unified) == 2:
        quota, period = unified
    else:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period) or None


def _kib(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]] if match else 0


def _text(path: Path) -> str:
    """The content of a small file; empty where it is not there or not for us."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
