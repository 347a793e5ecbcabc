"""What only a real CUDA device can show: bytes, ownership, streams, memory. Runs wherever there is one."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from support.checkpoints import Row, Written, random_checkpoint, random_row, write_safetensors
from support.leaks import nothing_left
from support.tensors import raw
from tensorlift import loading
from tensorlift.compat import safe_open
from tensorlift.errors import DeviceError, MismatchError, TruncatedError

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device here", allow_module_level=True)

KIB, MIB = 1 << 10, 1 << 20
# Small slots and arenas: many copies, and blocks that are used again, also for small files.
SMALL = {
    "chunk_size": 64 * KIB, "slot_size": 256 * KIB, "pinned_bytes": MIB, "arena_size": MIB,
    "buffer_size": 3 * MIB,
}  # fmt: skip
# About a second on an H200: far longer than a whole load of these files.
LONG_WORK_CYCLES = 1_000_000_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path / "checkpoint", shards=3, tensors=60, seed=5, elements=60_000)


@pytest.fixture
def rows() -> dict[str, Row]:
    return {f"t{k}": random_row("U8", [MIB], k) for k in range(24)}


@pytest.fixture
def file(tmp_path: Path, rows: dict[str, Row]) -> Path:
    return write_safetensors(tmp_path / "big.safetensors", rows)


def assert_right(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, Row]) -> None:
    assert set(tensors) == set(rows)
    for name, (_, _, expected) in rows.items():
        assert tensors[name].is_cuda, name
        assert raw(tensors[name].cpu()) == expected, name


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


def test_streaming_gives_blocks_back_while_it_goes_on(file: Path, rows: dict[str, Row]) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    peak = 0
    with loading.open(file, device="cuda", **SMALL) as weights:
        for name, tensor in weights:
            assert raw(tensor.cpu()) == rows[name][2]
            peak = max(peak, torch.cuda.memory_allocated() - before)
            del tensor
    gc.collect()
    assert peak <= SMALL["buffer_size"] + SMALL["arena_size"]
    assert torch.cuda.memory_allocated() == before


def test_a_lagging_consumer_reads_every_block_before_it_is_written_again(
    file: Path, rows: dict[str, Row]
) -> None:
    results = {name: torch.empty(MIB, dtype=torch.uint8, device="cuda") for name in rows}
    with torch.cuda.stream(torch.cuda.Stream()) as _, loading.open(file, device="cuda", **SMALL) as weights:
        torch.cuda._sleep(LONG_WORK_CYCLES)
        for name, tensor in weights:
            results[name].copy_(tensor)
    torch.cuda.synchronize()
    assert_right(results, rows)


def test_nothing_is_written_after_an_early_end(file: Path) -> None:
    for _ in range(20):
        weights = loading.open(file, device="cuda", **SMALL)
        next(iter(weights))
        weights.close()
        # What torch hands out now may be what the load had: it must stay as it is filled.
        mine = [torch.full((MIB,), 77, dtype=torch.uint8, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        assert all(bool((block == 77).all()) for block in mine)


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


def test_other_surroundings_do_not_matter(checkpoint: Written) -> None:
    with torch.inference_mode(), torch.device("meta"):
        state = loading.load(checkpoint.path, device="cuda")
    assert_right(state, checkpoint.tensors)
    assert not any(tensor.is_inference() for tensor in state.values())


def test_memory_is_as_if_the_load_had_never_been(file: Path) -> None:
    loading.load(file, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with nothing_left():
        for _ in range(5):
            state = loading.load(file, device="cuda", arena_size=4 * MIB)
            kept = state["t3"].clone()
            del state
            gc.collect()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # The clone's own segment of torch's allocator.
    assert before - torch.cuda.mem_get_info()[0] <= 4 * MIB
    assert kept.shape == (MIB,)


def test_what_the_consumer_allocates_is_not_in_the_loaders_pool(file: Path) -> None:
    mine = []
    with loading.open(file, device="cuda", **SMALL) as weights:
        for _, tensor in weights:
            mine.append(tensor.clone())
    pools = {
        segment["segment_pool_id"]
        for segment in torch.cuda.memory_snapshot()
        for block in mine
        if segment["address"] <= block.data_ptr() < segment["address"] + segment["total_size"]
    }
    assert pools == {(0, 0)}


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
