"""Seeds that are killed, stopped, replaced and changed under forks, and forks that die under seeds."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from support.seeds import KEY, NBYTES, Process, is_version, running, weights
from support.waiting import until
from tensorlift.cli.main import app
from tensorlift.errors import ForkError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import Manifest, decode, encode
from tensorlift.forking.seed import Seed

pytestmark = pytest.mark.usefixtures("clean")

CHUNK = 40_000
FORK: dict[str, Any] = {"chunk_bytes": CHUNK, "patience": 60.0}
LIMIT = "4MB/s"


def once(share: float, act: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress that does it when so much is there."""
    done = False

    def tick(bytes_done: int, total: int) -> None:
        nonlocal done
        if not done and bytes_done >= share * total:
            done = True
            act()

    return tick


@contextlib.contextmanager
def two_seeds(**more: Any) -> Iterator[tuple[list[Process], list[str]]]:
    """Of the same weights."""
    with (
        running("seed", version=1, limit=LIMIT, **more) as one,
        running("seed", version=1, limit=LIMIT) as two,
    ):
        yield [one, two], [one.said(), two.said()]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Version 1, with its digests."""
    save_file(weights(1), tmp_path / "model.safetensors")
    assert CliRunner().invoke(app, ["digest", str(tmp_path)]).exit_code == 0
    return str(tmp_path)


def test_one_of_two_is_killed_half_way() -> None:
    with two_seeds() as (seeds, urls):
        found = weights(0)
        result = fork_into(found, urls, progress=once(0.5, seeds[0].kill), **FORK)
    assert is_version(found, 1)
    assert set(result.by_source) == set(urls)
    assert result.left[0].startswith(f"{urls[0]}: the connection is lost: ")
    assert sum(result.by_source.values()) == result.bytes == NBYTES
    # All that came more than once, with chunks that came in part.
    assert result.bytes <= result.moved_bytes <= 1.05 * result.bytes


def test_one_of_two_is_stopped_half_way() -> None:
    with two_seeds() as (seeds, urls):
        found = weights(0)
        stop = once(0.5, lambda: seeds[0].signal(signal.SIGSTOP))
        result = fork_into(found, urls, progress=stop, chunk_bytes=CHUNK, patience=10.0)
    assert is_version(found, 1)
    assert set(result.by_source) == set(urls)
    assert result.left[0].startswith(f"{urls[0]}: ")
    assert result.bytes <= result.moved_bytes <= 1.05 * result.bytes


@pytest.mark.parametrize("alone", [True, False])
def test_another_instance_on_the_same_port(alone: bool) -> None:
    """With other weights: what it has is not taken for what the one before had."""
    with contextlib.ExitStack() as stack:
        seeds, urls = stack.enter_context(two_seeds())

        def replace() -> None:
            seeds[0].kill()
            port = int(urls[0].rpartition(":")[2])
            assert stack.enter_context(running("seed", version=2, port=port)).said() == urls[0]

        found = weights(0)
        tick = once(0.4, replace)
        if alone:
            with pytest.raises(ForkError, match="the tensors here are not complete"):
                fork_into(found, urls[0], progress=tick, **FORK)
        else:
            result = fork_into(found, urls, progress=tick, **FORK)
            assert result.left
            assert is_version(found, 1)
        # The same URL again: the new one is what it says it is.
        assert fork_into(found, urls[0], **FORK).weights == "2"
        assert is_version(found, 2)


@pytest.mark.parametrize("has_files", [True, False])
def test_all_seeds_are_killed(path: str, has_files: bool) -> None:
    with two_seeds() as (seeds, urls):
        found = weights(0)

        def end() -> None:
            for seed in seeds:
                seed.kill()

        if not has_files:
            with pytest.raises(ForkError, match=r"of 8,000,000 bytes could not be had: http://"):
                fork_into(found, urls, progress=once(0.5, end), **FORK)
            return
        result = fork_into(found, urls, progress=once(0.5, end), fallback=path, **FORK)
    assert is_version(found, 1)
    assert set(result.by_source) == {*urls, "files"}
    assert sum(result.by_source.values()) == NBYTES
    assert result.by_source["files"] < 0.75 * NBYTES
    assert len(result.left) == 2


def test_the_only_seed_is_stopped(path: str) -> None:
    with running("seed", version=1, limit=LIMIT) as seed:
        url = seed.said()
        stop = once(0.5, lambda: seed.signal(signal.SIGSTOP))
        found = weights(0)
        result = fork_into(found, url, progress=stop, fallback=path, chunk_bytes=CHUNK, patience=3.0)
    assert is_version(found, 1)
    assert set(result.by_source) == {url, "files"}


def test_an_update_in_the_middle(path: str) -> None:
    """The seed is there: its new weights are taken, not the files' old ones."""
    with running("seed", version=1, limit=LIMIT) as seed:
        url = seed.said()
        found = weights(0)
        update = once(0.3, lambda: (seed.tell("update", 2, 0), seed.said()))
        result = fork_into(found, url, progress=update, fallback=path, **FORK)
    assert result.weights == "2"
    assert is_version(found, 2)
    assert set(result.by_source) == {url}


