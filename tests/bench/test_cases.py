"""Synthetic checkpoints: the files that were promised, the same bytes every time, never half of them."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from tensorlift import load
from tensorlift.bench import cases
from tensorlift.bench.geometry import MODELS, Model, Spec
from tensorlift.bench.parity import compare_bytes
from tensorlift.errors import FileError, MachineError, RequestError
from tensorlift.sources import writing


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of 4 layers and 18 tensors, known under the name that is given back."""

    def specs(layers: int) -> list[Spec]:
        found = [Spec("z.embed", "BF16", (64, 8))]
        for i in range(layers):
            found += [
                Spec(f"layers.{i}.weight", "F8_E4M3", (32, 16)),
                Spec(f"layers.{i}.scale", "F32", (2, 3)),
                Spec(f"layers.{i}.packed", "U8", (5, 7)),
                Spec(f"layers.{i}.norm", "BF16", (16,)),
            ]
        return [*found, Spec("a.head", "BF16", (8, 64))]

    monkeypatch.setitem(MODELS, "tiny", Model("tiny", 4, "for tests", lambda n: iter(specs(n))))
    return "tiny"


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


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


def test_loads_with_ours_and_with_safetensors(tmp_path: Path, tiny: str) -> None:
    case = cases.write_model(tmp_path, tiny, shards=3)
    state = load(tmp_path, device="cpu")
    assert compare_bytes(state, case.files) == case.tensors == 18
    assert all(torch.isfinite(tensor.float()).all() for tensor in state.values())
    assert all(tensor.view(torch.uint8).any() for tensor in state.values() if tensor.dim())


def test_layers_cut_the_model(tmp_path: Path, tiny: str) -> None:
    case = cases.write_model(tmp_path, tiny, layers=2)
    assert {name for name in load_file(case.files[0]) if name.startswith("layers.")} == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("weight", "scale", "packed", "norm")
    }


def test_shards_are_even_and_indexed(tmp_path: Path) -> None:
    specs = [Spec(f"t{i}", "BF16", (64, 8)) for i in range(10)]
    case = cases.write_shards(tmp_path, cases.in_shards(specs, 3))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == case.nbytes == 10240
    assert [sum(v == f.name for v in index["weight_map"].values()) for f in case.files] == [4, 4, 2]


def test_shards_are_cut_as_published() -> None:
    parts = cases.in_shards(MODELS["llama-3-8b"].specs(), None)
    # The published checkpoint has 4 files.
    assert len(parts) == 4
    assert all(sum(spec.nbytes for spec in part) <= writing.SHARD_BYTES for part in parts)


def test_file_is_in_the_order_of_the_library_that_writes_them(tmp_path: Path, tiny: str) -> None:
    case = cases.write_model(tmp_path / "a", tiny)
    again = tmp_path / "again.safetensors"
    from safetensors.torch import save_file

    save_file(load_file(case.files[0]), again, metadata={"format": "pt"})
    assert list(_entries(again)) == list(_entries(case.files[0]))


def _entries(file: Path) -> dict[str, object]:
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    return dict(sorted(header.items(), key=lambda entry: entry[1]["data_offsets"]))


def test_bytes_depend_on_the_seed_alone(tmp_path: Path, tiny: str) -> None:
    folders = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        cases.write_model(tmp_path / name, tiny, shards=2, seed=seed)
        folders.append(digests(tmp_path / name))
    assert folders[0] == folders[1]
    changed = {name for name in folders[0] if folders[0][name] != folders[2][name]}
    assert changed == {name for name in folders[0] if name.endswith(".safetensors")}


def test_tensors_of_one_shape_differ(tmp_path: Path) -> None:
    # 33 parts of the size in which files are written, so that the random block is laid down 16 times.
    starts = [cases._place(file, part << 25, cases._BLOCK_BYTES) for file in range(8) for part in range(64)]
    assert len(set(starts)) == len(starts)
    specs = [Spec(f"t{i}", "BF16", (100,)) for i in range(50)]
    case = cases.write_shards(tmp_path, [specs])
    assert (
        len({tensor.view(torch.uint8).numpy().tobytes() for tensor in load_file(case.files[0]).values()})
        == 50
    )


def test_refuses_to_overwrite(tmp_path: Path, tiny: str) -> None:
    cases.write_model(tmp_path, tiny, shards=3)
    (tmp_path / "config.json").write_text("{}")
    before = digests(tmp_path)
    with pytest.raises(RequestError, match="holds a checkpoint already"):
        cases.write_model(tmp_path, tiny, seed=1)
    assert digests(tmp_path) == before
    cases.write_model(tmp_path, tiny, seed=1, force=True)
    assert sorted(digests(tmp_path)) == ["config.json", "model.safetensors"]


def test_no_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    monkeypatch.setattr(
        writing.shutil, "disk_usage", lambda _: writing.shutil._ntuple_diskusage(9000, 8999, 1)
    )
    with pytest.raises(
        MachineError, match=r"kB are to be written, 1 B are free; make room, or name a folder elsewhere"
    ):
        cases.write_model(tmp_path, tiny)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_may_be_under_way_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str, is_alone: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    other = tmp_path / ".tensorlift-unfinished-of-another-run"
    other.mkdir()
    if not is_alone:
        monkeypatch.setattr(writing.fcntl, "flock", refuse)
    cases.write_model(tmp_path, tiny)
    assert other.exists() is not is_alone


