"""Progress: the caller's function, a bar on stderr, or nothing."""

from __future__ import annotations

import pytest

from tensorlift.progress import bar, reporter


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
