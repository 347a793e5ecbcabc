"""The file of digests: written and read back, hostile texts, what differs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.checkpoints import random_checkpoint
from support.digests import headers
from tensorlift.errors import DigestError
from tensorlift.format import digests
from tensorlift.format.digests import FileRecord, Sidecar, TensorRecord, decode, encode
from tensorlift.format.dtypes import BY_CODE

HEX = "0123456789abcdef" * 2
COUNTS = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
# Of dtypes that are not known, which may have any size.
TENSORS = st.lists(
    st.builds(
        TensorRecord,
        TEXT,
        st.just("f"),
        TEXT.filter(lambda code: code not in BY_CODE),
        st.lists(COUNTS, max_size=4).map(tuple),
        st.integers(0, 2**60),
        st.binary(min_size=16, max_size=16).map(bytes.hex),
    ),
    max_size=5,
    unique_by=lambda tensor: tensor.name,
).map(tuple)


def plain(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "t", "file": "f", "dtype": "U8", "shape": [3], "nbytes": 3, "digest": HEX}
    whole = {
        "format": "tensorlift.digests",
        "version": 1,
        "algorithm": digests.ALGORITHM,
        "files": [{"name": "f", "nbytes": 100}],
        "tensors": [tensor | changes.pop("tensor", {})],
    }
    return whole | changes


@given(TENSORS)
def test_what_is_written_is_read(tensors: tuple[TensorRecord, ...]) -> None:
    sidecar = Sidecar((FileRecord("f", 2**63 - 1),), tensors)
    assert decode(encode(sidecar), "x") == sidecar


@given(st.one_of(st.binary(max_size=200), st.text().map(str.encode)))
def test_anything_is_a_sidecar_or_an_error(raw: bytes) -> None:
    with pytest.raises(DigestError, match=r"^here"):
        decode(raw, "here")


@given(st.data())
def test_a_damaged_sidecar_is_read_or_an_error(data: st.DataObject) -> None:
    raw = bytearray(json.dumps(plain()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DigestError):
        assert isinstance(decode(bytes(raw), "here"), Sidecar)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "other"}, "wanted a file of digests"),
        ({"version": 2}, "found version 2"),
        ({"algorithm": "md5"}, "'md5'"),
        ({"files": []}, "not among its files"),
        ({"files": [{"name": "f", "nbytes": 1}] * 2}, "file 'f' comes twice"),
        ({"files": [{"name": "f", "nbytes": -1}]}, r"files\[0\]\.nbytes"),
        ({"tensors": plain()["tensors"] * 2}, "tensor 't' comes twice"),
        ({"tensors": {}}, r"\.tensors"),
        ({"tensor": {"digest": HEX[1:]}}, r"tensors\[0\]\.digest"),
        ({"tensor": {"digest": HEX.replace("a", "g")}}, r"tensors\[0\]\.digest"),
        ({"tensor": {"digest": HEX + "\n"}}, r"tensors\[0\]\.digest"),
        ({"tensor": {"shape": [2**63]}}, r"tensors\[0\]\.shape"),
        ({"tensor": {"nbytes": 1.5}}, r"tensors\[0\]\.nbytes"),
        ({"tensor": {"nbytes": 4}}, r"'t' is said to have 4 bytes, but U8 \[3\] takes 3"),
        ({"tensor": {"dtype": "F64"}}, r"'t' is said to have 3 bytes, but F64 \[3\] takes 24"),
        ({"tensor": {"dtype": "F4"}}, r"'t' is said to have 3 bytes, but F4 \[3\] takes 2"),
        ({"tensor": {"shape": [2**62] * 90}}, "takes more than any memory has"),
        ({"files": [{"name": "f", "nbytes": 2}]}, "do not fit into the bytes of 'f'"),
        ({"tensor": {"name": None}}, r"tensors\[0\]\.name"),
    ],
)
def test_bad_sidecars_are_refused_with_the_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DigestError, match=says):
        decode(json.dumps(plain(**changes)).encode(), "here")


def test_deep_and_long_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = json.dumps(plain())[:-1].encode() + b',"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(DigestError, match="no file of digests"):
        decode(deep, "here")
    monkeypatch.setattr(digests, "LONGEST_SIDECAR", 100)
    with pytest.raises(DigestError, match="more than 100 bytes"):
        decode(encode(Sidecar((), ())) + b" " * 100, "here")


def test_describe_names_files_below_their_folder(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "c", shards=2, tensors=3)
    checkpoint = headers(written.path)
    made = digests.describe(checkpoint, np.zeros((len(checkpoint), 16), np.uint8))
    assert [file.name for file in made.files] == [path.name for path in written.files]
    assert [file.nbytes for file in made.files] == [path.stat().st_size for path in written.files]
    assert [tensor.shape for tensor in made.tensors] == [tuple(s) for _, s, _ in written.tensors.values()]
    assert decode(encode(made), "x") == made
