"""Loaders in turn, each sample in a process of its own, from a page cache that is proven before it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.report import Series
from tensorlift.bench.rivals import OURS, Rival
from tensorlift.bench.sampling import digest_of_names, file_checksums, sample_names
from tensorlift.errors import MachineError
from tensorlift.format.checkpoint import Checkpoint

__all__ = ["SHARES", "Entry", "Race", "ask", "link_rate"]

SHARES: dict[str, float | None] = {"warm": 1.0, "cold": 0.0, "half": 0.5, "as-is": None}
"""How much of each file is cached before a sample."""

_LONGEST = 300


@dataclass(slots=True)
class Entry:
    """A loader and what came of it."""

    rival: Rival
    series: Series
    status: str = "ok"
    """``ok``, ``missing``, ``not here``, ``failed``, ``crashed``, ``hung`` or ``wrong``."""
    reason: str = ""

    @property
    def ok(self) -> bool:
        """It can be measured, or was."""
        return self.status == "ok"

    @property
    def measured(self) -> bool:
        """There is a sample that counts; it may have failed after it."""
        return len(self.series.seconds) > self.series.warm_up

    def fail(self, status: str, reason: str) -> None:
        """It is not run again; what it did before stays. Of the reason, the first line."""
        line = next(iter(reason.strip().splitlines()), "no reason told")
        self.status, self.reason = status, line if len(line) <= _LONGEST else line[:_LONGEST] + "…"

    def peak(self, key: str) -> int | None:
        """The most of one kind of memory over all samples; None where nothing tells."""
        known = [note[key] for note in self.series.notes if note.get(key) is not None]
        return max(known) if known else None

    @property
    def cached(self) -> float:
        """Mean share of the files that was cached before a sample."""
        notes = self.series.notes
        return sum(note["cached_before"] for note in notes) / len(notes) if notes else 0.0

    def record(self) -> dict[str, Any]:
        """Plain values for the file."""
        keys = ("resident_peak_bytes", "anonymous_peak_bytes", "pinned_peak_bytes", "device_peak_bytes")
        return {
            "name": self.rival.name,
            "status": self.status,
            "reason": self.reason,
            "version": next((note["version"] for note in self.series.notes), None),
            **{key: self.peak(key) for key in keys},
            **({"series": self.series.record()} if self.measured else {"seconds": self.series.seconds}),
        }


class Race:
    """One checkpoint, one device, one state of the page cache."""

    def __init__(
        self, checkpoint: Checkpoint, device: str, ceilings: Ceilings, timeout_seconds: float
    ) -> None:
        self.files = [Path(os.fsdecode(shard.absolute)) for shard in checkpoint.shards]
        self.nbytes = int(checkpoint.sizes.sum())
        self._device = device
        self._ceilings = ceilings
        self._timeout_seconds = timeout_seconds
        self._sample = sample_names(checkpoint.names)
        self._names = digest_of_names(checkpoint.names)
        self._checksums = file_checksums(checkpoint, self._sample)
        self._ours: dict[str, Any] = {}

    def run(
        self, rivals: Sequence[Rival], share: float | None, runs: int, say: Callable[[str], object]
    ) -> list[Entry]:
        """Ours and the rivals in turn, once more than ``runs`` times.

        The first sample of each does not count: in it the memory is watched, which takes time.
        """
        entries = [Entry(rival, Series(rival.name, self.nbytes)) for rival in [OURS, *rivals]]
        for entry in entries[1:]:
            obstacle = entry.rival.obstacle(self._device)
            if obstacle is not None:
                entry.fail("missing" if obstacle.startswith("not installed") else "not here", obstacle)
        for number in range(runs + 1):
            for entry in entries:
                if entry.ok:
                    self._once(entry, share, watch=number == 0)
                    result = (
                        f"{entry.series.seconds[-1]:.3f} s" if entry.ok else f"{entry.status}: {entry.reason}"
                    )
                    say(f"{entry.rival.name}, {number or 'not counted'}: {result}")
        return entries

    def _once(self, entry: Entry, share: float | None, watch: bool) -> None:
        if share is None:
            seen = self._ceilings.cached_share(self.files)
        else:
            seen = self._ceilings.bring(self.files, share)
        rival = entry.rival
        request = {
            "module": rival.module,
            "package": rival.package,
            "adapter": rival.adapter,
            "imports": rival.imports,
            "files": [str(file) for file in self.files],
            "device": self._device,
            "watch": watch,
            "sample": self._sample,
        }
        status, found = ask(request, self._timeout_seconds, rival.folder)
        if status == "failed" and found.get("missing"):
            entry.fail("missing", f"{found['error']}; {rival.pip}")
        elif status != "ok":
            entry.fail(status, found["error"])
        else:
            self._take(entry, found | {"cached_before": seen})

    def _take(self, entry: Entry, found: dict[str, Any]) -> None:
        facts = found.pop("facts")
        wrong = self._difference(facts, found)
        if wrong:
            entry.fail("wrong", wrong)
            return
        if entry.rival is OURS:
            self._ours = facts
        entry.series.seconds.append(found.pop("seconds"))
        entry.series.notes.append(found)

    def _difference(self, facts: dict[str, Any], found: dict[str, Any]) -> str | None:
        """What is not as in the files, or not as ours gave it."""
        if found["names"] != self._names:
            return f"it gave {found['tensors']} tensors, and not those of the checkpoint"
        for name in self._sample:
            if facts[name]["checksum"] != self._checksums[name]:
                return f"tensor {name!r} has other bytes than its file"
            ours = self._ours.get(name, facts[name])
            for key in ("dtype", "shape"):
                if facts[name][key] != ours[key]:
                    return f"tensor {name!r}: {key} {facts[name][key]}, ours is {ours[key]}"
        return None


def ask(
    request: dict[str, Any], timeout_seconds: float, folder: Path | None = None
) -> tuple[str, dict[str, Any]]:
    """One request to a worker: ``ok``, ``failed``, ``crashed`` or ``hung``; its answer or an ``error``."""
    path = os.pathsep.join(filter(None, [str(folder or ""), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tensorlift.bench.worker"]
    with tempfile.TemporaryFile() as log:
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            out = worker.communicate(json.dumps(request).encode(), timeout_seconds)[0]
        except subprocess.TimeoutExpired:
            return "hung", {"error": f"no end within {timeout_seconds:g} s, killed"}
        finally:
            # Its children too; on Ctrl-C as well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        if worker.returncode or not out:
            return "crashed", {"error": f"{_end(worker.returncode)}{_last_words(log)}"}
    found: dict[str, Any] = json.loads(out)
    return ("failed" if "error" in found else "ok"), found


def link_rate(device: str) -> float:
    """Bytes per second of a pinned copy to the device, from a process of its own."""
    status, found = ask({"rate_of": device}, 120)
    if status != "ok":
        raise MachineError(f"the link to {device} could not be measured: {found['error']}")
    return float(found["rate"])


def _end(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _last_words(log: Any) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
