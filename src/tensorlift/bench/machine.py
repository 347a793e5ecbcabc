"""What this machine is, as far as loading is concerned: facts from the kernel and the packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

from tensorlift.engine import machine

__all__ = ["facts", "file_system", "limits", "versions"]

_PACKAGES = ("tensorlift", "torch", "numpy", "msgspec", "safetensors", "transformers", "huggingface_hub")


def facts(*folders: Path, device: str = "cpu", commit: str | None = None) -> dict[str, Any]:
    """Processor, memory, kernel, limits, versions, the file system of each folder, and the device.

    ``commit``: of the tree, where git is not there to tell.
    """
    found = {
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": machine.last_level_cache(),
        "memory_bytes": _meminfo("MemTotal"),
        "kernel": platform.release(),
        "system": _system(),
        **limits(),
        "versions": versions(),
        "commit": commit or _commit(),
        "folders": {str(folder): file_system(folder) for folder in folders},
    }
    if device != "cpu":
        import torch

        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def versions() -> dict[str, str]:
    """Python, and the installed ones of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def limits() -> dict[str, Any]:
    """What bounds reading: locked memory, open files, io_uring, huge pages, the cgroup's CPUs."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "io_uring": _io_uring(),
        "huge_pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "cgroup_cpus": machine.cpu_quota(),
    }


def file_system(path: Path) -> str:
    """Type of the file system that holds the path, and its device: ``ext4 on /dev/vda``."""
    resolved = str(path.resolve())
    best = ("", "unknown")
    for line in _read("/proc/self/mounts").splitlines():
        source, mount, kind = line.split()[:3]
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {source}")
    return best[1]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """The word in brackets of ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _meminfo(key: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _system() -> str:
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.system()


def _io_uring() -> str:
    # sysctl kernel.io_uring_disabled, since Linux 6.6: see Documentation/admin-guide/sysctl/kernel.rst.
    words = {"0": "allowed", "1": "for the group kernel.io_uring_group only", "2": "forbidden for all"}
    value = _read("/proc/sys/kernel/io_uring_disabled").strip()
    return words.get(value, "no such sysctl (kernel older than 6.6)")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
