"""What from_pretrained by tensorlift says was loaded, where a model is made of several checkpoints."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from support import leaks, models
from tensorlift.integrations import lazy
from tensorlift.integrations.prefetch import Prefetch
from tensorlift.integrations.transformers import from_pretrained
from tensorlift.options import LoadOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_a_model_of_two_checkpoints_has_the_record_of_both(tmp_path: Path) -> None:
    """As one in an adapter's folder is."""
    base, more = (models.saved(kind, tmp_path / kind) for kind in ("llama", "tied"))

    class Adapted:
        @classmethod
        def from_pretrained(cls, path: Path, **kwargs: Any) -> Any:
            model = models.auto("llama").from_pretrained(path, **kwargs)
            model.tensorlift_stats = models.auto("tied").from_pretrained(more).tensorlift_stats
            return model

    stats = from_pretrained(Adapted, base, device="cpu").tensorlift_stats
    assert stats.bytes == models.data_bytes(base) + models.data_bytes(more)


def test_threads_that_ask_for_their_first_tensors_at_once_share_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = models.saved("encoder", tmp_path) / "model.safetensors"

    class Slow(Prefetch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            time.sleep(0.1)  # others come in between

    monkeypatch.setattr(lazy, "Prefetch", Slow)
    with leaks.nothing_left():
        session = lazy.Session([file], LoadOptions())
        source = session.file(str(file))
        assert source is not None
        found: dict[str, torch.Tensor] = {}
        threads = [
            threading.Thread(target=lambda name=name: found.update({name: source.get_tensor(name)}))
            for name in source.keys()[:8]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        session.close()
        assert session.stats().tensors == len(found) == 8
        assert session.stats().bytes == sum(tensor.nbytes for tensor in found.values())
        found.clear()
