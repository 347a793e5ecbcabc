"""A checkpoint and its digests: what differs, what counts, what the rows of a load have to have."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.checkpoints import random_row, write_safetensors
from support.digests import headers
from tensorlift.errors import DigestError, TensorNotFoundError
from tensorlift.format import comparing, digests
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.comparing import Scope, differences
from tensorlift.format.digests import FileRecord, Sidecar, TensorRecord

HEX = "0123456789abcdef" * 2


def scope(present: dict[str, int], wanted: str = "") -> Scope:
    return Scope({name: (0, nbytes) for name, nbytes in present.items()}, frozenset(wanted.split()))


def test_differences() -> None:
    a, b, c = (TensorRecord(name, "f", "U8", (4,), 4, HEX) for name in "abc")
    old = Sidecar((FileRecord("f", 7), FileRecord("gone", 1)), (a, b))
    both = scope({"f": 7}, "f gone")
    assert differences(old, old, both) == []
    moved = msgspec.structs.replace(a, file="g")
    assert differences(old, Sidecar((FileRecord("g", 9),), (moved, b)), both) == []
    for change in ({"dtype": "I8"}, {"shape": (2, 2)}, {"digest": HEX[::-1]}):
        new = Sidecar((FileRecord("f", 7),), (a, msgspec.structs.replace(b, **change)))
        (found,) = differences(old, new, both)
        assert (found.kind, found.file, found.tensor) == ("changed", "f", "b")
        assert next(iter(change)) in str(found)
    found = differences(old, Sidecar((FileRecord("f", 8),), (b, c)), scope({"f": 8}, "f"))
    assert [(one.kind, one.tensor) for one in found] == [("changed", None), ("missing", "a"), ("extra", "c")]
    assert str(found[0]) == "f: has 8 bytes, expected 7"


def test_a_file_that_is_gone_is_one_difference() -> None:
    tensors = tuple(TensorRecord(f"{f}{i}", f, "U8", (4,), 4, HEX) for f in "fg" for i in range(9))
    old = Sidecar((FileRecord("f", 40), FileRecord("g", 40)), tensors)
    new = Sidecar(old.files[:1], tensors[:9])
    (found,) = differences(old, new, scope({"f": 40}, "f g"))
    assert (found.kind, str(found)) == ("missing", "g: is missing, with 9 tensors")
    assert differences(old, new, scope({"f": 40}, "f")) == []
    # One of its tensors is elsewhere, so the others are what is missing.
    found_some = differences(old, Sidecar(old.files[:1], tensors[:10]), scope({"f": 40}, "f g"))
    assert [one.tensor for one in found_some] == [f"g{i}" for i in range(1, 9)]


def test_which_files_count(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "sub")
    paths = [
        write_safetensors(tmp_path / name, {name: random_row("U8", [4])})
        for name in ("m.safetensors", "sub/m.safetensors")
    ]
    both = headers(paths)
    made = digests.describe(both, np.zeros((2, 16), np.uint8))
    assert [file.name for file in made.files] == ["m.safetensors", "sub/m.safetensors"]
    for path, name in zip(paths, ["m.safetensors", "sub/m.safetensors"], strict=True):
        one = Scope.of(made, headers(path), False)
        assert (list(one.present), one.wanted) == ([name], {name})
        assert Scope.of(made, headers(path), True).wanted == {"m.safetensors", "sub/m.safetensors"}
    assert Scope.of(made, both, False).wanted == {"m.safetensors", "sub/m.safetensors"}
    renamed = headers(paths[0].rename(tmp_path / "new.safetensors"))
    assert Scope.of(made, renamed, False).wanted == frozenset()
    alone = Sidecar(made.files[:1], made.tensors[:1])
    assert Scope.of(alone, renamed, False).wanted == {"m.safetensors"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return headers(write_safetensors(tmp_path / "m.safetensors", {n: random_row("U8", [4]) for n in "abc"}))


def test_expect_lists_what_does_not_fit(checkpoint: Checkpoint) -> None:
    made = digests.describe(checkpoint, np.full((3, 16), 7, np.uint8))
    expected = comparing.expect(made, checkpoint, [0, 2], "where")
    assert expected.known.tolist() == [True, False, True]
    assert expected.digests[2].tolist() == [7] * 16
    other = Sidecar(made.files, (msgspec.structs.replace(made.tensors[0], dtype="I8"), *made.tensors[1:2]))
    with pytest.raises(DigestError) as caught:
        comparing.expect(other, checkpoint, range(3), "where")
    assert "tensor 'a': is U8 [4], expected I8 [4]" in str(caught.value)
    assert "tensor 'c': has no digest" in str(caught.value)
    assert "'b'" not in str(caught.value)


def test_expect_misses_what_is_gone(checkpoint: Checkpoint) -> None:
    made = digests.describe(checkpoint, np.zeros((3, 16), np.uint8))
    more = Sidecar(made.files, (*made.tensors, msgspec.structs.replace(made.tensors[0], name="d")))
    comparing.expect(more, checkpoint, range(3), "where")
    with pytest.raises(DigestError, match=r"1 difference;(.|\n)*m\.safetensors: tensor 'd': is missing"):
        comparing.expect(more, checkpoint, range(3), "where", whole=True)


def test_expect_wants_files_of_the_same_size(checkpoint: Checkpoint) -> None:
    made = digests.describe(checkpoint, np.zeros((3, 16), np.uint8))
    longer = Sidecar((FileRecord("m.safetensors", made.files[0].nbytes + 1),), made.tensors)
    with pytest.raises(DigestError, match=r"m\.safetensors: has .* bytes, expected"):
        comparing.expect(longer, checkpoint, [1], "where")


def test_given_digests_are_checked(tmp_path: Path) -> None:
    one = headers(write_safetensors(tmp_path / "m.safetensors", {"a": random_row("U8", [4])}))
    assert comparing.expect_given({"a": HEX.upper()}, one).digests[0].tobytes().hex() == HEX
    with pytest.raises(TensorNotFoundError, match="'b'"):
        comparing.expect_given({"b": HEX}, one)
    for text in (HEX[2:], "xyz", "", None):
        with pytest.raises(DigestError, match="32 hexadecimal digits"):
            comparing.expect_given({"a": text}, one)  # type: ignore[dict-item]
