"""What owns memory: arenas, or each tensor a block of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import Written, random_checkpoint
from support.tensors import assert_state, assert_tensor
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.errors import OptionError


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path / "checkpoint", shards=3, tensors=60, elements=20_000, seed=1)


def test_each_tensor_a_block_of_its_own(written: Written) -> None:
    before = abi.library().arena_live()
    state = loading.load(written.path, own="tensor")
    assert_state(state, written.tensors, ordered=False)
    blocks = sum(tensor.numel() > 0 for tensor in state.values())
    assert state.stats.arenas == abi.library().arena_live() - before == blocks
    with loading.open(written.path, own="tensor") as weights:
        for name, tensor in weights:
            assert_tensor(tensor, written.tensors[name], name)


def test_what_owns_memory_is_a_word(written: Written) -> None:
    with pytest.raises(OptionError, match="own is 'block'; expected one of 'arena', 'tensor'"):
        loading.load(written.path, own="block")
