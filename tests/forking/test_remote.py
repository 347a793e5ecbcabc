"""A seed as the table of a checkpoint: its URL, its key, what it has, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from support import leaks
from support.ports import nobody
from support.tensors import raw
from tensorlift.errors import ForkError, ManifestError, OptionError, OutOfMemoryError, RequestError, SeedError
from tensorlift.forking import remote
from tensorlift.forking.manifest import ModelKey, Region, Tensor, layout_digest
from tensorlift.forking.remote import SeedCheckpoint, allocated, check_options, is_seed, url_of
from tensorlift.forking.seed import Seed
from tensorlift.forking.throttle import Pacer
from tensorlift.forking.tokens import TOKEN_VARIABLE

KEY = ModelKey(model="org/a model", processed=False)


def tensors() -> dict[str, torch.Tensor]:
    plain = torch.arange(3000, dtype=torch.float32)
    return {
        "plain": plain.reshape(50, 60),
        "alias": plain.reshape(50, 60),
        "turned": torch.arange(600, dtype=torch.int16).reshape(20, 30).t(),
        "holes": torch.arange(400, dtype=torch.int64).reshape(20, 20)[:, :7],
        "expanded": torch.tensor([3.0]).expand(40),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "packed": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 3),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(True),
    }


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left(), Seed(tensors(), KEY) as made:
        yield made


def test_urls() -> None:
    assert url_of("http://[::1]:80", "org/a model?") == "tensorlift://[::1]:80/org/a%20model%3F"
    assert url_of("https://10.0.0.7:80", "m") == "tensorlift+https://10.0.0.7:80/m"
    assert is_seed("tensorlift://h:1")
    assert is_seed("tensorlift+https://h:1/m")
    assert not any(map(is_seed, ["h:1", "http://h:1", b"tensorlift://h:1", ["tensorlift://h:1"], None]))


@pytest.mark.parametrize(
    "url",
    [
        "tensorlift://", "tensorlift://host", "tensorlift://host/key", "tensorlift://host:x/", "tensorlift://:1",
        "tensorlift://host:99999", "tensorlift://user:word@host:1/key", "tensorlift://host:1/key?a=b",
        "tensorlift://host:1/key#a", "http://host:1", "tensorlift+http://host:1", "tensorlift+https://host",
        "tensorlift://[::1/key", "tensorlift://[a]:1/key", "tensorlift://a b:1",
    ],
)  # fmt: skip
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(RequestError, match=r"it looks like tensorlift://host:port/key.*TENSORLIFT_TOKEN"):
        SeedCheckpoint(url)


def test_the_table(seed: Seed) -> None:
    table = SeedCheckpoint(url_of(seed.url, "org/a model"))
    assert table.names == list(tensors())
    assert table.shapes[table.index("packed")] == (2, 6)
    assert table.shapes[table.index("turned")] == (30, 20)
    sizes = dict(zip(table.names, table.sizes.tolist(), strict=True))
    assert sizes == {name: one.numel() * one.element_size() for name, one in tensors().items()}
    assert table.metadata is None
    assert table.select(["h*"]).tolist() == [3, 5]
    assert SeedCheckpoint(seed.url.replace("http://", "tensorlift://")).names == table.names


def test_keys(seed: Seed) -> None:
    with pytest.raises(ForkError, match=r"the seed has 'org/a model', not 'org/other'; name that one"):
        SeedCheckpoint(url_of(seed.url, "org/other"))
    with Seed(tensors(), ModelKey(model="m")) as processed:
        url = url_of(processed.url, "m")
        with pytest.raises(ForkError, match="behind its load, which need not be those of the checkpoint"):
            SeedCheckpoint(url)
        assert len(SeedCheckpoint(url, as_it_is=True)) == len(tensors())
    with (
        Seed(tensors(), ModelKey(model="m", tp=(1, 2), processed=False)) as rank,
        pytest.raises(ForkError, match="the part of rank 1 of 2 in tp, and no whole checkpoint"),
    ):
        SeedCheckpoint(url_of(rank.url, ""))


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with Seed(tensors(), KEY, token="right") as seed:
        url = url_of(seed.url, "")
        with pytest.raises(SeedError, match="wants a token, and none"):
            SeedCheckpoint(url)
        assert SeedCheckpoint(url, "right").names == list(tensors())
        monkeypatch.setenv(TOKEN_VARIABLE, "right")
        table = SeedCheckpoint(url)
        room = {"half": torch.zeros(7, dtype=torch.bfloat16)}
        table.bring(room, 100, lambda done: None)
        assert raw(room["half"]) == raw(tensors()["half"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"backend": "URING", "threads": 2}, "backend, threads"),
        ({"slices": {}, "progress": True}, "slices"),
        ({"process_group": "world"}, "process_group"),
        ({"exchange": "none", "buffer_size": "1MiB"}, "exchange"),
        ({"verify": True}, "verify"),
        ({"verify": {"a": "0" * 32}}, "verify"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, Any], named: str) -> None:
    with pytest.raises(
        OptionError, match=rf"^{named}: not for tensorlift://h:1, which is a seed and no file"
    ):
        check_options("tensorlift://h:1", **given)
    check_options("model.safetensors", **given)


def test_a_variable_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLIFT_BACKEND", "URING")
    check_options("tensorlift://h:1", verify=None, progress=False, trace="t.json")
    monkeypatch.setenv("TENSORLIFT_VERIFY", "true")
    check_options("tensorlift://h:1", verify=False)
    with pytest.raises(OptionError, match=r"^TENSORLIFT_VERIFY: not for"):
        check_options("tensorlift://h:1", verify=None)


@pytest.mark.parametrize("limit", [1, 2000, 1 << 30])
def test_bytes_into_tensors_of_any_layout(seed: Seed, limit: int) -> None:
    table, told = SeedCheckpoint(url_of(seed.url, "")), list[int]()
    room = {
        name: torch.zeros(one.shape, dtype=one.dtype) for name, one in tensors().items() if name != "packed"
    }
    room["half"] = torch.zeros(7, dtype=torch.float64)
    table.bring(room, limit, told.append)
    for name, tensor in room.items():
        assert torch.equal(tensor, tensors()[name].to(tensor.dtype)), name
    assert told == sorted(told)
    assert told[-1] == sum(
        one.numel() * one.element_size() for name, one in tensors().items() if name in room
    )


@pytest.mark.parametrize("limit", [1, 2000, 1 << 30])
def test_a_stream_of_bytes_as_files_have_them(seed: Seed, limit: int) -> None:
    table = SeedCheckpoint(url_of(seed.url, ""))
    order = sorted(table.names)
    came = [bytes(part) for part in table.stream(order, limit, lambda done: None)]
    assert came == [raw(tensors()[name].contiguous()) for name in order]


def test_parts_of_a_bounded_size(seed: Seed) -> None:
    table = SeedCheckpoint(url_of(seed.url, ""))
    assert list(table.batches(["plain", "none", "alias", "half", "turned"], 12_014)) == [
        ["plain", "none"], ["alias", "half"], ["turned"],
    ]  # fmt: skip
    assert list(table.batches([], 1)) == []


def test_weights_that_change_between_two_parts() -> None:
    offered = tensors()
    with Seed(offered, KEY) as seed:
        table = SeedCheckpoint(url_of(seed.url, ""))
        stream = table.stream(["plain", "alias"], 1, lambda done: None)
        next(stream)
        with seed.updating(timeout=0):
            offered["plain"].zero_()
        with pytest.raises(ForkError, match="the weights have changed, or it is another instance"):
            next(stream)


def test_another_instance_on_the_same_port() -> None:
    with Seed(tensors(), KEY) as seed:
        table = SeedCheckpoint(url_of(seed.url, ""))
        port = int(seed.url.rpartition(":")[2])
    with Seed(tensors(), KEY, port=port), pytest.raises(ForkError, match="or it is another instance"):
        list(table.stream(["half"], 100, lambda done: None))


def test_several_seeds() -> None:
    """Each brings some; one that ends is not asked again; those that are not alike are left at once."""
    with (
        leaks.nothing_left(), Seed(tensors(), KEY, weights="1") as one,
        Seed(tensors(), KEY, weights="1") as other,
        Seed(tensors(), KEY, weights="2") as newer,
    ):  # fmt: skip
        urls = [nobody(), one.url, newer.url, other.url]
        table = SeedCheckpoint([url_of(url, "org/a model") for url in urls], as_it_is=True)
        assert set(table.left) == {urls[0], newer.url}
        assert table.left[newer.url].startswith("it has other weights than the first seed")
        stream = table.stream(table.names, 1, lambda done: None)
        came = [bytes(next(stream)), bytes(next(stream))]
        first = dict(table.by_source)
        assert set(first) <= {one.url, other.url}
        other.close()
        came += [bytes(part) for part in stream]
        assert came == [raw(tensors()[name].contiguous()) for name in table.names]
        assert "cannot be reached" in table.left[other.url]
        assert table.by_source[one.url] > first.get(one.url, 0)
        assert table.by_source.get(other.url) == first.get(other.url)
        with pytest.raises(ForkError, match="the seed has 'org/a model', not 'x'"):
            SeedCheckpoint([url_of(one.url, "x")])
        with pytest.raises(ForkError, match=r"none of 2 seeds can be read: .*, not 'x'; .*, not 'y'"):
            SeedCheckpoint([url_of(one.url, "x"), url_of(newer.url, "y")])


def test_the_last_seed_is_asked_again() -> None:
    """Where nobody else is there, why it cannot be read is an error."""
    with Seed(tensors(), KEY, weights="1") as one, Seed(tensors(), KEY, weights="1") as other:
        table = SeedCheckpoint([url_of(one.url, ""), url_of(other.url, "")])
    with pytest.raises(SeedError, match="none of 2 seeds can be read"):
        list(table.stream(["half"], 100, lambda done: None))


def lying(seed: Seed, monkeypatch: pytest.MonkeyPatch, *told: Tensor, nbytes: int = 1 << 20) -> str:
    """The URL of a seed that says that it has these tensors."""
    real = remote.SeedClient.manifest

    def manifest(self: remote.SeedClient) -> object:
        regions = (Region(nbytes),)
        return msgspec.structs.replace(real(self), tensors=told, regions=regions, layout=layout_digest(told))

    monkeypatch.setattr(remote.SeedClient, "manifest", manifest)
    return url_of(seed.url, "")


def test_what_no_checkpoint_can_have(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    url = lying(seed, monkeypatch, Tensor("x", "complex128", (2,), (1,), 0, 0))
    with pytest.raises(ForkError, match=r"'x' has dtype complex128 and shape \[2\], which no checkpoint has"):
        SeedCheckpoint(url)


def test_the_name_that_headers_keep_for_themselves(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written as a file that nobody reads."""
    url = lying(seed, monkeypatch, Tensor("__metadata__", "float32", (2,), (1,), 0, 0))
    with pytest.raises(ForkError, match="a tensor is called '__metadata__', which no checkpoint can have"):
        SeedCheckpoint(url, as_it_is=True)


