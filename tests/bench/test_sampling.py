"""The checksum is the same for a file and a tensor, and finds what differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.checkpoints import random_checkpoint
from tensorlift import load, sources
from tensorlift.bench import sampling


def test_names_are_spread_with_both_ends() -> None:
    names = [f"t{i}" for i in range(1000)]
    sample = sampling.sample_names(names)
    assert len(set(sample)) == 64
    assert (sample[0], sample[-1]) == ("t0", "t999")
    assert sampling.sample_names(names[:3]) == ["t0", "t1", "t2"]


def test_set_of_names_has_no_order() -> None:
    assert sampling.digest_of_names(["a", "b"]) == sampling.digest_of_names(["b", "a"])
    assert sampling.digest_of_names(["a", "b"]) != sampling.digest_of_names(["a", "c"])


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 300_000, 5_000_000])
def test_array_and_tensor_agree(nbytes: int) -> None:
    raw = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    assert sampling.checksum(raw) == sampling.checksum(torch.from_numpy(raw))


@pytest.mark.parametrize("place", [0, 4095, 299_999])
def test_small_tensors_and_both_ends_are_seen_whole(place: int) -> None:
    raw = np.zeros(300_000 if place else 1, np.uint8)
    before = sampling.checksum(raw)
    raw[place] = 1
    assert sampling.checksum(raw) != before


def test_exchange_of_two_blocks_is_seen() -> None:
    raw = np.random.default_rng(1).integers(0, 256, 4 << 20, dtype=np.uint8)
    other = raw.copy()
    other[1 << 20 : (1 << 20) + 4096], other[2 << 20 : (2 << 20) + 4096] = (
        raw[2 << 20 : (2 << 20) + 4096],
        raw[1 << 20 : (1 << 20) + 4096],
    )
    assert sampling.checksum(raw) != sampling.checksum(other)


def test_file_and_load_agree_for_every_dtype(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path, tensors=40, seed=9)
    checkpoint = sources.read_headers(sources.find(tmp_path))
    names = list(written.tensors)
    facts = sampling.tensor_facts(load(tmp_path, device="cpu"), [*names, "not.there"])
    assert {name: fact["checksum"] for name, fact in facts.items()} == sampling.file_checksums(
        checkpoint, names
    )
