"""The bare loops read what they are given, and the page cache gets into the state that was asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorlift.bench.ceilings import Ceilings, drop_cache, fill_cache
from tensorlift.errors import MachineError

SIZE = (8 << 20) + 12_345


@pytest.fixture(scope="module")
def ceilings() -> Iterator[Ceilings]:
    with Ceilings() as built:
        yield built


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.mark.parametrize("memory", ["prepared", "fresh"])
@pytest.mark.parametrize("how", ["buffered", "direct"])
def test_loops_run(ceilings: Ceilings, file: Path, memory: str, how: str) -> None:
    if how == "direct":
        try:
            os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            pytest.skip("the file system of the temporary folder refuses O_DIRECT")
    assert ceilings.read_seconds([file, file], memory=memory, how=how, threads=2, chunk_bytes=1 << 20) > 0


def test_file_that_is_not_there_is_named(ceilings: Ceilings, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="nothing-here"):
        ceilings.read_seconds(
            [tmp_path / "nothing-here"], memory="fresh", how="buffered", threads=1, chunk_bytes=4096
        )


def test_cache_is_filled_dropped_and_halved(ceilings: Ceilings, file: Path) -> None:
    fill_cache([file])
    assert ceilings.cached_share([file]) == 1
    drop_cache([file])
    if ceilings.cached_share([file]) == 1:
        pytest.skip("the temporary folder lies in memory (tmpfs): nothing can be dropped")
    assert ceilings.cached_share([file]) == 0
    fill_cache([file], 0.5)
    drop_cache([file], 0.5)
    assert ceilings.cached_share([file]) == pytest.approx(4 * (1 << 20) / SIZE, abs=0.001)


def test_cache_is_brought_again_only_where_it_changed(
    ceilings: Ceilings, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_cache([file])
    if ceilings.cached_share([file]) == 1:
        pytest.skip("the temporary folder lies in memory (tmpfs): nothing can be dropped")
    assert ceilings.keep([file], 1.0) == 1, "what is not as wanted is brought"
    monkeypatch.setattr(ceilings, "bring", lambda *_: pytest.fail("it was as wanted"))
    assert ceilings.keep([file], 1.0) == 1
