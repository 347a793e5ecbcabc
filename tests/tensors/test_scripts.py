"""Loops in one call: what they make and find."""

from __future__ import annotations

import torch

from tensorlift.tensors import scripts


def test_several_blocks() -> None:
    blocks = scripts.empties([3, 1 << 20], torch.device("cpu"))
    assert [(tuple(b.shape), b.dtype) for b in blocks] == [((3,), torch.uint8), ((1 << 20,), torch.uint8)]
