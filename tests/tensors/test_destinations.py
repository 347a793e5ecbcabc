"""What is done with destinations: in place, by a copy, or in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.checkpoints import random_row, write_safetensors
from tensorlift import sources
from tensorlift.errors import MismatchError, RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.tensors import destinations
from tensorlift.tensors.destinations import Destinations, Match, Target


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    rows = {name: random_row("F32", [2, 4]) for name in "abcdef"}
    return sources.read_headers(sources.find(write_safetensors(tmp_path / "m.safetensors", rows)))


def matched(tensors: dict[str, torch.Tensor], checkpoint: Checkpoint) -> Match:
    return destinations.match(Destinations(tensors), checkpoint, range(len(checkpoint)), lambda name: True)


def names(targets: list[Target]) -> str:
    return "".join(target.name for target in targets)


def test_each_destination_once(checkpoint: Checkpoint) -> None:
    whole, tied = torch.zeros(3, 4), torch.nn.Parameter(torch.zeros(2, 4))
    found = matched(
        {
            "f": tied,
            "a": torch.zeros(2, 4),
            "b": torch.zeros(2, 4, dtype=torch.float16),
            "c": whole[:2],
            "d": whole[1:],
            "e": tied,
            "g": tied,
            "h": torch.zeros(1),
        },
        checkpoint,
    )
    assert (names(found.direct), names(found.copied), names(found.ordered)) == ("ae", "b", "cd")
    assert (found.missing, found.unexpected) == (["h"], [])
    assert [target.address for target in found.direct[1:]] == [tied.data_ptr()]


def test_names_that_the_model_lacks_in_the_order_of_the_checkpoint(checkpoint: Checkpoint) -> None:
    assert "".join(matched({"c": torch.zeros(2, 4)}, checkpoint).unexpected) == "abdef"


def test_two_four_bit_elements_are_one_of_torch(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a": random_row("F4", [2, 4])})
    checkpoint = sources.read_headers(sources.find(path))
    found = matched({"a": torch.zeros(2, 2, dtype=torch.float4_e2m1fn_x2)}, checkpoint)
    assert names(found.direct) == "a"
    with pytest.raises(MismatchError, match=r"'a': \[2, 2\] in .*, \[2, 4\] in the model"):
        matched({"a": torch.zeros(2, 4, dtype=torch.float4_e2m1fn_x2)}, checkpoint)


def test_equal_addresses_on_two_devices_do_not_cross(checkpoint: Checkpoint) -> None:
    tensor = torch.zeros(2, 4)
    places = [("cpu", 96), ("cuda:0", 96), ("cuda:1", 100), ("cpu", 128), ("cuda:1", 90)]
    targets = [
        Target(str(row), tensor, row, torch.device(device), True, True, address)
        for row, (device, address) in enumerate(places)
    ]
    crossing = destinations._crossing(targets, checkpoint)
    assert np.flatnonzero(crossing).tolist() == [2, 4]


class Mine(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Mine])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("strides", [(2, 1), (1, 1), (0, 1), (6, 2), (1, 0)])
def test_elements_that_share_a_place_are_refused(
    checkpoint: Checkpoint, strides: tuple[int, int], dtype: torch.dtype, kind: type[torch.Tensor]
) -> None:
    """Those beside overwrote each other in silence."""
    one = torch.zeros(40, dtype=dtype).as_strided((2, 4), strides)
    one = torch.nn.Parameter(one) if kind is torch.nn.Parameter else one.as_subclass(kind)
    with pytest.raises(RequestError, match=r"'b' has shape \[2, 4\] and strides .* share one place"):
        matched({"a": torch.zeros(2, 4), "b": one}, checkpoint)


@pytest.mark.parametrize("strides", [(1, 2), (2, 5), (5, 3), (4, 1), (100, 7)])
def test_strides_that_only_seem_to_overlap_are_filled(
    checkpoint: Checkpoint, strides: tuple[int, int]
) -> None:
    one = torch.zeros(200).as_strided((2, 4), strides)
    found = matched({"a": one}, checkpoint)
    assert names(found.targets) == "a"


@pytest.mark.filterwarnings("ignore")  # torch's own, about what is a prototype
def test_a_nested_tensor_is_refused(checkpoint: Checkpoint) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(4), torch.zeros(4)])
    with pytest.raises(RequestError, match="'a' is nested; load_into fills strided tensors only"):
        matched({"a": nested}, checkpoint)


@pytest.mark.parametrize("inference", [False, True])
def test_negated_views_are_copied_into(checkpoint: Checkpoint, inference: bool) -> None:
    with torch.inference_mode(inference):
        negated = torch.zeros(2, 4, dtype=torch.complex64).conj().imag
        negated = torch._neg_view(torch.zeros(2, 4)) if inference else negated
    assert negated.is_neg()
    for one in (negated, negated.detach(), torch.nn.Parameter(negated.detach(), requires_grad=False)):
        found = matched({"a": one, "b": torch.zeros(2, 4)}, checkpoint)
        assert (names(found.direct), names(found.copied)) == ("b", "a")


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it will have no longer
def test_what_is_not_ordinary_does_not_change_the_others(checkpoint: Checkpoint) -> None:
    class Mine(torch.Tensor):
        pass

    ordinary = {name: torch.nn.Parameter(torch.zeros(2, 4)) for name in "abc"}
    odd = {
        "subclass": torch.zeros(2, 4).as_subclass(Mine),
        "quantised": torch.quantize_per_tensor(torch.zeros(2, 4), 0.1, 0, torch.quint8),
        "dtype": torch.zeros(2, 4).double(),
        "strides": torch.zeros(4, 2).T,
        "flag": torch._neg_view(torch.zeros(2, 4)),
        "complex flag": torch.zeros(2, 4, dtype=torch.complex64).conj(),
    }
    for what, tensor in odd.items():
        found = matched({**ordinary, "d": tensor}, checkpoint)
        assert (names(found.direct), names(found.copied)) == ("abc", "d"), what
    found = matched({**ordinary, "z": torch.zeros(2, 4).to_sparse()}, checkpoint)
    assert (names(found.direct), found.missing) == ("abc", ["z"])


def test_columns_are_made_anew_where_memory_was_replaced(checkpoint: Checkpoint) -> None:
    tensor = torch.nn.Parameter(torch.zeros(2, 4))
    given = Destinations({"a": tensor})
    assert given.now() is not given, "nothing was looked at but devices"
    assert given.columns is not None
    assert given.now() is given
    tensor.data = torch.zeros(2, 4).double()
    found = destinations.match(given, checkpoint, range(len(checkpoint)), lambda name: True)
    assert names(found.copied) == "a"
