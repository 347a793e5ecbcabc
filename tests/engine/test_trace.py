"""The trace: events that viewers can draw, of every thread that took part, after errors too."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorlift
from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.digests import headers
from tensorlift import outputs
from tensorlift.engine import trace as traces
from tensorlift.engine.abi import PATH_NAMES
from tensorlift.engine.digesting import digest_checkpoint
from tensorlift.engine.events import STAGE_NAMES, TRACE_EVENT
from tensorlift.errors import MachineError, OptionError, TruncatedError
from tensorlift.format.digests import describe
from tensorlift.options import LoadOptions
from tensorlift.sources.sidecars import sidecar_to_write, write_sidecar

READ, WAIT_SLOT, COPY, DIGEST, ASK_CACHE = range(len(STAGE_NAMES))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path / "model", shards=2, tensors=6, elements=20_000, seed=8)


def read_trace(path: Path) -> dict[str, Any]:
    """The file, checked against what the Trace Event format and its viewers ask for."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert set(found) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in found["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
        assert isinstance(event["name"], str)
        assert event["name"]
        assert event["pid"] == os.getpid()
        assert 0 <= event["tid"] < 1 << 32
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            key = "sort_index" if event["name"] == "thread_sort_index" else "name"
            assert isinstance(event["args"][key], int if key == "sort_index" else str)
            named.add((event["name"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert isinstance(event["ts"], (int, float))
            assert isinstance(event["dur"], (int, float))
            assert event["dur"] >= 0
            assert ("thread_name", event["tid"]) in named, "an event on a track without a name"
    check_nesting(complete(found))
    return found


def complete(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def check_nesting(events: Iterable[dict[str, Any]]) -> None:
    """Events of one track lie beside or inside one another; viewers draw nothing right otherwise."""
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        begin = round(event["ts"] * 1000)
        tracks.setdefault(event["tid"], []).append((begin, begin + round(event["dur"] * 1000)))
    for spans in tracks.values():
        open_ends: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def names(found: dict[str, Any], category: str) -> set[str]:
    return {event["name"] for event in complete(found) if event["cat"] == category}


def read_bytes(found: dict[str, Any]) -> int:
    return sum(event["args"]["bytes"] for event in complete(found) if event["name"] == "read")


def check_reads(found: dict[str, Any], written: Written) -> None:
    total = sum(len(raw) for _, _, raw in written.tensors.values())
    assert read_bytes(found) >= total
    for event in complete(found):
        if event["name"] == "read":
            assert Path(event["args"]["file"]) in written.files
            assert event["args"]["path"] in PATH_NAMES
            assert (
                event["args"]["offset"] + event["args"]["bytes"] <= Path(event["args"]["file"]).stat().st_size
            )


def test_clock_of_python_is_that_of_the_engine() -> None:
    assert "CLOCK_MONOTONIC" in time.get_clock_info("perf_counter").implementation


def test_load_writes_phases_and_reads(written: Written, tmp_path: Path) -> None:
    tensorlift.load(written.path, trace=tmp_path / "out.json")
    found = read_trace(tmp_path / "out.json")
    assert names(found, "python") == {
        "load",
        "headers",
        "plan",
        "allocate",
        "hand_out",
        "wait",
        "close",
    }
    assert "read" in names(found, "engine")
    check_reads(found, written)
    (whole,) = (event for event in complete(found) if event["name"] == "load")
    # One clock: what the engine did lies inside the load.
    for event in complete(found):
        assert whole["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 0.002
    batches = [event["args"]["batch"] for event in complete(found) if event["name"] == "hand_out"]
    assert batches == list(range(len(batches)))


def test_open_writes_at_the_end_of_the_pass(written: Written, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with tensorlift.open(written.path, trace=out) as weights:
        assert len(list(weights)) == len(written.tensors)
        check_reads(read_trace(out), written)


def test_open_that_is_left_early_writes_what_there_was(written: Written, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with tensorlift.open(written.path, trace=out) as weights:
        next(iter(weights))
    assert "wait" in names(read_trace(out), "python")
    out.unlink()
    with tensorlift.open(written.path, trace=out):
        pass
    assert names(read_trace(out), "python") == {"load", "headers"}


def test_load_into_writes_of_both_ways(written: Written, tmp_path: Path) -> None:
    model = tensorlift.load(written.path)
    wide = {name: t.to(torch.float64) if t.dtype == torch.float32 else t for name, t in model.items()}
    assert any(model[name].dtype != t.dtype for name, t in wide.items()), "nothing that is copied"
    tensorlift.load_into(wide, written.path, trace=tmp_path / "out.json")
    check_reads(read_trace(tmp_path / "out.json"), written)


def test_failed_load_writes_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_safetensors(tmp_path / "a.safetensors", {"a": random_row("U8", [1 << 16])})
    from tensorlift import sources

    real = sources.read_headers

    def then_cut(*given: Any) -> Any:
        checkpoint = real(*given)
        os.truncate(file, file.stat().st_size - 5000)
        return checkpoint

    monkeypatch.setattr(sources, "read_headers", then_cut)
    with pytest.raises(tensorlift.TensorliftError):
        tensorlift.load(file, trace=tmp_path / "out.json")
    found = read_trace(tmp_path / "out.json")
    (whole,) = (event for event in complete(found) if event["name"] == "load")
    assert whole["args"]["error"]
    assert {"headers", "plan", "wait"} <= names(found, "python")


def test_failed_header_writes_too(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\x08")
    with pytest.raises(TruncatedError):
        tensorlift.load(tmp_path / "a.safetensors", trace=tmp_path / "out.json")
    assert names(read_trace(tmp_path / "out.json"), "python") == {"load", "headers"}


def test_paths_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / os.fsdecode(b"\xff.safetensors"), tmp_path / os.fsdecode(b"\xfe.json")
    write_safetensors(file, {"a": ("U8", (4,), bytes(range(4)))})
    monkeypatch.setattr("sys.argv", ["load", str(file)])
    assert tensorlift.load(file, trace=out)["a"].tolist() == [0, 1, 2, 3]
    found = read_trace(out)
    assert found["otherData"]["command"] == ["load", f"{tmp_path}/\\udcff.safetensors"]
    files = {event["args"]["file"] for event in complete(found) if "file" in event["args"]}
    assert files == {f"{tmp_path}/\\udcff.safetensors"}


def test_variable_and_pid(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLIFT_TRACE", str(tmp_path / "{pid}.json"))
    tensorlift.load(written.path)
    read_trace(tmp_path / f"{os.getpid()}.json")


@pytest.mark.parametrize("path", ["missing/out.json", "."])
def test_path_that_cannot_be_written_is_refused_at_once(path: str, written: Written, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="trace is"):
        tensorlift.load(written.path, trace=tmp_path / path)


def test_disk_that_is_full_is_an_error_of_the_machine(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full.json").write_text(old := '{"displayTimeUnit":"ms","otherData":{"program":"tensorlift"')

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, "fsync", full)
    with pytest.raises(MachineError, match=r"full\.json could not be written: No space left"):
        tensorlift.load(written.path, trace=tmp_path / "full.json")
    # The load's own error goes before that of its trace.
    with pytest.raises(tensorlift.CheckpointNotFoundError):
        tensorlift.load(tmp_path / "gone", trace=tmp_path / "full.json")
    # The last good trace is not lost.
    assert (tmp_path / "full.json").read_text() == old
    assert sorted(os.listdir(tmp_path)) == ["full.json", "model"]


def test_a_file_that_is_loaded_is_never_replaced(written: Written, tmp_path: Path) -> None:
    kept = {file: file.read_bytes() for file in written.path.iterdir()}
    for file in kept:
        with pytest.raises(OptionError, match="name another file"):
            tensorlift.load(written.path, trace=file)
    assert {file: file.read_bytes() for file in written.path.iterdir()} == kept
    # Its own kind is replaced, again and again.
    for _ in range(2):
        tensorlift.load(written.path, trace=tmp_path / "out.json")


@pytest.mark.timeout(20)
def test_a_named_pipe_is_refused_without_waiting(written: Written, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="no regular file"):
        tensorlift.load(written.path, trace=tmp_path / "pipe")


class FakeEngine:
    """An engine that has kept these events."""

    def __init__(self, events: list[tuple[int, ...]], paths: list[str]) -> None:
        self._events = np.array(events, TRACE_EVENT)
        self.shards = tuple(type("Shard", (), {"path": path})() for path in paths)

    def trace(self) -> Any:
        return self._events


def test_what_a_thread_has_in_flight_gets_tracks_of_its_own(tmp_path: Path) -> None:
    begin = time.perf_counter_ns()
    reads = [(begin + 10 * k, begin + 10 * k + 35, 4096 * k, 4096, 0, 77, READ, 2) for k in range(20)]
    others = [
        (begin + 5, begin + 9, 0, 4096, 0, 77, ASK_CACHE, 0),
        (begin + 3, begin + 8, 0, 0, -1, 78, WAIT_SLOT, 0),
        (begin + 8, begin + 9, 0, 512, -1, 78, DIGEST, 0),
        (begin + 40, begin + 90, 0, 0, -1, 77, COPY, 0),
        (begin + 60, begin + 99, 0, 1, -1, 78, COPY, 0),
    ]
    with traces.Trace(str(tmp_path / "out.json")) as trace:
        trace.take(FakeEngine([*reversed(reads), *others], ["a.safetensors"]))  # type: ignore[arg-type]
    found = read_trace(tmp_path / "out.json")
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in found["traceEvents"]
        if event["name"] == "thread_name"
    }
    used: dict[str, set[str]] = {}
    for event in complete(found):
        used.setdefault(event["name"], set()).add(tracks[event["tid"]])
    assert used["read"] == {"reader 1", "reader 1, 2", "reader 1, 3", "reader 1, 4"}
    assert used["copy"] == {"copies to the device", "copies to the device, 2"}
    assert used["wait_slot"] == used["digest"] == {"reader 2"}
    assert len(complete(found)) == len(reads) + len(others) + 1
    (digest,) = (event for event in complete(found) if event["name"] == "digest")
    assert digest["args"] == {"bytes": 512}
    assert (digest["ts"], digest["dur"]) == (pytest.approx((begin + 8 - trace._begin) / 1000), 0.001)


def test_the_thread_that_reads_for_all_digests_nothing(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [40 << 20])})
    digests = digest_checkpoint(headers(path), LoadOptions())
    write_sidecar(sidecar_to_write(headers(path)), describe(headers(path), digests))
    state = tensorlift.load(path, backend="URING_BUFFERED", verify=True, trace=tmp_path / "out.json")
    assert state.stats.readers == {"URING_BUFFERED": 40 << 20}
    found = read_trace(tmp_path / "out.json")
    titles = {
        e["tid"]: e["args"]["name"].split(",")[0] for e in found["traceEvents"] if e["name"] == "thread_name"
    }
    on = {
        kind: {titles[e["tid"]] for e in complete(found) if e["name"] == kind} for kind in ("read", "digest")
    }
    assert on["read"]
    assert on["digest"]
    assert not on["read"] & on["digest"]


def test_tracks_are_the_lowest_that_are_free() -> None:
    assert traces.tracks([0, 1, 2, 5, 6], [5, 3, 4, 9, 7]) == [0, 1, 2, 0, 1]
    assert traces.tracks([], []) == []


def test_large_trace_is_one_document(tmp_path: Path) -> None:
    count = traces._BLOCK + 10
    begin = time.perf_counter_ns()
    events = [(begin + k, begin + k + 1, k, 1, 0, 5, READ, 0) for k in range(count)]
    with traces.Trace(str(tmp_path / "out.json")) as trace:
        trace.take(FakeEngine(events, ['a},{"name".safetensors']))  # type: ignore[arg-type]
    found = read_trace(tmp_path / "out.json")
    assert read_bytes(found) == count
    assert {e["args"]["file"] for e in complete(found) if e["name"] == "read"} == {'a},{"name".safetensors'}
