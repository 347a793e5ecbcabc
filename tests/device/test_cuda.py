"""What only a real CUDA device can show: bytes and ownership. Runs wherever there is one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.checkpoints import Row, Written, random_row, write_safetensors
from support.device import NO_DEVICE, SMALL, assert_right
from support.tensors import raw
from tensorlift import loading
from tensorlift.compat import safe_open
from tensorlift.errors import DeviceError, MismatchError, TruncatedError

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)


@pytest.mark.parametrize(
    "options", [{}, SMALL, {"backend": "MMAP"}, {"backend": ["URING", "PREAD"]}], ids=str
)
def test_every_dtype_comes_right_and_owned(checkpoint: Written, options: dict[str, object]) -> None:
    state = loading.load(checkpoint.path, device="cuda", **options)
    assert_right(state, checkpoint.tensors)
    for name, tensor in state.items():
        nbytes = len(checkpoint.tensors[name][2])
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == nbytes
        assert tensor.storage_offset() == 0
        assert nbytes < 16 or tensor.data_ptr() % 16 == 0, name
        assert not tensor.requires_grad
        assert not tensor.is_inference()


def test_load_into_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    source[5].weight = source[0].weight
    plain = {name: value.detach() for name, value in source.state_dict().items()}
    rows: dict[str, Row] = {
        name: ("F32", tuple(value.shape), raw(value)) for name, value in plain.items() if name != "5.weight"
    }
    path = write_safetensors(tmp_path / "model.safetensors", rows)
    target = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]).to("cuda")
    target[5].weight = target[0].weight
    target[2].to(torch.bfloat16)
    target[3].weight.data = target[3].weight.data.t()
    version = target[1].weight._version
    filled = loading.load_into(target, path)
    assert not filled.missing_keys
    assert not filled.unexpected_keys
    assert target[1].weight._version > version
    for name, value in target.state_dict().items():
        assert torch.equal(value.cpu(), plain[name].to(value.dtype)), name


def test_load_into_checks_before_it_writes(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "m.safetensors", {"a": random_row("F32", [4]), "b": random_row("F32", [5])}
    )
    model = {"a": torch.ones(4, device="cuda"), "b": torch.ones(4, device="cuda")}
    with pytest.raises(MismatchError, match="'b'"):
        loading.load_into(model, path)
    assert all(bool((value == 1).all()) for value in model.values())


def test_safe_open_in_any_order_and_by_slices(file: Path, rows: dict[str, Row]) -> None:
    order = list(rows)
    random.Random(3).shuffle(order)
    with safe_open(file, framework="pt", device="cuda:0") as opened:
        assert_right({name: opened.get_tensor(name) for name in order}, rows)
        part = opened.get_slice("t3")[100:200_000:3]
    whole = torch.frombuffer(bytearray(rows["t3"][2]), dtype=torch.uint8)
    assert torch.equal(part.cpu(), whole[100:200_000:3])


def test_a_truncated_file_is_an_error_and_the_device_goes_on(file: Path, rows: dict[str, Row]) -> None:
    weights = loading.open(file, device="cuda", **SMALL)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 2)
    with pytest.raises(TruncatedError, match=r"big\.safetensors"), weights:
        for _ in weights:
            pass
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_device_that_is_not_there(file: Path) -> None:
    with pytest.raises(DeviceError, match="cuda:63"):
        loading.load(file, device="cuda:63")


def test_files_written_of_the_tensors_have_their_sizes_and_see_no_sharing(
    file: Path, rows: dict[str, Row], tmp_path: Path
) -> None:
    state = loading.load(file, device="cuda")
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(rows)
    # Refuses tensors that share memory.
    save_file(state, tmp_path / "again.safetensors")
    assert abs((tmp_path / "again.safetensors").stat().st_size - file.stat().st_size) < 4096
    torch.save(state["t3"], tmp_path / "one.pt")
    assert state["t3"].nbytes <= (tmp_path / "one.pt").stat().st_size < state["t3"].nbytes + 8192
    torch.save(state, tmp_path / "all.pt")
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert nbytes <= (tmp_path / "all.pt").stat().st_size < nbytes + 1024 * len(rows)
    assert_right(torch.load(tmp_path / "all.pt", map_location="cuda"), rows)
