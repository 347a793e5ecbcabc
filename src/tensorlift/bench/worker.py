"""``python -m tensorlift.bench.worker``: one load, or one rate, in a process of its own.

A request is one JSON document on stdin, the answer another one on stdout; whatever a library prints goes to
stderr. Imports and the device's context come before the clock.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tensorlift.bench.rivals import Adapter
from tensorlift.bench.sampling import digest_of_names, tensor_facts

__all__ = [
    "Watch",
    "answer",
    "call_bytes",
    "device_free",
    "disk_bytes",
    "pinned_bytes",
    "reset_peak",
    "status_bytes",
]

_WATCH_SECONDS = 0.005


class _MissingError(Exception):
    """What a loader needs is not installed."""


class Watch:
    """The most memory that was in use, looked at again and again; only where the time does not count."""

    def __init__(self, device: str, wanted: bool) -> None:
        self.device = device
        self.free_before = self.free_least = device_free(device)
        self.anonymous = self.pinned = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if wanted else None
        if self._thread:
            self._thread.start()

    def look(self) -> None:
        """Once."""
        status = status_bytes()
        self.anonymous = max(self.anonymous, status.get("RssAnon", 0))
        self.pinned = max(self.pinned, status.get("VmPin", 0), status.get("VmLck", 0))
        if self.free_before is not None:
            self.free_least = min(self.free_least, device_free(self.device))

    def end(self) -> None:
        """Stops looking."""
        self._stop.set()
        if self._thread:
            self._thread.join()
        self.look()

    def _run(self) -> None:
        while not self._stop.wait(_WATCH_SECONDS):
            self.look()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What the request asks for: ``{"rate_of": "cuda:0"}``, or a load."""
    if "rate_of" in request:
        from tensorlift.bench.pinned import pinned_copy_rate

        return {"rate": pinned_copy_rate(request["rate_of"])}
    return _load(request)


def _load(request: dict[str, Any]) -> dict[str, Any]:
    device = request["device"]
    adapter = _imported(request)
    _prepare(device)
    reset_peak()
    before = status_bytes()
    disk = disk_bytes()
    watch = Watch(device, request["watch"])
    modules = set(sys.modules)
    start = time.perf_counter()
    state, kept = adapter(request["files"], device)
    _finish(device)
    seconds = time.perf_counter() - start
    late = sorted(sys.modules.keys() - modules)
    watch.end()
    after = status_bytes()
    found: dict[str, Any] = {
        "seconds": seconds,
        "disk_bytes": disk_bytes() - disk,
        "resident_peak_bytes": after.get("VmHWM", 0) - before.get("VmRSS", 0),
        "tensors": len(state),
        "names": digest_of_names(state),
        "facts": tensor_facts(state, request["sample"]),
        "version": _version(request["package"]),
        "imported_meanwhile": late,
    }
    told = kept.to_dict() if hasattr(kept, "to_dict") else {}
    if request["watch"]:
        found["anonymous_peak_bytes"] = watch.anonymous - before.get("RssAnon", 0)
        found["pinned_peak_bytes"] = pinned_bytes(watch.pinned, told)
        if watch.free_before is not None:
            found["device_peak_bytes"] = watch.free_before - watch.free_least
    return found | ({"stats": told} if told else {})


def _imported(request: dict[str, Any]) -> Adapter:
    """The adapter, once all is imported that it and its loader import later on: that is no part of a load."""
    where, _, function = request["adapter"].partition(":")
    try:
        for module in [request["module"], *request["imports"]]:
            importlib.import_module(module)
        adapter: Adapter = getattr(importlib.import_module(where), function)
    except ImportError as error:
        raise _MissingError(f"{type(error).__name__}: {error}") from error
    return adapter


def pinned_bytes(locked: int, told: dict[str, Any]) -> int | None:
    """Bytes that a loader tells of or that the kernel counts; None where only the driver knows."""
    known = told.get("pinned_peak_bytes", 0) or locked
    return known if known or told else None


def _prepare(device: str) -> None:
    """Imports torch and makes the device's context."""
    import torch

    if device != "cpu":
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
        torch.cuda.synchronize(device)


def _finish(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def device_free(device: str) -> Any:
    """Bytes that the driver says are free; None for a CPU."""
    if device == "cpu":
        return None
    import torch

    return torch.cuda.mem_get_info(device)[0]


def reset_peak() -> None:
    """Forgets the peak of resident memory: proc(5), /proc/pid/clear_refs, 5."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"the peak of resident memory counts the imports too: {error}", file=sys.stderr)


def status_bytes() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


def disk_bytes() -> int:
    """Bytes that this process had storage fetch: proc(5), /proc/pid/io, read_bytes."""
    return _io("read_bytes")


def call_bytes() -> int:
    """Bytes that system calls read for this process, from wherever; not by maps, nor by io_uring: rchar."""
    return _io("rchar")


def _io(key: str) -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Answers once; an exception is an answer too. Nothing is torn down, so that no library can spoil it."""
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        found = answer(json.load(sys.stdin))
    except Exception as error:  # noqa: BLE001 - told to the parent, which decides
        missing = isinstance(error, _MissingError)
        found = {"error": str(error) if missing else f"{type(error).__name__}: {error}", "missing": missing}
    os.write(out, json.dumps(found).encode())
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
