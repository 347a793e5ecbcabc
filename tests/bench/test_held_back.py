"""What an arena holds back, against a checkpoint that can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorlift.bench.cases import Spec, write_holes
from tensorlift.bench.held_back import held_back, held_back_of_model, show_held_back

MIB = 1 << 20


def test_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two files of eight tensors of 1 MiB: arenas of 4 MiB and a page to start in hold three and then four.
    parts = [[Spec(f"t{file}{k}", "U8", (MIB,)) for k in range(8)] for file in range(2)]
    case = write_holes(tmp_path, parts)
    assert case.tensors == 16
    found = held_back(case.folder, 2 * MIB + 4096, every=8)
    # The first tensor of each file is kept, and with it the one beside it in its arena.
    assert (found.tensors_kept, found.bytes_kept, found.arenas_held) == (2, 2 * MIB, 2)
    assert 2 * MIB <= found.beyond <= 2 * MIB + 2 * 4096
    assert found.arenas == 8
    assert 16 * MIB <= found.arena_bytes <= 16 * MIB + 16 * 4096
    show_held_back([found])
    assert "held beyond" in capsys.readouterr().out


def test_one_arena_a_tensor_holds_nothing_back(tmp_path: Path) -> None:
    case = write_holes(tmp_path, [[Spec(f"t{k}", "U8", (MIB,)) for k in range(100)]])
    assert held_back(case.folder, MIB, every=50).beyond <= 2 * 4096


def test_larger_arenas_hold_back_more() -> None:
    small, large = held_back_of_model(1, 2, [16 * MIB, 256 * MIB])
    assert small.tensors_kept == large.tensors_kept == 8
    assert small.bytes_kept == large.bytes_kept
    assert small.beyond < large.beyond
