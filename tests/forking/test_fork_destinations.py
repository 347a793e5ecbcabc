"""Forks into memory that is not as forks want it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorlift.errors import RequestError
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed
from tensorlift.forking.sglang_protocol import fork_from_sglang

KEY = ModelKey(model="org/model")


def read_only(folder: Path, count: int) -> torch.Tensor:
    (folder / "there").write_bytes(bytes(4 * count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it should not be written to
        return torch.from_numpy(np.memmap(folder / "there", np.float32, "r"))


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
def test_memory_that_cannot_be_written_is_not_the_seeds_fault(tmp_path: Path, transport: str) -> None:
    theirs = {"a": torch.ones(10), "b": torch.ones(5000)}
    into = {"a": torch.zeros(10), "b": read_only(tmp_path, 5000)}
    said = r"the memory of 'b' cannot be written: .* Fork into a copy"
    with Seed(theirs, KEY, transports=[transport]) as seed, pytest.raises(RequestError, match=said):
        fork_into(into, seed.url, transports=[transport], fallback="never looked at")
    assert not into["a"].any()


def test_before_sglang_is_asked(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the memory of 'b' cannot be written"):
        fork_from_sglang({"b": read_only(tmp_path, 8)}, "sglang+http://127.0.0.1:9")


@pytest.mark.parametrize("strides", [(2, 1), (0, 1), (3, 2)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_elements_that_share_a_place_do_so_on_both_sides(strides: tuple[int, int], transport: str) -> None:
    values = torch.arange(20.0)
    into = torch.zeros(20).as_strided((3, 4), strides)
    with Seed({"a": values.as_strided((3, 4), strides)}, KEY) as seed:
        fork_into({"a": into}, seed.url, transports=[transport])
    assert torch.equal(into, values.as_strided((3, 4), strides))


@pytest.mark.filterwarnings("ignore")  # torch's own, about what is a prototype
def test_nested_tensors_are_refused_on_both_sides() -> None:
    nested = {"a": torch.nested.nested_tensor([torch.zeros(4), torch.zeros(4)])}
    with pytest.raises(RequestError, match="'a' is nested"):
        Seed(nested, KEY)
    with pytest.raises(RequestError, match="'a' is nested"):
        fork_into(nested, "http://127.0.0.1:9")
