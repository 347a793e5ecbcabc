"""What a rank does by itself that ends the load of all: it drops a pass, or cannot write where it should."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tensorlift
from support import ranks

KIB = 1 << 10


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> str:
    """32 tensors of 64 KiB: with that capacity, an arena each."""
    return ranks.even(tmp_path_factory.mktemp("even"))


def dropped(rank: int, path: str, how: str) -> Any:
    """Rank 1 lets go of what it opened, or cannot open it; what Python could not raise comes back."""
    unraisable: list[str] = []
    sys.unraisablehook = lambda told: unraisable.append(repr(told.exc_value))
    options: dict[str, Any] = {"process_group": "world", "exchange": "gather", "arena_size": 64 * KIB}
    if rank == 0:
        with pytest.raises(tensorlift.errors.PeerError) as raised:
            dict(tensorlift.open(path, **options))
        return [str(raised.value), unraisable]
    if how == "file":
        with pytest.raises(tensorlift.errors.CheckpointNotFoundError):
            tensorlift.open(path + ".not", **options)
    elif how == "weights":
        tensorlift.open(path, **options)
    else:
        iter(tensorlift.open(path, **options))
    return ["", unraisable]


@pytest.mark.parametrize("how", ["weights", "iterator", "file"])
def test_a_pass_that_never_begins_is_told(even: str, how: str) -> None:
    first, second = ranks.values(dropped, 2, even, how)
    assert first[0].startswith("rank 1 failed: " if how == "file" else "rank 1 stopped before")
    assert first[1] == second[1] == []


def into_a_map(rank: int, path: str, exchange: str) -> Any:
    """Rank 1's destination is a map of a file that is open for reading only."""
    model = {"t00": torch.zeros(64 * KIB, dtype=torch.uint8)}
    if rank == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it should not be written to
            model["t00"] = torch.from_numpy(np.memmap(path, np.uint8, "r", shape=64 * KIB))
    with pytest.raises((tensorlift.errors.RequestError, tensorlift.errors.PeerError)) as raised:
        tensorlift.load_into(model, path, names="t00", process_group="world", exchange=exchange)
    return str(raised.value)


@pytest.mark.parametrize("exchange", ["gather", "none"])
def test_a_destination_that_cannot_be_written_ends_the_load_and_not_the_process(
    even: str, exchange: str
) -> None:
    first, second = ranks.values(into_a_map, 2, even, exchange)
    assert "the memory of 't00' cannot be written" in second
    assert first == f"rank 1 failed: RequestError: {second}"


def nothing_to_wait_for(rank: int, path: str) -> int:
    """Rank 0 has read all when rank 1 leaves, and takes its time."""
    count = 0
    options: dict[str, Any] = {"exchange": "none", "arena_size": 64 * KIB, "peer_timeout": 2}
    with contextlib.suppress(tensorlift.errors.PeerError):
        for _ in tensorlift.open(path, process_group="world", **options):
            count += 1
            if rank == 1:
                break
            time.sleep(0.1)
    return count


def test_a_rank_that_has_all_its_bytes_learns_of_a_failure(even: str) -> None:
    first, second = ranks.values(nothing_to_wait_for, 2, even)
    assert second == 1
    assert first < 32


def at_the_end(rank: int, path: str, how: str) -> list[Any]:
    """Rank 1 goes no further than its last tensor."""
    options: dict[str, Any] = {"process_group": "world", "exchange": "gather", "arena_size": 64 * KIB}
    count, said = 0, ""
    try:
        if how == "with":
            with tensorlift.open(path, **options) as weights:
                for _ in weights:
                    count += 1
                    if rank == 1 and count == 32:
                        break
        else:
            weights = tensorlift.open(path, **options)
            for _ in weights:
                count += 1
                if rank == 1 and count == 32:
                    break
            del weights
    except tensorlift.errors.PeerError as error:
        said = str(error)
    return [count, said]


def test_a_loop_that_ends_at_its_last_tensor(even: str) -> None:
    """In a with statement that is as good as its end; without one nobody can know."""
    assert ranks.values(at_the_end, 2, even, "with") == [[32, ""]] * 2
    first, second = ranks.values(at_the_end, 2, even, "without")
    assert second == [32, ""]
    assert "let the loop end by itself" in first[1]


def waits_inside(rank: int, path: str) -> str:
    """Rank 1 stops within the statement, and waits there for the others, who wait for its tensors."""
    own = dist.new_group()
    options: dict[str, Any] = {"process_group": "world", "exchange": "gather", "arena_size": 64 * KIB}
    try:
        with tensorlift.open(path, **options) as weights:
            for count, _ in enumerate(weights):
                if rank == 1 and count == 3:
                    break
            if rank == 1:
                dist.barrier(own)
    except tensorlift.errors.PeerError as error:
        dist.barrier(own)
        return str(error)
    return ""


def test_others_learn_of_a_stop_before_the_with_statement_is_left(even: str) -> None:
    assert ranks.values(waits_inside, 2, even) == ["rank 1 stopped before it had taken all tensors", ""]


def random_and_not(rank: int, path: str) -> str:
    call = tensorlift.load if rank else lambda path, **options: tensorlift.safe_open(path, "pt", **options)
    with pytest.raises(tensorlift.errors.DisagreementError) as raised:
        call(path, process_group="world")
    return str(raised.value)


def test_safe_open_and_load_do_not_go_together(even: str) -> None:
    for said in ranks.values(random_and_not, 2, even):
        assert said.startswith("rank 0 called safe_open, and rank 1 load, open or load_into")
