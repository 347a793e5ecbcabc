"""What ranks compare, and what follows from what each of them wants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.checkpoints import random_row, write_safetensors
from tensorlift import sources
from tensorlift.distributed.agreement import (
    SEVERAL,
    File,
    Request,
    Schedule,
    agree_on_files,
    files_of,
    pack,
    schedule_of,
    unpack,
)
from tensorlift.errors import DisagreementError

FILES = [File(f"model-{k}.safetensors", 1000 + k, f"digest {k}") for k in range(4)]


def name(rank: int) -> str:
    return f"rank {10 + rank}"


def test_the_order_of_files_does_not_count() -> None:
    agree_on_files([FILES, FILES[::-1], FILES[2:] + FILES[:2]], name)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (FILES[:3], "rank 10 has model-3.safetensors, rank 12 has no file of that name"),
        (FILES[:1], "rank 10 has model-1.safetensors and 2 more, rank 12 has no"),
        ([*FILES, File("b", 1, "x")], "rank 12 has b, rank 10 has no file of that name"),
        ([*FILES[:3], File("model-3.safetensors", 9, "")], "1,003 bytes on rank 10 and 9 on rank 12"),
        (
            [*FILES[:3], File("model-3.safetensors", 1003, "")],
            "model-3.safetensors has the same size on both, but its header says different things",
        ),
        ([*FILES, FILES[0]], "one has a file more often than the other"),
        ([], "rank 10 has model-0.safetensors and 3 more"),
    ],
)
def test_a_difference_names_both_ranks_and_what_differs(theirs: list[File], says: str) -> None:
    with pytest.raises(DisagreementError) as raised:
        agree_on_files([FILES, FILES[::-1], theirs], name)
    message = str(raised.value)
    assert message.startswith("rank 10 and rank 12 were asked to load different checkpoints together: ")
    assert says in message
    assert message.endswith("; give all ranks the same files")
    assert "\n" not in message


def test_what_a_file_is_compared_by(tmp_path: Path) -> None:
    rows = {"a": random_row("F32", [3, 4], 1), "b": random_row("U8", [5], 2)}
    variants: dict[str, dict[str, Any]] = {
        "same": rows,
        "bytes": {"a": random_row("F32", [3, 4], 9), "b": random_row("U8", [5], 8)},
        "name": {"a": rows["a"], "c": rows["b"]},
        "shape": {"a": random_row("F32", [4, 3], 1), "b": rows["b"]},
        "dtype": {"a": random_row("I32", [3, 4], 1), "b": rows["b"]},
    }
    found = {}
    for variant, written in variants.items():
        path = tmp_path / variant / "model.safetensors"
        path.parent.mkdir()
        write_safetensors(path, written)
        (found[variant],) = files_of(sources.read_headers(sources.find(str(path))))
    assert found["same"].name == "model.safetensors"
    assert found["same"] == found["bytes"]  # what tensors hold is not read for it
    assert {variant for variant in found if found[variant] != found["same"]} == {"name", "shape", "dtype"}


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, 120_000])
def test_masks_are_packed(count: int) -> None:
    for share in (0.0, 0.3, 1.0):
        mask = np.random.default_rng(count).random(count) < share
        packed = pack(mask)
        assert (unpack(packed, count) == mask).all()
        assert len(packed) <= count // 8 + 32
    assert len(pack(np.ones(count, bool))) < 256


def request(**changes: Any) -> Request:
    plain = Request(
        exchange="auto",
        device="cpu",
        verify=False,
        own="arena",
        arena_size=1 << 20,
        rows=pack(np.ones(4, bool)),
        temporary=True,
        host="one",
        cached=-1.0,
    )
    return msgspec.structs.replace(plain, **changes)


SIZES = np.array([10, 20, 0, 40], np.int64)


def schedule(*given: Request, says: str = "gather", seen: list[int] | None = None) -> Schedule:
    def predict(requests: Sequence[Request], nbytes: int) -> tuple[str, str, dict[str, float]]:
        assert list(requests) == list(given)
        if seen is not None:
            seen.append(nbytes)
        return says, "predicted", {"bytes": float(nbytes)}

    return schedule_of(given, SIZES, name, predict, 2)


def rows(*wanted: int) -> bytes:
    return pack(np.isin(np.arange(4), wanted))


def test_what_all_want_is_exchanged() -> None:
    seen: list[int] = []
    found = schedule(request(rows=rows(0, 1, 2)), request(rows=rows(1, 2, 3), arena_size=4096), seen=seen)
    assert unpack(found.rows, 4).tolist() == [False, True, True, False]
    assert (found.exchange, found.why, found.arena_size) == ("gather", "predicted", 4096)
    assert (found.figures, found.ranks_per_host, seen) == ({"bytes": 20.0}, 2, [20])


@pytest.mark.parametrize(
    ("given", "exchange", "why"),
    [
        ([{"exchange": "gather"}] * 2, "gather", "asked for"),
        ([{"exchange": "none"}] * 2, "none", "asked for"),
        ([{"rows": rows(0)}, {"rows": rows(1)}], "none", "no tensor is wanted whole by all"),
        # Tensors of no bytes alone are not worth a gather, and none would come of them.
        ([{"rows": rows(2), "exchange": "gather"}] * 2, "none", "no tensor is wanted whole by all"),
        ([{"device": SEVERAL, "exchange": "gather"}] * 2, "none", "lie on several devices"),
        ([{"device": SEVERAL, "exchange": "none"}] * 2, "none", "asked for"),
    ],
)
def test_how_it_is_loaded(given: list[dict[str, Any]], exchange: str, why: str) -> None:
    seen: list[int] = []
    found = schedule(*(request(**changes) for changes in given), seen=seen)
    assert found.exchange == exchange
    assert why in found.why
    assert unpack(found.rows, 4).any() == (exchange == "gather")
    assert seen == []  # nothing was open


def test_a_prediction_against_it() -> None:
    found = schedule(request(), request(), says="none")
    assert (found.exchange, found.figures) == ("none", {"bytes": 70.0})
    assert not unpack(found.rows, 4).any()


@pytest.mark.parametrize(
    ("field", "value"), [("exchange", "none"), ("device", "cuda"), ("own", "tensor"), ("verify", True)]
)
def test_what_must_be_the_same(field: str, value: Any) -> None:
    with pytest.raises(DisagreementError) as raised:
        schedule(request(), request(), request(**{field: value}))
    ours = getattr(request(), field)
    assert f"rank 10 and rank 12 were asked to load together in different ways: {field} is {ours!r}" in str(
        raised.value
    )
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("changes", [{"temporary": False}, {"host": "two"}, {"cached": 0.5}])
def test_what_may_differ(changes: dict[str, Any]) -> None:
    assert schedule(request(), request(**changes)).exchange == "gather"


def test_sizes_that_no_file_has() -> None:
    """Sums of whatever headers say do not wrap around."""
    huge = np.array([2**62, 2**62, 2**62, 1], np.int64)
    seen = []

    def predict(requests: Sequence[Request], nbytes: int) -> tuple[str, str, dict[str, float]]:
        seen.append(nbytes)
        return "none", "", {}

    schedule_of([request(), request()], huge, name, predict, 1)
    assert seen == [3 * 2**62 + 1]


def test_all_that_is_said_survives_the_wire() -> None:
    generator = random.Random(1)
    for _ in range(50):
        sent = request(
            cached=generator.random(), rows=generator.randbytes(20), arena_size=generator.getrandbits(50)
        )
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Request) == sent
    assert msgspec.json.decode(msgspec.json.encode(FILES), type=list[File]) == FILES
    odd = File('mödel "x"\n.safetensors', 2**60, "")
    assert msgspec.json.decode(msgspec.json.encode([odd]), type=list[File]) == [odd]