def test_interrupted_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    write_file = cases._write_file

    def interrupted(file: Path, specs: object, block: object, number: int, pool: object) -> None:
        if number == 2:
            assert list(tmp_path.glob("*.safetensors")) == []
            raise KeyboardInterrupt
        write_file(file, specs, block, number, pool)  # type: ignore[arg-type]

    monkeypatch.setattr(cases, "_write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cases.write_model(tmp_path, tiny, shards=3)
    assert list(tmp_path.iterdir()) == []


def test_killed_run_is_seen_as_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    """Whatever number of files have got their names when the process is gone, there is no checkpoint."""
    rename, unlink = Path.rename, Path.unlink
    for allowed in range(4):
        left = [allowed]

        def limited(self: Path, target: Path, left: list[int] = left) -> Path:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", limited)
        monkeypatch.setattr(Path, "unlink", lambda self: None)  # a killed process tidies nothing up
        with pytest.raises(KeyboardInterrupt):
            cases.write_model(tmp_path / str(allowed), tiny, shards=3)
        with pytest.raises(FileError):
            load(tmp_path / str(allowed), device="cpu")
        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(Path, "unlink", unlink)
        # The next run clears what was left.
        cases.write_model(tmp_path / str(allowed), tiny, shards=3, force=True)
        assert len(load(tmp_path / str(allowed), device="cpu")) == 18
        assert len(list((tmp_path / str(allowed)).iterdir())) == 4


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(
        writing.shutil, "disk_usage", lambda _: writing.shutil._ntuple_diskusage(1 << 40, 0, nbytes)
    )


def test_force_without_room_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    cases.write_model(tmp_path / "m", tiny, shards=2)
    before = digests(tmp_path / "m")
    blocks = sum(file.stat().st_blocks * 512 for file in (tmp_path / "m").iterdir())
    huge = Spec("huge", "U8", (blocks + 1,))
    free(monkeypatch, 0)
    with pytest.raises(MachineError, match="are free"):
        cases.write_shards(tmp_path / "m", [[huge]], keep=False)
    assert digests(tmp_path / "m") == before
    # What the old one takes counts as room.
    case = cases.write_model(tmp_path / "m", tiny, seed=1, force=True)
    assert sorted(digests(tmp_path / "m")) == [case.files[0].name]


def test_force_keeps_the_old_one_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    cases.write_model(tmp_path, tiny, shards=2)
    before = digests(tmp_path)
    monkeypatch.setattr(cases, "_write_file", lambda *_: (_ for _ in ()).throw(OSError(5, "bad disk")))
    with pytest.raises(MachineError, match="cannot write: bad disk"):
        cases.write_model(tmp_path, tiny, force=True)
    assert digests(tmp_path) == before


def test_files_of_others_stay(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "download.safetensors.unfinished").write_text("half of something")
    (tmp_path / "folder.unfinished").mkdir()
    cases.write_model(tmp_path, tiny)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "download.safetensors.unfinished",
        "folder.unfinished",
        "model.safetensors",
    ]


def test_a_second_run_into_one_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    write_file = cases._write_file

    def and_another(*arguments: Any) -> None:
        with pytest.raises(RequestError, match="another run is writing"):
            cases.write_model(tmp_path / "m", tiny, force=True)
        write_file(*arguments)

    monkeypatch.setattr(cases, "_write_file", and_another)
    cases.write_model(tmp_path / "m", tiny, shards=2)
    assert len(load(tmp_path / "m", device="cpu")) == 18


@pytest.mark.parametrize("name", ["file", "file/m", "n" * 300, "/proc/x", "/proc/x/y"])
def test_a_place_that_cannot_be_is_named(tmp_path: Path, tiny: str, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises((RequestError, MachineError), match=Path(name).name[:20]):
        cases.write_model(tmp_path / name, tiny, force=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_the_name_of_a_file_is_named(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "x.safetensors").mkdir()
    for force in (False, True):
        with pytest.raises(RequestError, match=r"x\.safetensors is a folder"):
            cases.write_model(tmp_path, tiny, force=force)


def test_a_run_without_room_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    free(monkeypatch, 1)
    with pytest.raises(MachineError, match="are free"):
        cases.write_model(tmp_path / "a" / "b", tiny)
    free(monkeypatch, 1 << 30)
    monkeypatch.setattr(cases, "_write_file", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(MachineError, match="full"):
        cases.write_model(tmp_path / "a" / "b", tiny)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": "gpt"}, "no geometry is called 'gpt'; there are qwen3-30b-a3b"),
        ({"model": "llama-3-8b", "layers": 33}, "llama-3-8b has 32 layers, 33"),
        ({"model": "tiny", "shards": 19}, "19 shards cannot be made of 18 tensors"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, tiny: str, arguments: dict[str, object], says: str
) -> None:
    assert tiny
    with pytest.raises(RequestError, match=says):
        cases.write_model(tmp_path, **arguments)  # type: ignore[arg-type]
