"""One invariant: any bytes are parsed, or refused with an allowed error, just as a slow reference does."""

import json
import math
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.checkpoints import BITS
from support.headers import RefusedError, Row, parsed_in_both_ways, reference
from tensorlift.errors import HeaderError, TruncatedError
from tensorlift.format.dtypes import ALL
from tensorlift.format.header import PREFIX_BYTES, header_length

# How long an example takes says nothing on a shared machine.
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def ours(content: bytes) -> tuple[dict[str, str] | None, list[Row]]:
    length = header_length(content[:PREFIX_BYTES], len(content), "x")
    header = parsed_in_both_ways(content[8 : 8 + length], len(content), "x")
    codes = [ALL[i].code for i in header.dtypes]
    rows = zip(
        header.names,
        codes,
        map(tuple, header.shapes),
        header.starts.tolist(),
        header.sizes.tolist(),
        strict=True,
    )
    return header.metadata, list(rows)


def agree(content: bytes) -> None:
    try:
        expected = reference(content)
    except RefusedError:
        with pytest.raises((HeaderError, TruncatedError)) as caught:
            ours(content)
        assert str(caught.value).isprintable()
    else:
        assert ours(content) == expected


def joined(header: bytes, data_bytes: int, claim: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if claim is None else claim) + header + bytes(data_bytes)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def headers(draw) -> tuple[dict, int]:
    """A good header as an object, its keys in any order, and the bytes of data it describes."""
    rows, at = [], 0
    for name in draw(st.lists(NAMES.filter(lambda n: n != "__metadata__"), unique=True, max_size=5)):
        code, shape = draw(st.sampled_from(sorted(BITS))), draw(SHAPES)
        if math.prod(shape) * BITS[code] % 8:
            code = "U8"
        size = math.prod(shape) * BITS[code] // 8
        rows.append((name, {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}))
        at += size
    if draw(st.booleans()):
        rows.append(("__metadata__", draw(st.dictionaries(NAMES, NAMES, max_size=3))))
    return dict(draw(st.permutations(rows))), at


@FUZZ
@given(headers(), st.booleans(), st.integers(0, 9))
def test_good_headers_are_taken(header, ascii_only, padding):
    head, data_bytes = header
    raw = json.dumps(head, ensure_ascii=ascii_only).encode() + b" " * padding
    content = joined(raw, data_bytes)
    assert ours(content) == reference(content)


@FUZZ
@given(st.binary(max_size=300))
def test_any_bytes(content):
    agree(content)


@FUZZ
@given(st.binary(max_size=100), st.integers(0, 20))
def test_any_bytes_after_a_right_length(raw, data_bytes):
    agree(joined(b"{" + raw, data_bytes))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(0, 9)
    | st.floats(allow_nan=True)
    | st.text(max_size=4)
    | st.sampled_from(sorted(BITS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "extra"])
OFTEN_RIGHT = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(BITS)) | JSON,
        "shape": SHAPES | JSON,
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2) | JSON,
        "extra": JSON,
    },
)


@FUZZ
@given(st.dictionaries(NAMES | st.just("__metadata__"), OFTEN_RIGHT | JSON, max_size=4), st.integers(0, 12))
def test_json_that_is_nearly_a_header(head, data_bytes):
    agree(joined(json.dumps(head).encode(), data_bytes))


@settings(FUZZ, max_examples=400)
@given(headers(), st.data())
def test_mutations_of_good_headers(header, data):
    head, data_bytes = header
    content = bytearray(joined(json.dumps(head, ensure_ascii=False).encode(), data_bytes))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["byte", "cut", "insert", "drop", "double", "length"]))
        if kind == "byte" and at < len(content):
            content[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'{}[]",:\\0123u ')))
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif kind == "drop":
            del content[at : at + data.draw(st.integers(1, 20))]
        elif kind == "double":
            content[at:at] = content[at : at + data.draw(st.integers(1, 80))]
        elif kind == "length":
            length = int.from_bytes(content[:8], "little") + data.draw(st.integers(-9, 9))
            content[:8] = struct.pack("<Q", max(0, length) % 2**64)
    agree(bytes(content))


@FUZZ
@given(headers(), st.integers(0, 60))
def test_every_truncation_is_refused(header, missing):
    head, data_bytes = header
    content = joined(json.dumps(head).encode(), data_bytes)
    cut = content[: max(0, len(content) - 1 - missing)]
    with pytest.raises((HeaderError, TruncatedError)):
        ours(cut)