def moved_regions(manifest: Manifest) -> Manifest:
    """All tensors, where nothing is."""
    tensors = (msgspec.structs.replace(one, region=one.region + 1) for one in manifest.tensors)
    return msgspec.structs.replace(
        manifest, tensors=tuple(tensors), regions=(*manifest.regions, manifest.regions[-1])
    )


def longer_regions(manifest: Manifest) -> Manifest:
    regions = (msgspec.structs.replace(one, nbytes=2 * one.nbytes) for one in manifest.regions)
    tensors = (msgspec.structs.replace(one, offset=8 * 25_000) for one in manifest.tensors)
    return msgspec.structs.replace(manifest, regions=tuple(regions), tensors=tuple(tensors))


def cut_short(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, tensors=manifest.tensors[:-1])


def heard(manifest: Manifest, url: str) -> Manifest:
    """As it comes over the wire."""
    return decode(encode(manifest), url)


@pytest.mark.parametrize("lie", [moved_regions, longer_regions, cut_short])
@pytest.mark.parametrize("has_files", [True, False])
def test_a_manifest_that_lies(
    path: str, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Manifest], Manifest], has_files: bool
) -> None:
    real = SeedClient.manifest
    monkeypatch.setattr(SeedClient, "manifest", lambda client: heard(lie(real(client)), client.url))
    found = weights(0)
    with Seed(weights(1), KEY) as seed:
        if has_files:
            result = fork_into(found, seed.url, fallback=path, **FORK)
            assert is_version(found, 1)
            assert result.by_source["files"] > 0
        else:
            with pytest.raises(ForkError):
                fork_into(found, seed.url, **FORK)


@pytest.mark.parametrize("digests", ["full", "sample", "off"])
def test_tensors_of_no_bytes(digests: str) -> None:
    offered = {"a": torch.empty(0, 3), "b": torch.empty(4, 0, dtype=torch.int8)}
    with Seed(offered, KEY) as seed:
        result = fork_into({name: torch.empty_like(one) for name, one in offered.items()}, seed.url)
        assert (result.bytes, result.by_source) == (0, {})
    offered["c"] = torch.rand(5)
    with Seed(offered, KEY) as seed:
        found = {name: torch.zeros_like(one) for name, one in offered.items()}
        fork_into(found, seed.url, digests=digests)
        assert torch.equal(found["c"], offered["c"])


def test_a_fork_that_dies_leaves_its_lease() -> None:
    """An update waits for it no longer than it says, and the next fork has its place once it lapses."""
    offered = weights(1)
    with Seed(offered, KEY, limit=LIMIT, readers=1) as seed:
        with running("fork", urls=[seed.url], lease=5.0, chunk_bytes=CHUNK) as fork:
            assert fork.said() == "ready"
            until(lambda: seed.stats()["sent_chunks"] >= 3)
            fork.kill()
        assert seed.stats()["readers"] == 1
        found = weights(0)
        fork_into(found, seed.url, chunk_bytes=1 << 20, patience=60.0)
        assert is_version(found, 1)
        with running("fork", urls=[seed.url], lease=60.0, chunk_bytes=CHUNK) as fork:
            assert fork.said() == "ready"
            until(lambda: seed.stats()["readers"])
            fork.kill()
        with seed.updating(timeout=0.5, weights="2"):
            for name, tensor in weights(2).items():
                offered[name].copy_(tensor)
        assert seed.stats()["readers"] == 0
        fork_into(found, seed.url, chunk_bytes=1 << 20, patience=60.0)
        assert is_version(found, 2)


def test_who_was_left_is_not_asked_for_ever(path: str) -> None:
    """A seed that is stopped before the first question."""
    with running("seed", version=1) as seed:
        url = seed.said()
        seed.signal(signal.SIGSTOP)
        found = weights(0)
        result = fork_into(found, url, fallback=path, chunk_bytes=CHUNK, patience=1.0)
        os.kill(seed.process.pid, signal.SIGCONT)
    assert is_version(found, 1)
    assert result.by_source == {"files": NBYTES}
    assert "cannot be reached" in result.left[0]
