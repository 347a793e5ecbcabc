"""What an engine reports: fallbacks with their files, each reason once in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tensorlift.engine import report
from tensorlift.engine.abi import PATH_NAMES


class FakeEngine:
    """An engine whose files were all refused for one reason."""

    def __init__(self, files: int, reason: str) -> None:
        self.shards = tuple(SimpleNamespace(path=f"{reason}-{at}") for at in range(files))
        self._reason = reason

    def stats(self) -> Any:
        counters = "direct_bytes_read bounced_bytes copies threads slot_wait_ns"
        zeros = dict.fromkeys([*counters.split(), "pinned_peak_bytes", "pinned_reused_bytes"], 0)
        none = [0] * len(PATH_NAMES)
        return SimpleNamespace(reads_by_path=none, bytes_by_path=none, notes=b"", **zeros)

    def file_info(self, index: int) -> Any:
        return SimpleNamespace(residency=b"unknown", fallback=self._reason.encode())


@pytest.mark.parametrize(
    ("files", "says"),
    [(1, "none (none-0)"), (2, "none (none-0 and 1 more file)"), (3, "none (none-0 and 2 more files)")],
)
def test_fallbacks_name_files(files: int, says: str) -> None:
    assert report.report_of(FakeEngine(files, "none")).fallbacks == (says,)  # type: ignore[arg-type]


def test_each_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_logged", set())
    with caplog.at_level(logging.WARNING):
        for files, reason in ((1, "a"), (2, "a"), (1, "b"), (1, "a")):
            assert report.report_of(FakeEngine(files, reason), log=True).fallbacks  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == ["a (a-0)", "b (b-0)"]