def test_tensors_larger_than_any(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Tensor(name, "uint8", (1 << 62,), (1,), 0, 0) for name in "xy"]
    url = lying(seed, monkeypatch, *told, nbytes=1 << 62)
    with pytest.raises(ManifestError, match="has tensors of 9,223,372,036,854,775,808 bytes"):
        SeedCheckpoint(url)
    with pytest.raises(OutOfMemoryError, match="memory for 'x' could not be had"):
        allocated(lambda: torch.empty(1 << 50), "x")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((1 << 40, 1 << 40), (0, 0)), ((4, 1 << 30), (1 << 10, 0)), ((1 << 14, 1 << 14), (1, 1))],
)
def test_elements_that_a_seed_does_not_have(
    seed: Seed, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    """A manifest of a few bytes that would take terabytes here: elements share memory, which comes once."""
    url = lying(seed, monkeypatch, Tensor("x", "float32", shape, stride, 0, 0))
    with pytest.raises(ManifestError, match=r"'x' would take [\d,]+ bytes, and the seed has [\d,]+ of it"):
        SeedCheckpoint(url)


def test_a_seed_that_is_gone() -> None:
    with Seed(tensors(), KEY) as seed:
        table = SeedCheckpoint(url_of(seed.url, ""))
    with pytest.raises(SeedError, match="cannot be reached"):
        list(table.stream(["half"], 100, lambda done: None))
    with pytest.raises(SeedError, match="cannot be reached"):
        SeedCheckpoint(url_of(seed.url, ""))


def test_all_parts_keep_to_one_limit(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the last chunk of each would be for nothing."""
    pacers, asked = list[Pacer](), Pacer.asked

    def counted(self: Pacer, nbytes: int) -> None:
        pacers.append(self)
        asked(self, nbytes)

    monkeypatch.setattr(Pacer, "asked", counted)
    table = SeedCheckpoint(url_of(seed.url, ""), as_it_is=True, limit="1GB/s", transports=["tcp"])
    assert len([bytes(part) for part in table.stream(["plain", "turned", "half"], 1, lambda done: None)]) == 3
    assert (len(pacers), len(set(map(id, pacers))), pacers[0].rate) == (3, 1, 10**9)
