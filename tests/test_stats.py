"""Statistics: plain values, sums, and the summary."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tensorlift.stats import LoadStats, merged

ONE = LoadStats(
    bytes=3_000_000_000,
    tensors=4,
    files=2,
    seconds={"read": 1.0, "total": 1.5},
    readers={"PREAD_BUFFERED": 3_000_000_000},
    fallbacks=("no io_uring",),
    threads=2,
    pinned_peak_bytes=1 << 20,
)


def test_rate_and_dict() -> None:
    assert ONE.rate == 2e9
    assert LoadStats().rate == 0
    record = json.loads(json.dumps(ONE.to_dict()))
    assert record["rate"] == 2e9
    assert record["fallbacks"] == ["no io_uring"]
    assert {field.name for field in dataclasses.fields(LoadStats)} | {"rate"} == set(record)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ONE.bytes = 1  # type: ignore[misc]


def test_summary_has_what_matters() -> None:
    text = ONE.summary()
    for part in ("3.000 GB", "4 tensors", "2.00 GB/s", "PREAD_BUFFERED 3.000 GB", "fallback: no io_uring"):
        assert part in text
    assert "read by: nothing" in LoadStats().summary()


def test_merged() -> None:
    other = LoadStats(
        bytes=1, readers={"MMAP": 1, "PREAD_BUFFERED": 2}, fallbacks=("no io_uring", "x"), threads=1
    )
    both = merged([ONE, other], seconds={"total": 2.0})
    assert both.bytes == 3_000_000_001
    assert both.readers == {"PREAD_BUFFERED": 3_000_000_002, "MMAP": 1}
    assert both.fallbacks == ("no io_uring", "x")
    assert both.threads == 3
    assert both.seconds == {"total": 2.0}
    assert merged([], files=0) == LoadStats()
