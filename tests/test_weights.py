"""What open() gives, apart from the pass over it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from support.checkpoints import random_checkpoint, random_row, write_safetensors
from tensorlift import loading
from tensorlift.errors import RequestError


def test_what_is_printed_of_weights(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path, tensors=4)
    with loading.open(tmp_path) as weights:
        name = f"<Weights of '{tmp_path}': {len(written.tensors)} tensors for cpu, "
        assert repr(weights) == name + "open>"
        next(iter(weights))
        assert repr(weights) == name + "iterated over>"
    assert repr(weights) == name + "closed>"


def test_a_consumer_learns_that_another_thread_closed_between_its_steps(tmp_path: Path) -> None:
    rows = {f"t{k}": random_row("U8", [1 << 20]) for k in range(9)}
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    with loading.open(path, arena_size="1MiB", buffer_size="2MiB") as weights:
        steps = iter(weights)
        next(steps)
        thread = threading.Thread(target=weights.close)
        thread.start()
        thread.join(60)
        # Not as if the checkpoint had no more.
        with pytest.raises(RequestError, match="closed"):
            list(steps)
