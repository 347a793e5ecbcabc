"""What a rank of tensor parallelism reads: small tensors by hand, and a real model's experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorlift import sources
from tensorlift.bench.cases import Spec, write_holes
from tensorlift.bench.geometry import MODELS
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.plan.tensor_parallel import WAYS, Portion, tensor_parallel_portion, tensor_parallel_slices

PAGE = 4096


def holes(folder: Path, *specs: Spec) -> Checkpoint:
    return sources.read_headers(sources.find(str(write_holes(folder, [specs]).folder)))


@pytest.mark.parametrize(
    ("name", "shape", "own"),
    [
        ("layers.0.q_proj.weight", (64, 4096), 64 * 4096 // 4),
        ("layers.0.q_proj.bias", (4096,), 1024),
        ("layers.0.o_proj.weight", (64, 4096), 64 * 4096 // 4),
        ("layers.0.o_proj.bias", (4096,), 4096),
        ("layers.0.norm.weight", (4096,), 4096),
        ("layers.0.mlp.gate.weight", (64, 64), 64 * 64),
        ("embed_tokens.weight", (10, 10), 30),
        ("layers.0.up_proj.weight_scale", (3, 8), 24),
        ("layers.0.up_proj.input_scale", (), 1),
        ("layers.0.down_proj.stacked", (8, 8, 8), 512),
    ],
)
def test_what_is_cut(tmp_path: Path, name: str, shape: tuple[int, ...], own: int) -> None:
    share = tensor_parallel_portion(holes(tmp_path, Spec(name, "U8", shape)), 4)
    assert share.own == own
    assert own <= share.read <= max(Spec(name, "U8", shape).nbytes, own)


def test_columns_are_read_in_pages_and_with_their_gaps(tmp_path: Path) -> None:
    # Rows of 8 pages: a quarter is 2 pages, and a page more where it does not begin on one.
    wide = tensor_parallel_portion(holes(tmp_path / "wide", Spec("o_proj.weight", "U8", (16, 8 * PAGE))), 4)
    assert wide == Portion(16 * 2 * PAGE, 16 * 3 * PAGE)
    # Rows of one page: what lies between is less than that, and is read too.
    narrow = tensor_parallel_portion(holes(tmp_path / "narrow", Spec("o_proj.weight", "U8", (16, PAGE))), 4)
    assert narrow.own == 16 * PAGE // 4
    assert 15 * PAGE < narrow.read <= 16 * PAGE


def test_one_rank_reads_all(tmp_path: Path) -> None:
    checkpoint = holes(tmp_path, Spec("q_proj.weight", "BF16", (8, 8)), Spec("o_proj.weight", "BF16", (8, 8)))
    assert tensor_parallel_portion(checkpoint, 1) == Portion(256, 256)


def test_eight_ranks_read_two_fifths_of_qwens_experts(tmp_path: Path) -> None:
    specs = [spec for spec in MODELS["qwen3-30b-a3b"].specs(1) if ".experts." in spec.name]
    share = tensor_parallel_portion(holes(tmp_path, *specs), 8)
    total = sum(spec.nbytes for spec in specs)
    assert share.own * 8 == total
    # Rows of down_proj are 1,536 bytes: all of it is read, and an eighth of gate_proj and up_proj.
    assert share.read / total == pytest.approx(1 / 3 + 2 / 3 / 8, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_slices_of_all_ranks_make_each_tensor_once(tmp_path: Path, ranks: int) -> None:
    specs = [
        Spec("q_proj.weight", "BF16", (64, 32)),
        Spec("o_proj.weight", "BF16", (32, 64)),
        Spec("norm.weight", "BF16", (64,)),
        Spec("k_proj.bias", "BF16", (1,)),
        Spec("down_proj.weight", "F4", (4, 34)),
    ]
    checkpoint = holes(tmp_path, *specs)
    shapes = {spec.name: spec.shape for spec in specs}
    by_rank = [tensor_parallel_slices(checkpoint, rank, ranks) for rank in range(ranks)]
    for name, shape in shapes.items():
        parts = [found[name] for found in by_rank]
        if name in ("norm.weight", "k_proj.bias") or ranks == 1:
            assert parts == [None] * ranks
            continue
        cuts = [part for part in parts if part is not None]
        assert len(cuts) == ranks
        assert {dim for dim, _, _ in cuts} == {0 if name == "q_proj.weight" else 1}
        bounds = [0, *(stop for _, _, stop in cuts)]
        assert [start for _, start, _ in cuts] == bounds[:-1]
        assert bounds[-1] == shape[cuts[0][0]]
        # Items below a byte are cut where bytes are.
        assert all(bound % 2 == 0 for bound in bounds) or name != "down_proj.weight"


def test_what_is_cut_in_one_way_only(tmp_path: Path) -> None:
    specs = [Spec(f"{name}.weight", "U8", (64, 8 * PAGE)) for name in ("q_proj", "o_proj", "other")]
    checkpoint = holes(tmp_path, *specs)
    portions = [tensor_parallel_portion(checkpoint, 4, (way,)) for way in WAYS]
    whole = tensor_parallel_portion(checkpoint, 4)
    assert whole == Portion(sum(one.own for one in portions), sum(one.read for one in portions))
    for way, name in zip(WAYS, ("q_proj", "o_proj", "other"), strict=True):
        assert list(tensor_parallel_slices(checkpoint, 1, 4, (way,))) == [f"{name}.weight"]
