"""What a model offers: all of its tensors, where they are, few regions, and refusals that name the tensor."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensorlift
from support.checkpoints import random_row, write_safetensors
from support.tensors import raw
from tensorlift.errors import RequestError
from tensorlift.forking import offering
from tensorlift.forking.manifest import Manifest, ModelKey, decode, encode, layout_digest
from tensorlift.forking.offering import Named, Offering, blocks_of, named_tensors, offer


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("rope", torch.arange(12.0).reshape(3, 4), persistent=False)
        self.both = torch.nn.Parameter(torch.rand(6, 4))
        self.scale = torch.rand(3)  # as an engine leaves it
        self.transposed = self.both.detach().t()
        self.kv_cache = torch.zeros(1000)
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The same over a storage of so many bytes: sharding frees parameters so, and keeps their shape."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def read(offering: Offering, at: int) -> bytes:
    """A tensor's bytes in the order of its elements, out of the region."""
    tensor = offering.tensors[at]
    if tensor.region < 0:
        return b""
    region = (ctypes.c_char * offering.regions[tensor.region].nbytes).from_address(
        offering.memories[tensor.region].address
    )
    whole = torch.frombuffer(bytearray(region.raw), dtype=torch.uint8)[tensor.offset :]
    dtype = getattr(torch, tensor.dtype)
    flat = whole[: len(whole) // dtype.itemsize * dtype.itemsize].clone().view(dtype)
    return raw(torch.as_strided(flat, tensor.shape, tensor.stride).contiguous())


def test_a_model() -> None:
    model = Model()
    named = named_tensors(model)
    offering = offer(named)
    kinds = {tensor.name: tensor.kind for tensor in offering.tensors}
    assert kinds == {
        "embed.weight": "parameter", "head.weight": "parameter", "norm.weight": "parameter",
        "norm.bias": "parameter", "both": "parameter", "nothing": "parameter", "norm.running_mean": "buffer",
        "norm.running_var": "buffer", "norm.num_batches_tracked": "buffer", "rope": "buffer",
        "scale": "derived", "transposed": "derived",
    }  # fmt: skip
    for at, one in enumerate(named):
        assert read(offering, at) == raw(one.tensor.contiguous()), one.name
    found = {tensor.name: tensor for tensor in offering.tensors}
    assert found["head.weight"].alias == "embed.weight"
    assert found["transposed"].alias is None
    assert (found["transposed"].region, found["transposed"].stride) == (found["both"].region, (1, 4))
    assert found["nothing"].region == -1
    storages = {one.tensor.untyped_storage().data_ptr() for one in named if one.tensor.numel()}
    assert len(offering.regions) == len(storages)
    manifest = Manifest(
        instance="0" * 32, epoch=0, key=ModelKey(model="m"), layout=layout_digest(offering.tensors),
        regions=offering.regions, tensors=offering.tensors,
    )  # fmt: skip
    assert decode(encode(manifest), "seed") == manifest


def test_a_loaded_checkpoint(tmp_path: Any) -> None:
    """Storages are of single tensors there, so a region is one as well: on a device blocks decide."""
    rows = {f"t{k}": random_row("BF16", [7, 3], k) for k in range(20)}
    state = tensorlift.load(write_safetensors(tmp_path / "model.safetensors", rows))
    named = named_tensors(state)
    offering = offer(named)
    assert [read(offering, at) for at in range(20)] == [raw(one.tensor) for one in named]


def test_views_of_one_storage_are_one_region() -> None:
    whole = torch.arange(100, dtype=torch.int32)
    offering = offer(named_tensors({"a": whole[10:20], "b": whole[40:60].view(4, 5), "c": whole[15:18]}))
    assert [region.nbytes for region in offering.regions] == [50 * 4]
    assert [(tensor.region, tensor.offset) for tensor in offering.tensors] == [(0, 0), (0, 120), (0, 20)]


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.rand(3).as_subclass(Wrapped), "'x' is a Wrapped, whose bytes are known to it alone"),
        (
            torch.empty(3, device="meta"),
            "'x' is on the meta device and has no memory; load the weights first, or, to fork into it,",
        ),
        (torch.eye(3).to_sparse(), "'x' has layout torch.sparse_coo"),
        (torch._neg_view(torch.rand(3)), "'x' is negated or conjugated by a flag"),
        (torch.rand(3, dtype=torch.complex64).conj(), "'x' is negated or conjugated by a flag"),
        (resized(torch.rand(3), 0), "'x' has shape [3], which takes 12 bytes, and its storage has 0: it was"),
        (resized(torch.rand(4)[1:], 15), "'x' has shape [3], which takes 12 bytes, and its storage has 15"),
    ],
)
def test_what_cannot_be_offered_is_named(tensor: torch.Tensor, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        offer([Named("good", torch.rand(2), "parameter"), Named("x", tensor, "parameter")])
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("model", [5, {"a": 1}, {1: torch.rand(1)}, {}, torch.nn.Identity(), [torch.rand(1)]])
def test_what_is_no_model(model: object) -> None:
    with pytest.raises(RequestError, match=r"seed and fork take a torch.nn.Module or a dict|has no tensors"):
        named_tensors(model)


def test_blocks_of_a_snapshot() -> None:
    def segment(address: int, device: int, *blocks: tuple[int, str]) -> dict[str, Any]:
        made, at = [], address
        for size, state in blocks:
            made.append({"address": at, "size": size, "state": state})
            at += size
        return {"address": address, "device": device, "blocks": made, "is_expandable": False}

    active, free, pending = "active_allocated", "inactive", "active_pending_free"
    snapshot = [
        segment(5000, 0, (10, active), (20, free), (30, active)),
        segment(1000, 0, (100, active), (50, pending), (7, active)),
        segment(3000, 1, (9, active)),
    ]
    found = blocks_of(snapshot, 0)
    assert found.extents.starts.tolist() == [1000, 1150, 5000, 5030]
    assert found.extents.stops.tolist() == [1100, 1157, 5010, 5060]
    assert found.segments.tolist() == [1000, 1000, 5000, 5000]
    assert len(blocks_of([], 0).segments) == 0


def test_where_the_first_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "pci_address", lambda index: f"0000:0{index}:00.0")
    devices = [torch.device("cpu"), torch.device("cuda:3"), torch.device("cuda:1")]
    found: list[Any] = [SimpleNamespace(tensor=SimpleNamespace(device=device)) for device in devices]
    assert offering.gpu_of(found) == "0000:03:00.0"
    assert offering.gpu_of(found[:1]) is None
