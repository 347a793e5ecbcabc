"""``tensorlift doctor``: which readers, devices and NICs work here, and why the others do not."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from tensorlift.cli.console import EXIT_MACHINE, data_console, guarded
from tensorlift.cli.interrupts import at_once
from tensorlift.errors import LibraryError, MachineError, TensorliftError
from tensorlift.format.quoting import clean
from tensorlift.stats import human_bytes

__all__ = ["command", "examine"]

# A policy is as good as the readers that it may use, so it is not tried on its own.
_POLICIES = ("AUTO", "BUFFERED")


@guarded
def command(
    path: str | None = typer.Argument(
        None, metavar="PATH", help="Try the readers on this checkpoint; else on a small file."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Say which readers and devices work on this machine, why the others do not, and which NIC is whose."""
    if path is None:
        with _small_file() as file:
            facts = examine(file)
    else:
        facts = examine(path)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    works = any(backend["works"] for backend in facts["backends"])
    return 0 if works and "error" not in facts["load"] else EXIT_MACHINE


def examine(path: str) -> dict[str, Any]:
    """Plain facts: library, versions, limits, readers, devices, NICs, and one small load of the checkpoint.

    Raises FileError where the checkpoint is not right; what this machine cannot do is part of the facts.
    """
    from tensorlift import sources
    from tensorlift.bench import machine
    from tensorlift.engine.abi import library

    checkpoint = sources.read_headers(sources.find(path, download=False))
    facts: dict[str, Any] = {"versions": machine.versions(), "limits": machine.limits(), "nics": _nics()}
    try:
        abi = library()
    except LibraryError as error:
        facts |= {"library": {"works": False, "reason": str(error)}, "backends": [], "devices": []}
        facts["load"] = {"error": "the native library is missing"}
        return facts
    file = os.fsdecode(checkpoint.shards[0].absolute)
    facts["library"] = {"works": True, "path": abi.path, "interface": abi.call["tl_abi_version"]()}
    facts["file"] = {"path": file, "file_system": machine.file_system(Path(file))}
    facts["backends"] = [_backend(abi, name, file) for name in _readers()]
    facts["devices"] = _devices(abi)
    facts["load"] = _smallest(path, checkpoint)
    return facts


def _readers() -> Iterator[str]:
    from tensorlift.options import BACKENDS

    return (name for name in BACKENDS if name not in _POLICIES)


def _backend(abi: Any, name: str, file: str) -> dict[str, Any]:
    reason = abi.backend_not_built(name)
    reason = f"not built: {reason}" if reason is not None else abi.backend_probe(name, file)
    return {"name": name, "works": reason is None, "reason": reason}


def _devices(abi: Any) -> list[dict[str, Any]]:
    with at_once():
        import torch

    from tensorlift.engine.abi import DEVICE_CUDA, DEVICE_HIP

    seen = torch.cuda.device_count()
    without = torch.version.cuda is None and torch.version.hip is None
    build = f"torch {torch.__version__} is built without CUDA and ROCm" if without else None
    found: list[dict[str, Any]] = [{"name": "cpu", "works": True, "count": 1, "reason": None}]
    for name, kind, ours in (
        ("cuda (CUDA)", DEVICE_CUDA, torch.version.hip is None),
        ("cuda (ROCm)", DEVICE_HIP, torch.version.hip is not None),
    ):
        count, reason = abi.driver_probe(kind)
        if reason is None and (build or not ours or not seen):
            reason = build or ("torch sees no device" if ours else "this torch is built for the other one")
        found.append({"name": name, "works": reason is None, "count": count, "reason": reason})
    return found


