"""Progress: the caller's function, a bar on stderr, or nothing."""

from __future__ import annotations

import re

import pytest

from tensorlift.progress import bar, by_source, reporter


def test_reporter(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    with reporter(lambda done, total: seen.append((done, total))) as report:
        assert report is not None
        report(1, 2)
    assert seen == [(1, 2)]
    for nothing in (None, False):
        with reporter(nothing) as report:
            assert report is None
    with reporter(True) as report:
        assert report is not None
        report(2, 2)
    assert capsys.readouterr().out == ""


def test_a_bar_that_is_drawn_in_any_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with bar(force=True, what="from [here]") as report:
        report(1_000_000, 2_000_000)
    said = capsys.readouterr()
    assert said.out == ""
    assert "2.0 MB" in said.err
    assert "from [here]" in said.err


@pytest.mark.parametrize(("width", "drawn"), [("30", False), ("100", True)])
def test_a_bar_stays_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str, drawn: bool
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    with bar(force=True) as report:
        report(1_000_000_000, 2_000_000_000)
    said = capsys.readouterr().err
    assert "1.0/2.0 GB" in said
    assert ("loading" in said) == drawn
    assert "\x1b[1A\x1b[2K\x1b[1A" not in said  # nothing of more than one line is wiped


def test_who_hears_of_sources() -> None:
    told: list[object] = []
    came = {"a": 1, "b": 2}

    def wants(done: int, total: int, *, by_source: object) -> None:
        told.append((done, total, by_source))

    for report in (wants, lambda done, total: told.append((done, total)), lambda *at: told.append(at)):
        tell = by_source(report)
        assert tell is not None
        tell(3, 9, by_source=came)
    assert told == [(3, 9, came), (3, 9), (3, 9)]
    assert by_source(None) is None
    tell = by_source(max)  # whose parameters nobody can know
    assert tell is not None
    tell(3, 9, by_source=came)


def test_a_bar_has_a_line_for_each_of_several_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    with bar(force=True, what="a fork") as report:
        tell = by_source(report)
        assert tell is not None
        tell(3_000_000, 9_000_000, by_source={"http://10.0.0.7:70001": 3_000_000})
    assert "http" not in capsys.readouterr().err
    with bar(force=True, what="a fork") as report:
        tell = by_source(report)
        assert tell is not None
        tell(3_000_000, 9_000_000, by_source={"http://10.0.0.7:70001": 2_000_000, "files": 1_000_000})
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in capsys.readouterr().err.splitlines()]
    for name, nbytes in (("a fork", "3.0"), ("  http://10.0.0.7:70001", "2.0"), ("  files", "1.0")):
        assert any(line.startswith(name) and f" {nbytes}/9.0 MB" in line for line in lines), name


def test_a_narrow_bar_tells_of_all_sources_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    with bar(force=True) as report:
        tell = by_source(report)
        assert tell is not None
        tell(3_000_000, 9_000_000, by_source={"http://a:1": 2_000_000, "files": 1_000_000})
    said = capsys.readouterr().err
    assert "3.0/9.0 MB" in said
    assert "2.0" not in said
