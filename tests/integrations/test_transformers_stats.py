"""What from_pretrained by tensorlift says was loaded, where a model is made of several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from support import models
from tensorlift.integrations.transformers import from_pretrained

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
