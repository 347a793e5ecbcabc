"""Weights of a real device over TCP: right bytes, few regions, copies alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from support.checkpoints import Written
from support.device import MIB, NO_DEVICE, assert_right, call
from support.tensors import crc
from tensorlift import loading
from tensorlift.bench.cases import Spec, write_shards
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.offering import named_tensors, offer
from tensorlift.forking.remote import url_of
from tensorlift.forking.seed import Seed

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)

KEY = ModelKey(model="org/model")


def like(weights: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
        for name, one in weights.items()
    }


@pytest.mark.parametrize(("there", "here"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_right_bytes(checkpoint: Written, there: str, here: str) -> None:
    theirs = loading.load(checkpoint.path, device=there)
    ours = like(theirs, here)
    with Seed(theirs, KEY) as seed:
        fork_into(ours, seed.url, patience=60.0, chunk_bytes=1 << 20)
    for name, tensor in theirs.items():
        flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(ours[name].cpu().contiguous().view(-1).view(torch.uint8), flat), name


@pytest.mark.parametrize("there", ["cuda", "cpu"])
def test_a_seed_as_the_source_of_a_load(checkpoint: Written, there: str) -> None:
    with Seed(loading.load(checkpoint.path, device=there), ModelKey(model="m", processed=False)) as seed:
        url = url_of(seed.url, "m")
        assert_right(loading.load(url, device="cuda"), checkpoint.tensors)
        with loading.open(url, device="cuda", buffer_size="64KiB") as weights:
            assert_right(dict(weights), checkpoint.tensors)
        # In place, and one through a copy.
        model = like(loading.load(checkpoint.path, device="cuda"), "cuda")
        wide = next(name for name, (code, _, _) in checkpoint.tensors.items() if code == "I16")
        model[wide] = model[wide].int()
        loading.load_into(model, url)
        model[wide] = model[wide].short()
        assert_right(model, checkpoint.tensors)


def fork_here(url: str, digests: str) -> tuple[str, dict[str, int]]:
    """Of a process of its own: how the weights came to its device, and a sum of the bytes of each."""
    ours = {
        one.name: torch.empty_strided(one.shape, one.stride, dtype=getattr(torch, one.dtype), device="cuda")
        for one in SeedClient(url).manifest().tensors
    }
    result = fork_into(ours, url, patience=60.0, chunk_bytes=3 << 20, digests=digests)
    return result.transports[url], {name: crc(one) for name, one in ours.items()}


@pytest.mark.parametrize("digests", ["full", "off"])
def test_cuda_ipc(digests: str) -> None:
    torch.manual_seed(1)
    theirs = {f"t{k}": torch.rand(k * MIB + 5, device="cuda") for k in range(8)}
    with Seed(theirs, KEY) as seed:
        transport, found = call(fork_here, seed.url, digests)
    assert transport == "shm (CUDA IPC)"
    assert found == {name: crc(one) for name, one in theirs.items()}


def fork_mixed_here(url: str, transport: str) -> tuple[str, dict[str, int]]:
    """Of a process of its own: as fork_here(), numbers on the CPU and weights on its device."""
    ours = {
        one.name: torch.empty(one.shape, device="cpu" if one.name == "numbers" else "cuda")
        for one in SeedClient(url).manifest().tensors
    }
    result = fork_into(ours, url, patience=60.0, transports=[transport])
    return result.transports[url], {name: crc(one) for name, one in ours.items()}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_seed_of_both_memories(transport: str) -> None:
    """As an engine's is: weights on its device, and numbers of its own beside them."""
    torch.manual_seed(1)
    theirs = {"numbers": torch.rand(1000), "weights": torch.rand(3 * MIB + 5, device="cuda")}
    with Seed(theirs, KEY) as seed:
        how, found = call(fork_mixed_here, seed.url, transport)
    assert how.startswith(transport)
    assert found == {name: crc(one) for name, one in theirs.items()}


def expandable() -> int:
    """Of a process of its own: regions of tensors that lie in expandable segments; -1 for wrong bytes."""
    torch.manual_seed(1)
    theirs = {f"t{k}": torch.rand(3 * MIB, device="cuda") for k in range(12)}
    ours = like(theirs, "cuda")
    with Seed(theirs, KEY) as seed:
        fork_into(ours, seed.url, patience=60.0)
        count = len(seed._offering.regions)
    return count if all(torch.equal(ours[name], theirs[name]) for name in theirs) else -1


def test_expandable_segments() -> None:
    found = call(expandable, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert 1 <= found <= 12


def test_at_most_one_region_an_arena(tmp_path: Path) -> None:
    specs = [[Spec(f"t{s}.{k}", "BF16", (64, 512)) for k in range(700)] for s in range(2)]
    case = write_shards(tmp_path / "many", specs)
    weights = loading.load(case.folder, device="cuda", arena_size="16MiB")
    arenas = -(-sum(one.nbytes for one in weights.values()) // (16 * MIB)) + 1
    assert len(offer(named_tensors(weights)).regions) <= arenas


def test_nothing_but_copies_runs_on_the_seed() -> None:
    """What a fork of host memory has the device do while its owner does nothing."""
    theirs = {f"t{k}": torch.rand(8 * MIB, device="cuda") for k in range(4)}
    ours = like(theirs, "cpu")
    cuda = [ProfilerActivity.CUDA]
    with Seed(theirs, KEY) as seed, profile(activities=cuda, acc_events=True) as seen:
        fork_into(ours, seed.url, patience=60.0)
    work = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert work
    assert {name for name in work if not name.startswith("Memcpy DtoH")} == set()
    assert all(torch.equal(ours[name], theirs[name].cpu()) for name in theirs)