def _nics() -> dict[str, Any]:
    """RDMA devices, what each GPU would take of them and why, and the same as a file for Mooncake."""
    from tensorlift.forking.nics import choose, custom_topology
    from tensorlift.forking.topology import tree_here

    tree = tree_here()
    there = [
        {
            "name": nic.name, "works": nic.port is not None, "port": nic.port, "rate": nic.rate,
            "reason": None if nic.port is not None else f"no active port ({nic.state})",
        }
        for nic in tree.nics
    ]  # fmt: skip
    gpus = []
    for number, gpu in enumerate(tree.gpus):
        choice = choose(None, number, gpu.name, tree)
        taken = {"takes": list(choice.names), "ucx": choice.ucx, "rate": choice.rate, "why": choice.reason}
        gpus.append({"name": gpu.name, "address": gpu.address, **taken})
    topology = json.loads(custom_topology(None, tree))
    return {"there": there, "gpus": gpus, "mooncake_topology": topology}


def _smallest(path: str, checkpoint: Any) -> dict[str, Any]:
    """Loads the smallest tensor that has bytes, to see which way the default takes on this file system."""
    from tensorlift.loading import load

    sizes = [
        (size, name) for size, name in zip(checkpoint.sizes.tolist(), checkpoint.names, strict=True) if size
    ]
    if not sizes:
        return {"error": "the checkpoint has no bytes"}
    try:
        stats = load(path, device="cpu", names=[min(sizes)[1]]).stats
    except MachineError as error:
        return {"error": str(error)}
    except TensorliftError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "residency": list(stats.residency),
        "readers": list(stats.readers),
        "fallbacks": list(stats.fallbacks),
    }


@contextlib.contextmanager
def _small_file() -> Iterator[str]:
    """A checkpoint of one tensor of 64 KiB on the file system that temporary files use."""
    header = json.dumps({"probe": {"dtype": "U8", "shape": [65536], "data_offsets": [0, 65536]}}).encode()
    header += b" " * (-len(header) % 8)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorlift-"))
            file = Path(folder, "probe.safetensors")
            file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(256)) * 256)
        except OSError as error:
            raise MachineError(
                f"the small file that readers are tried on could not be written: {error}; give the path of a "
                "checkpoint instead, or set TMPDIR to a folder with room"
            ) from error
        yield str(file)


def _print(facts: dict[str, Any]) -> None:
    console = data_console()
    console.print(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    library = facts["library"]
    console.print(f"native library: {library.get('path') or library['reason']}")
    limits = facts["limits"]
    memlock = limits["memlock_bytes"]
    quota = limits["cgroup_cpus"]
    for name, value in (
        ("locked memory", "no limit" if memlock is None else human_bytes(memlock)),
        ("open files", limits["open_files"]),
        ("io_uring", limits["io_uring"]),
        ("huge pages", limits["huge_pages"]),
        ("CPUs by cgroup", "no limit" if quota is None else f"{quota:g}"),
    ):
        console.print(f"{name}: {value}")
    if "file" in facts:
        console.print(f"tried on: {clean(facts['file']['path'])} ({facts['file']['file_system']})")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "works", "why not"):
        table.add_column(column, overflow="fold")
    nics = facts["nics"]
    for row in facts["backends"] + facts["devices"] + nics["there"]:
        rate = f" ({human_bytes(row['rate'])}/s)" if row.get("rate") else ""
        table.add_row(row["name"] + rate, "yes" if row["works"] else "no", row["reason"] or "")
    console.print(table)
    if not nics["there"]:
        console.print("NICs: no RDMA device is here")
    for gpu in nics["gpus"] if nics["there"] else ():
        where = f" ({gpu['address']})" if gpu["address"] else ""
        console.print(f"{gpu['name']}{where} takes {', '.join(gpu['takes']) or 'no NIC'}: {gpu['why']}")
    load = facts["load"]
    if "error" in load:
        console.print(f"a load by default options failed: {load['error']}")
    else:
        console.print(f"by default: {', '.join(load['readers'])}")
        console.print(f"what is cached is told by: {', '.join(load['residency'])}")
        for text in load["fallbacks"]:
            console.print(f"fallback: {text}")
