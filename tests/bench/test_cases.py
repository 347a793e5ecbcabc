"""Synthetic checkpoints have the geometry and the counts that they promise, and the same bytes every time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import safetensors

from tensorlift.bench import cases


def test_small_tensors_have_their_shapes(tmp_path: Path) -> None:
    case = cases.nvfp4_moe(tmp_path, 10, 2, (8, 1024), (8, 128))
    assert (case.tensors, case.nbytes) == (40, 10 * (8 * 1024 + 8 * 128 + 8))
    shapes = set()
    for file in case.files:
        with safetensors.safe_open(str(file), framework="np") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                part = reader.get_slice(name)
                shapes.add((name.rsplit(".", 1)[1], part.get_dtype(), tuple(part.get_shape())))
    assert shapes == {
        ("input_scale", "F32", ()),
        ("weight_scale_2", "F32", ()),
        ("weight", "U8", (8, 1024)),
        ("weight_scale", "F8_E4M3", (8, 128)),
    }


def test_qwen_geometry_by_layers() -> None:
    one, two = (list(cases._qwen3_specs(layers)) for layers in (1, 2))
    assert len(two) - len(one) == 9 + 3 * 128
    # The published count of 18,867 tensors belongs to 48 layers.
    assert len(one) + 47 * (len(two) - len(one)) == 18867
    # 30.5 billion parameters, 61.1 GB in bf16.
    total = sum(s.nbytes for s in one) + 47 * (sum(s.nbytes for s in two) - sum(s.nbytes for s in one))
    assert round(total / 1e9, 1) == 61.1


def test_shards_are_even_and_indexed(tmp_path: Path) -> None:
    specs = [cases.Spec(f"t{i}", "BF16", (64, 8)) for i in range(10)]
    case = cases.write_shards(tmp_path, cases._split(specs, 3))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == case.nbytes == 10240
    assert [sum(v == f.name for v in index["weight_map"].values()) for f in case.files] == [4, 4, 2]


def test_bytes_depend_on_nothing_but_the_geometry(tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        case = cases.nvfp4_moe(tmp_path / name, 3, 1, (8, 1024), (8, 128))
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in case.files])
    assert digests[0] == digests[1]
