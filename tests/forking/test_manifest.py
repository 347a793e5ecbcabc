"""Manifests: what is said is read back, and nothing is believed that contradicts itself."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.errors import ManifestError
from tensorlift.forking import manifest as manifests
from tensorlift.forking.manifest import (
    ITEM_BYTES,
    Layout,
    Manifest,
    ModelKey,
    Offer,
    Region,
    Tensor,
    decode,
    differences,
    encode,
    layout_digest,
    span_bytes,
)

TENSORS = (
    Tensor("a", "bfloat16", (4, 8), (8, 1), 0, 0),
    Tensor("b", "float32", (3,), (1,), 0, 64, "buffer"),
    Tensor("tied", "bfloat16", (4, 8), (8, 1), 0, 0, "parameter", "a"),
    Tensor("transposed", "int8", (2, 5), (1, 2), 1, 6, "derived"),
    Tensor("scalar", "int64", (), (), 1, 0, "buffer"),
    Tensor("empty", "float16", (0, 3), (3, 1), -1, 0),
)


def made(tensors: tuple[Tensor, ...] = TENSORS, **more: Any) -> Manifest:
    return Manifest(
        **{
            "instance": "0" * 31 + "f",
            "epoch": 7,
            "key": ModelKey(model="org/model", tp=(1, 2)),
            "layout": layout_digest(tensors),
            "transports": (Offer("tcp", "127.0.0.1:1234"),),
            "regions": (Region(76), Region(16, "cuda:1")),
            "tensors": tensors,
            **more,
        }
    )


def packed(value: Any) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(value if isinstance(value, bytes) else json.dumps(value).encode()) + packer.flush()


def plain(manifest: Manifest | None = None) -> dict[str, Any]:
    return json.loads(zlib.decompress(encode(manifest or made()), wbits=31))


def test_what_is_written_is_read() -> None:
    assert decode(encode(made()), "seed") == made()
    assert plain()["format"] == "tensorlift.manifest"


names = st.text(max_size=20)
dims = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4)


@settings(deadline=None)
@given(
    st.dictionaries(
        names, st.tuples(st.sampled_from(sorted(ITEM_BYTES)), dims, st.integers(0, 9)), max_size=8
    )
)
def test_any_tensors_come_back(given: dict[str, Any]) -> None:
    tensors, end = [], 0
    for name, (dtype, sizes, gap) in given.items():
        shape, stride = (tuple(part) for part in (zip(*sizes, strict=True) if sizes else ((), ())))
        span = span_bytes(dtype, shape, stride)
        tensors.append(Tensor(name, dtype, shape, stride, 0 if span else -1, end + gap if span else 0))
        end += gap + span
    manifest = made(tuple(tensors), regions=(Region(end),))
    assert decode(encode(manifest), "seed") == manifest
    assert differences(manifest, [Layout(t.name, t.dtype, t.shape, t.stride) for t in tensors[::-1]]) == []


def changed(at: int, **more: Any) -> tuple[Tensor, ...]:
    tensors = list(TENSORS)
    tensors[at] = msgspec.structs.replace(tensors[at], **more)
    return tuple(tensors)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (made(changed(1, offset=65)), "'b' ends at byte 77 of region 0, which has 76"),
        (made(changed(1, region=2)), "'b' is in region 2 of 2"),
        (made(changed(1, region=-1)), "'b' has 12 bytes, and no region"),
        (made(changed(1, shape=(0,))), "'b' has no bytes, and is in region 0"),
        (made(changed(1, name="a")), "'a' is there twice"),
        (made(changed(1, dtype="float3")), "'b' has dtype 'float3', which is unknown here"),
        (made(changed(1, stride=(1, 1))), "'b' has 1 dimension and 2 strides"),
        (made(changed(0, stride=(2**62, 1))), "'a' ends at byte 27670116110564327440 of region 0"),
        (made(changed(0, shape=(2**62, 2**62))), "of region 0, which has 76"),
        (made(changed(2, alias="b")), "'tied' is said to be 'b', which it is not"),
        (made(changed(0, alias="tied")), "'a' is said to be 'tied', which it is not"),
        (made(layout="0" * 64), "the digest of its layout is that of another one"),
        (made(key=ModelKey(model="m", pp=(2, 2))), "rank 2 of 2 in pp"),
        (
            made(regions=(Region(2**63 - 1), Region(2**63 - 1))),
            "its regions have 18,446,744,073,709,551,614 bytes",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(manifest: Manifest, says: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(encode(manifest), "http://seed")
    assert str(caught.value).startswith("http://seed: the manifest contradicts itself: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is cut off or goes on behind its end: 0 bytes came"),
        (b"\x1f\x8b nonsense", "does not decompress"),
        (encode(made())[:-9], "is cut off"),
        (encode(made()) + b"!", "goes on behind its end"),
        (packed(b"[1, 2"), "this is no manifest"),
        (packed(b"\xff"), "this is no manifest"),
        (packed(b"[" * 100_000), "this is no manifest"),
        (packed({}), "wanted a manifest (tensorlift.manifest, version 1), found '', version 0"),
        (packed({"format": "tensorlift.manifest", "version": 2}), "version 2; run one version of tensorlift"),
        (packed({**plain(), "epoch": -1}), "`$.epoch`"),
        (packed({**plain(), "epoch": 2**70}), "`$.epoch`"),
        (packed({**plain(), "instance": "../x"}), "`$.instance`"),
        (packed({**plain(), "regions": [[-1, "cpu"]]}), "`$.regions[0][0]`"),
        (packed({**plain(), "tensors": [["n" * 5000, "int8", [], [], 0, 0]]}), "`$.tensors[0][0]`"),
        (packed({**plain(), "tensors": [["n", "int8", [1] * 65, [1] * 65, 0, 0]]}), "`$.tensors[0][2]`"),
        (packed({**plain(), "tensors": [["n", "int8", [1], [-1], 0, 0]]}), "`$.tensors[0][3][0]`"),
        (packed({**plain(), "tensors": [["n", "int8", [1], [1], 0, 0, "weight"]]}), "`$.tensors[0][6]`"),
    ],
)
def test_what_is_no_manifest_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(raw, "http://seed\n")
    assert str(caught.value).startswith("http://seed\\n: ")
    assert says in str(caught.value)


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "LONGEST_MANIFEST", 1000)
    with pytest.raises(ManifestError, match="more than 1,000 bytes"):
        decode(packed(b" " * 10_000_000), "seed")


@settings(deadline=None)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_damage_is_an_ordinary_error(at: int, bytes_: bytes) -> None:
    text = json.dumps(plain()).encode()
    at %= len(text)
    with contextlib.suppress(ManifestError):
        decode(packed(text[:at] + bytes_ + text[at + len(bytes_) :]), "seed")


def test_differences_are_named() -> None:
    ours = [Layout(t.name, t.dtype, t.shape, t.stride) for t in TENSORS]
    assert differences(made(), ours) == []
    ours[0] = ours[0]._replace(dtype="float16")
    ours[1] = ours[1]._replace(shape=(4,))
    ours[3] = ours[3]._replace(stride=(5, 1))
    ours[5] = ours[5]._replace(name="other")
    assert differences(made(), ours) == [
        "'a': dtype 'float16' here, 'bfloat16' in the seed",
        "'b': shape [4] here, [3] in the seed",
        "'transposed': stride [5, 1] here, [1, 2] in the seed",
        "'other' is not in the seed",
        "'empty' is in the seed only",
    ]
    assert differences(made(), ours, part=True) == differences(made(), ours)[:-1]
    assert differences(made(), [], part=True) == []
    assert differences(made(), [])[-1] == "'empty' is in the seed only"
    many = [Layout(f"x{k}", "int8", (), ()) for k in range(50)]
    assert differences(made(), many)[-1] == f"and {50 + len(TENSORS) - 20} more"


def test_many_tensors() -> None:
    count = 100_000
    tensors = tuple(
        Tensor(
            f"model.layers.{k % 90}.mlp.experts.{k}.down_proj.weight",
            "bfloat16",
            (64, 32),
            (32, 1),
            0,
            k * 4096,
        )
        for k in range(count)
    )
    begin = time.perf_counter()
    raw = encode(made(tensors, regions=(Region(count * 4096),)))
    middle = time.perf_counter()
    assert len(decode(raw, "seed").tensors) == count
    parsed = time.perf_counter() - middle
    print(f"published in {middle - begin:.2f} s, parsed in {parsed:.2f} s, {len(raw)} bytes")
