"""Facts of this machine: CPUs that may be used, and the cache that they reach.

Everything is read below a root folder, so that a recorded tree of another machine can be asked as well.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["affinity", "cpu_quota", "host_memory", "last_level_cache", "usable_cpus"]


def affinity() -> frozenset[int]:
    """The CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def usable_cpus(root: str = "/", cpus: Iterable[int] | None = None) -> int:
    """CPUs by affinity and by the least cgroup quota, rounded up; at least 1."""
    count = len(frozenset(affinity() if cpus is None else cpus))
    quota = cpu_quota(root)
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def cpu_quota(root: str = "/") -> float | None:
    """The least quota over this process's cgroup and its ancestors (v1, v2), in CPUs; None: no limit."""
    quotas = [quota for folder in _cpu_groups(Path(root)) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def last_level_cache(root: str = "/", cpus: Iterable[int] | None = None) -> int | None:
    """Bytes of the last-level caches that the CPUs reach, each once; None where it is not known."""
    caches: dict[tuple[int, str], int] = {}
    for cpu in affinity() if cpus is None else cpus:
        found: dict[int, tuple[str, int]] = {}
        for index in Path(root, f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, size = _text(index / "level"), _kib(_text(index / "size"))
            if level.isdigit() and size and _text(index / "type") != "Instruction":
                found[int(level)] = (_text(index / "shared_cpu_list") or str(cpu), size)
        if found:
            level_last = max(found)
            caches[level_last, found[level_last][0]] = found[level_last][1]
    return sum(caches.values()) or None


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
