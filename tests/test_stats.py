"""Statistics: plain values, sums, and the summary."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tensorlift.stats import LoadStats, human_bytes, merged

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
    for part in (
        "3.00 GB",
        "4 tensors",
        "2 files",
        "2.00 GB/s",
        "PREAD_BUFFERED 3.00 GB",
        "fallback: no io_uring",
    ):
        assert part in text
    assert "read by: nothing" in LoadStats().summary()


def test_summary_of_a_small_load() -> None:
    text = LoadStats(bytes=64_000, tensors=1, files=1, seconds={"total": 0.5}).summary()
    assert text.startswith("64.00 kB, 1 tensor, 1 file in 0.500 s: 128.00 kB/s\n")


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


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (31.15e9, "31.15 GB"), (5e15, "5000.00 TB")],
)
def test_human_bytes(nbytes: float, text: str) -> None:
    assert human_bytes(nbytes) == text
