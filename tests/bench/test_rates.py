"""Ceilings: which are measured, and which of them bounds a load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorlift.bench import rates
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.rates import Rate
from tensorlift.engine.sizing import size_engine
from tensorlift.errors import MachineError
from tensorlift.options import LoadOptions

CACHE = [Rate("1", "cache", 1, [3.0, 4.0]), Rate("2", "cache", 2, [8.0])]
DIRECT = Rate("direct", "direct", 32, [1.0, 2.0])


@pytest.mark.parametrize(
    ("found", "cached", "ceiling"),
    [
        ([*CACHE, DIRECT], 1.0, 8.0),
        ([*CACHE, DIRECT], 0.0, 2.0),
        # Half of 16 bytes from each: 1 s and 4 s.
        ([*CACHE, DIRECT], 0.5, 16 / 5),
        ([*CACHE, DIRECT, Rate("link", "link", 0, [5.0])], 1.0, 5.0),
        ([*CACHE, DIRECT, Rate("link", "link", 0, [5.0])], 0.0, 2.0),
        ([*CACHE, Rate("direct", "direct", refused="EINVAL")], 0.0, 0.0),
        ([*CACHE, Rate("direct", "direct", refused="EINVAL")], 1.0, 8.0),
        ([], 1.0, 0.0),
    ],
)
def test_ceiling_follows_the_cache_and_the_link(found: list[Rate], cached: float, ceiling: float) -> None:
    assert rates.ceiling_for(found, cached) == pytest.approx(ceiling)


def test_all_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(range(256)) * (1 << 15))
    size = size_engine(LoadOptions.resolve(), 8 << 20, device=True)
    with Ceilings() as ceilings:
        found = rates.measure(ceilings, [file], size, lambda: 7.0)
    assert found[0].kind == "memory"
    assert [rate.kind for rate in found][-2:] == ["direct", "link"]
    assert found[-1].rate == 7.0
    threads = [rate.threads for rate in found if rate.kind == "cache"]
    assert threads[0] == 1
    assert threads == sorted(set(threads))
    assert all(rate.rate > 0 or rate.refused for rate in found)


def test_refused_one_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(8192))
    size = size_engine(LoadOptions.resolve(), 8192, device=False)
    with Ceilings() as ceilings:
        read = ceilings.read_seconds

        def no_direct(*args: object, **kwargs: object) -> float:
            if kwargs["how"] == "direct":
                raise MachineError("open: data: Invalid argument")
            return read(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(ceilings, "read_seconds", no_direct)
        found = rates.measure(ceilings, [file], size, None)
    assert found[-1].record()["refused"] == "open: data: Invalid argument"
    assert found[-1].record()["median"] is None
    assert found[-1].kind == "direct"
