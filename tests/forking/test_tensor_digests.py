"""Digests of whole tensors: known, made, made again behind an update, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tensorlift.engine.abi_fork import tensor_digest
from tensorlift.errors import ForkError, OptionError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import Manifest
from tensorlift.forking.seed import Seed

pytestmark = pytest.mark.usefixtures("clean")


def weights(version: int) -> dict[str, torch.Tensor]:
    whole = torch.arange(600.0) + version
    return {
        "a": whole[:200],
        "b": whole[200:400].reshape(10, 20).t(),
        "holes": whole[400:].reshape(10, 20)[:, ::3],
        "empty": whole[:0],
    }


def digest(tensor: torch.Tensor) -> str:
    return tensor_digest(tensor.data_ptr(), tensor.numel() * tensor.element_size()).hex()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_made_and_made_again() -> None:
    offered = weights(1)
    with Seed(offered, "m", digests=True) as seed:
        client, found = SeedClient(seed.url), weights(0)
        assert client.manifest().digests == {name: digest(offered[name]) for name in ("a", "b")}
        fork_into(found, seed.url)
        assert same(found, offered)
        with seed.updating(timeout=0):
            assert client.manifest().digests == {}
            offered["a"].fill_(7)
        assert client.manifest().digests == {name: digest(offered[name]) for name in ("a", "b")}
        fork_into(found, seed.url)
        assert same(found, offered)


def test_known_ones_are_those_of_one_epoch() -> None:
    offered = weights(1)
    with Seed(offered, "m", digests={"a": digest(offered["a"])}) as seed:
        client = SeedClient(seed.url)
        assert client.manifest().digests == {"a": digest(offered["a"])}
        with seed.updating(timeout=0):
            pass
        assert client.manifest().digests == {}


def test_weights_that_were_changed_on_the_quiet(tmp_path: Path) -> None:
    offered = weights(1)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights(3).items()}, path)
    with Seed(offered, "m", digests=True) as seed:
        offered["a"].fill_(7)
        found = weights(0)
        with pytest.raises(ForkError, match=r"does not have the digests that it publishes: 1 tensor: 'a'"):
            fork_into(found, seed.url)
        fork_into(found, seed.url, digests="off")
        assert same(found, offered)
        result = fork_into(found, seed.url, fallback=path)
        assert same(found, weights(3))
        assert set(result.by_source) == {"files"}


def test_a_manifest_that_swaps_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk has its digest, and the layout is the right one; the tensors are not."""
    offered = {"a": torch.full((50,), 1.0), "b": torch.full((50,), 2.0)}
    real = SeedClient.manifest

    def manifest(client: SeedClient) -> Manifest:
        found = real(client)
        one, other = found.tensors
        tensors = (
            msgspec.structs.replace(one, region=other.region, offset=other.offset),
            msgspec.structs.replace(other, region=one.region, offset=one.offset),
        )
        return msgspec.structs.replace(found, tensors=tensors)

    monkeypatch.setattr(SeedClient, "manifest", manifest)
    with Seed(offered, "m", digests=True) as seed:
        found = {name: torch.zeros(50) for name in offered}
        with pytest.raises(ForkError, match=r"2 tensors: 'a', 'b'"):
            fork_into(found, seed.url)


@pytest.mark.parametrize(
    "given", [1, "yes", ["a"], {"z": "0" * 32}, {"a": "0" * 31}, {"a": b"0" * 32}, {"a": "G" * 32}]
)
def test_what_is_no_digest(given: Any) -> None:
    with pytest.raises(OptionError, match=r"^digests "):
        Seed(weights(1), "m", digests=given)
