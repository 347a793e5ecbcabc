"""A load of transformers: threads of a pool that read at once, and what it leaves behind where it fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from support import models
from support.checkpoints import random_row, write_safetensors
from tensorlift.errors import DigestError
from tensorlift.integrations import lazy
from tensorlift.integrations import transformers as ours
from tensorlift.integrations.prefetch import Prefetch
from tensorlift.integrations.transformers import from_pretrained
from tensorlift.options import LoadOptions

# Those of transformers about itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_without_the_function_that_says_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another transformers: each tensor is read when it is asked for, by the threads of a pool."""
    found = [swap for swap in ours._find() if swap.name != "spawn_materialize"]
    monkeypatch.setattr(ours, "_find", lambda: found)
    made: list[Prefetch] = []

    def slowly(*given: Any) -> Prefetch:
        made.append(Prefetch(*given))
        time.sleep(0.05)  # the other threads of the pool are here by now
        return made[-1]

    monkeypatch.setattr(lazy, "Prefetch", slowly)
    for kind in ("llama", "experts"):
        folder = models.saved(kind, tmp_path / kind, shards=True)
        mine = from_pretrained(models.auto(kind), folder)
        models.assert_equal(mine, models.auto(kind).from_pretrained(folder))
        assert mine.tensorlift_stats.bytes == models.data_bytes(folder)
    assert len(made) == 2  # one a load


def test_where_digests_are_missing_no_bar_was_begun(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [64])})
    threads = threading.active_count()
    with pytest.raises(DigestError) as caught:
        lazy.Session([path], LoadOptions.resolve(verify=True, progress=True))
    assert threading.active_count() == threads, caught  # a bar has one, and what holds the error holds it
