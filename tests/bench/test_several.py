"""The command for several devices, tried on a CPU with gloo: every row, and what it does without time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support import leaks
from tensorlift.bench import member_loads, several
from tensorlift.bench.cases import Case
from tensorlift.bench.member_loads import GATHER, LOADERS, NONE, PLAIN
from tensorlift.bench.several_bench import SeveralBench
from tensorlift.errors import MachineError


def arguments(folder: Path, *more: str) -> list[str]:
    places = ["--folder", str(folder / "memory"), "--disk", str(folder / "disk")]
    return ["--device", "cpu", "--small", "--shards", "2", "--ranks", "2", *places, *more]


@pytest.mark.timeout(400)
def test_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the model that decodes is one of transformers")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    # A disk that is warm differs by nothing but what is cached.
    rows = ["--rows", ",".join(row for row in several.ROWS if row != "warm")]
    decoding = ["--decode-layers", "1", "--decode-hidden", "64", "--tokens", "8", "--rounds", "1"]
    with leaks.nothing_left():
        several.main(
            arguments(tmp_path, "--runs", "1", "--budget", "380", "--commit", "abc", *rows, *decoding)
        )
    printed = capsys.readouterr().out
    (file,) = (tmp_path / "out").iterdir()
    record = json.loads(file.read_text())
    assert record["failed"] == []
    assert record["machine"]["commit"] == "abc"
    assert list((tmp_path / "memory").iterdir()) == []
    names = [row["name"] for row in record["rows"]]
    wanted = [
        *("links, 2 ranks", "all-gather, 4 MiB, 2 ranks"),
        *(f"gather, {where}, 2 ranks, against safetensors" for where in ("tmpfs", "disk, cold")),
        *("slices, rows only, 2 ranks", "slices, columns only, 2 ranks"),
        *("a group, made, 2 ranks", "a rank killed, the caller's group, 2 ranks"),
        *("decoding, fork", "decoding, fork, no digests", "decoding, broadcast"),
    ]
    assert [name for name in wanted if name not in names] == []
    assert all(name in printed for name in ("links, 2 ranks", "disk, cold, 2 ranks", "unique GB/s"))
    loads = {one["name"]: one for one in record["notes"]["loads"]["tmpfs, 2 ranks"]}
    for name in (GATHER, NONE, PLAIN):
        assert len(loads[name]["series"]["seconds"]) == 1
        assert len(loads[name]["memory"]) == 2
        assert loads[name]["memory"][0]["tensor_bytes"] == loads[name]["series"]["nbytes"]
    assert "cuda" in loads["InstantTensor"]["failed"]
    gathered = loads[GATHER]["series"]["notes"][0]["received_bytes"]
    assert all(nbytes >= loads[GATHER]["series"]["nbytes"] // 2 for nbytes in gathered)
    deaths = [row for row in record["rows"] if row["name"].startswith("a rank killed")]
    assert len(deaths) == 2
    assert all(row["passed"] and "PeerError" in row["what"] for row in deaths)


def test_without_time_everything_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert several.main(arguments(tmp_path, "--budget", "1")) == 0
    (file,) = (tmp_path / "out").iterdir()
    record = json.loads(file.read_text())
    assert len(record["dropped"]) == len(several.ROWS) + 1  # a death for each group
    assert record["rows"] == []
    assert "dropped: warm, 2 ranks" in capsys.readouterr().out


class Ranks:
    """In place of processes: all loads but those of one loader are right, and take as long as is said."""

    def __init__(self, seconds: dict[str, float], failing: str) -> None:
        self.seconds, self.failing = seconds, failing
        self.loads: list[str] = []

    def ask(self, function: Any, patience: float, **about: Any) -> list[dict[str, Any]]:
        if function is not member_loads.sample:
            return []
        name = about["loader"]
        self.loads.append(name)
        if name == self.failing:
            raise MachineError("rank 1: no answer within 60 s")
        seconds = self.seconds.get(name, 1.0)
        return [
            {
                "seconds": seconds + rank,
                "late": 0.0,
                "cpu_seconds": 1.0,
                "memory": {},
                "call_bytes": 1,
                "disk_bytes": 0,
            }
            for rank in range(2)
        ]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return several._small(tmp_path / "case", 1)


def bench_of(case: Case, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, seconds: float) -> SeveralBench:
    bench = SeveralBench(["cpu", "cpu"], {"memory": lambda: case}, None, seconds, runs=5, patience=60)
    monkeypatch.setattr(bench, "crew", lambda count: ranks)
    return bench


def test_a_loader_that_hangs_costs_its_own_row(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks({PLAIN: 10.0}, NONE)
    bench = bench_of(case, ranks, monkeypatch, 600)
    racing = bench.race("here", 2, [GATHER, NONE, PLAIN], case)
    # Until the last rank has it; what is slow runs fewer times.
    assert racing[GATHER].series.seconds == [2.0] * 5
    assert racing[PLAIN].series.seconds == [11.0] * 3
    assert racing[NONE].failed == "rank 1: no answer within 60 s"
    assert ranks.loads.count(NONE) == 1
    assert bench.dropped == []


def test_a_race_ends_with_its_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks({}, "")
    bench = bench_of(case, ranks, monkeypatch, 600)
    bench.until = time.monotonic()
    racing = bench.race("here", 2, [GATHER, PLAIN], case)
    assert not racing[GATHER].ok
    assert len(bench.dropped) == 1
    assert "no time for sample 0 of gather" in bench.dropped[0]


def test_the_cache_is_made_before_each_load_of_a_disk(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[float] = []

    class Loops:
        def bring(self, files: object, share: float) -> None:
            brought.append(share)

    bench = bench_of(case, Ranks({}, ""), monkeypatch, 600)
    bench.ceilings = Loops()  # type: ignore[assignment]
    racing = bench.race("disk", 2, [GATHER], case, 0.0)
    assert brought == [0.0] * 4
    assert len(racing[GATHER].series.seconds) == 3


def test_what_cannot_be_measured_says_why(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(case, Ranks({}, ""), monkeypatch, 600)
    racing = bench.race("here", 2, ["InstantTensor", *[n for n in LOADERS if n.startswith("Run:ai")]], case)
    assert racing["InstantTensor"].failed == "loads to cuda only"


def test_unknown_rows_and_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bad, text in (
        (["--rows", "tmpfs,nine"], "no row is called nine"),
        (["--ranks", "two"], "--ranks two"),
    ):
        with pytest.raises(SystemExit):
            several.main(bad)
        assert text in capsys.readouterr().err


def test_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MachineError, match="--device cpu tries the command"):
        several.main(["--disk", str(tmp_path)])
