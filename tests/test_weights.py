"""What open() gives, apart from the pass over it."""

from __future__ import annotations

from pathlib import Path

from support.checkpoints import random_checkpoint
from tensorlift import loading


def test_what_is_printed_of_weights(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path, tensors=4)
    with loading.open(tmp_path) as weights:
        name = f"<Weights of '{tmp_path}': {len(written.tensors)} tensors for cpu, "
        assert repr(weights) == name + "open>"
        next(iter(weights))
        assert repr(weights) == name + "iterated over>"
    assert repr(weights) == name + "closed>"
