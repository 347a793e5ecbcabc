"""docs/prediction.md against the model: every figure of its tables is computed again."""

from __future__ import annotations

import re

import pytest

import prediction_page
import ranks_rows
from ranks_rows import Row
from tensorlift.plan.prediction import DEFAULT_RATES, Rates, Work, predict

TEXT = prediction_page.PAGE.read_text(encoding="utf-8")


def test_the_page_agrees_with_the_model() -> None:
    assert prediction_page.page(TEXT) == TEXT
    assert sorted(re.findall(r"<!-- table: (.*) -->", TEXT)) == sorted(prediction_page.TABLES)


@pytest.mark.parametrize("row", ranks_rows.EXPLAINED, ids=lambda row: row.what)
def test_what_is_said_to_be_explained_is(row: Row) -> None:
    assert 0.7 <= prediction_page.ratio(row) <= 1.2


@pytest.mark.parametrize("row", ranks_rows.UNEXPLAINED, ids=lambda row: row.what)
def test_what_is_not_explained_is_slower_than_the_hardware(row: Row) -> None:
    # All but a load of 4 KiB, whose start is shorter than that of large ones.
    assert prediction_page.ratio(row) < 0.9 or row.work.nbytes == 4096
    assert row.why


@pytest.mark.parametrize(("mib", "rate"), ranks_rows.GATHERS)
def test_one_rate_fits_gathers_of_all_sizes(mib: int, rate: float) -> None:
    assert prediction_page.gather_seconds(mib) / (mib * 2**20 / rate / 1e9) == pytest.approx(1, abs=0.2)


def test_every_assumed_figure_has_a_source() -> None:
    assert {f"`{name}`" for name in DEFAULT_RATES} < set(prediction_page._SOURCES)


def test_a_gather_pays_from_the_break_even_on() -> None:
    nbytes = prediction_page.break_even(8, 1.0, 50e9)
    for size, way in ((nbytes, "gather"), (nbytes - 2 * 10**8, "all")):
        ways = predict(Work(size, 8, cached=1.0), Rates())
        assert min(ways, key=lambda name: ways[name].seconds) == way


def test_figures_in_the_text_are_those_of_the_model() -> None:
    everyone, hosts, alone = (
        predict(scale.work, scale.rates)[scale.way].from_storage
        for scale in ranks_rows.SCALES
        if scale.work.ranks == 1000
    )
    seconds = prediction_page.WANTED_SECONDS
    assert f"{everyone / seconds / 1e9:.0f} GB/s are enough for {seconds} s" in TEXT
    assert f"{hosts / seconds / 1e12:.1f} TB/s at 125" in TEXT
    assert f"{alone / seconds / 1e12:.0f} TB/s" in TEXT
    arenas = -(-ranks_rows.R1 // Work(1).arena)
    assert f"{arenas:,} arenas" in TEXT
    assert f"{arenas * 5e-3:.0f} s for the" in TEXT


def test_a_page_that_drifted_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path_factory.mktemp("page") / "prediction.md"
    page.write_text(TEXT.replace("| gather | 14.4 | 15.3 |", "| gather | 15.3 | 15.3 |"), encoding="utf-8")
    monkeypatch.setattr(prediction_page, "PAGE", page)
    assert prediction_page.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert prediction_page.main([]) == 0
    assert page.read_text(encoding="utf-8") == TEXT
    assert prediction_page.main(["--check"]) == 0
