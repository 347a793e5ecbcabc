"""Device memory: what a load takes, where it comes from, and that all of it goes back."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoints import Row
from support.device import MIB, NO_DEVICE, SMALL, assert_right, call, pools_of
from support.leaks import nothing_left
from support.tensors import raw
from tensorlift import loading
from tensorlift.bench.cases import Case, Spec, write_shards
from tensorlift.errors import OutOfMemoryError

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)


@pytest.fixture
def large(tmp_path: Path) -> Case:
    """150 MiB in 75 tensors."""
    return write_shards(tmp_path / "large", [[Spec(f"t{k}", "U8", (2 * MIB,)) for k in range(75)]])


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def leave_free(nbytes: int) -> torch.Tensor:
    """Takes all memory of the device but about so many bytes."""
    return torch.empty(free_bytes() - nbytes, dtype=torch.uint8, device="cuda")


def equal_to_plain(case_file: str, state: dict[str, torch.Tensor]) -> bool:
    plain = load_file(case_file)
    return set(plain) == set(state) and all(torch.equal(state[name].cpu(), plain[name]) for name in plain)


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


def test_arenas_come_from_a_pool_and_what_the_consumer_allocates_does_not(file: Path) -> None:
    mine, theirs = [], []
    with loading.open(file, device="cuda", **SMALL) as weights:
        for _, tensor in weights:
            # Between two tensors the pool must not be the current one: for any size, on any path.
            mine += [tensor.clone(), torch.empty(100, device="cuda"), torch.empty(30 * MIB, device="cuda")]
            del mine[-1]
            theirs.append(tensor)
    assert pools_of(mine) == {(0, 0)}
    assert len(pools_of(theirs)) == 1
    assert (0, 0) not in pools_of(theirs)


def test_inside_an_engines_own_pool(file: Path, rows: dict[str, Row]) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        before = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        state = loading.load(file, device="cuda", **SMALL)
        streamed = {}
        mine = []
        with loading.open(file, device="cuda", **SMALL) as weights:
            for name, tensor in weights:
                streamed[name] = tensor
                mine.append(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))
    assert_right(state, rows)
    assert_right(streamed, rows)
    assert pools_of([before, *mine]) == {tuple(pool.id)}
    ours = pools_of([*state.values(), *streamed.values()])
    assert tuple(pool.id) not in ours
    assert (0, 0) not in ours


def many_loads(file: str) -> None:
    for _ in range(300):
        state = loading.load(file, device="cuda")
        # Numbers above 256 are objects that end when one reference too many is dropped.
        assert torch.cuda.memory_reserved() > 0
        del state


def test_more_loads_than_torch_has_numbers_that_never_end(file: Path) -> None:
    call(many_loads, str(file))


def test_memory_that_torch_only_caches_is_given_back_for_a_load(large: Case) -> None:
    # Inside a pool torch does not give back what it caches: the load fails there first.
    ballast = leave_free(64 * MIB)
    del ballast
    assert torch.cuda.mem_get_info()[0] < 100 * MIB
    state = loading.load(large.folder, device="cuda")
    assert equal_to_plain(str(large.files[0]), state)


def test_a_load_works_where_its_tensors_just_fit(large: Case) -> None:
    ballast = leave_free(200 * MIB)
    state = loading.load(large.folder, device="cuda")
    assert equal_to_plain(str(large.files[0]), state)
    del state
    with loading.open(large.folder, device="cuda") as weights:
        seen = sum(tensor.nbytes for _, tensor in weights)
    assert seen == large.nbytes
    del ballast
    free_bytes()


def test_a_load_that_does_not_fit_says_so_and_leaves_nothing(large: Case) -> None:
    ballast = leave_free(64 * MIB)
    before = free_bytes()
    with pytest.raises(OutOfMemoryError, match="free"):
        loading.load(large.folder, device="cuda")
    assert before - free_bytes() <= 2 * MIB
    del ballast
    free_bytes()


def test_pinned_memory_stays_small(tmp_path: Path) -> None:
    specs = [Spec(f"t{k}", "U8", (16 * MIB,)) for k in range(40)]
    case = write_shards(tmp_path / "model", [specs])
    state = loading.load(case.folder, device="cuda")
    assert 0 < state.stats.pinned_peak_bytes <= 160 * MIB


def load_twice(file: str) -> dict[str, object]:
    """In a fresh process: whether all bytes are right, and what is left afterwards."""
    good = []
    left = 0
    for turn in range(3):
        before = free_bytes()
        state = loading.load(file, device="cuda", **SMALL)
        good.append(equal_to_plain(file, state))
        with loading.open(file, device="cuda", **SMALL) as weights:
            streamed = {name: tensor.clone() for name, tensor in weights}
        good.append(equal_to_plain(file, streamed))
        del state, streamed
        # What the first turn makes once stays.
        left = before - free_bytes() if turn else 0
    return {"good": good, "left": left}


def test_expandable_segments(file: Path) -> None:
    found = call(load_twice, str(file), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert all(found["good"])
    assert found["left"] <= 2 * MIB


def contexts_after_a_load(file: str, device: str) -> list[int]:
    """In a fresh process: for each device, whether its primary context is there after a load."""
    state = loading.load(file, device=device)
    assert state["t3"].device == torch.device(device)
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for index in range(torch.cuda.device_count()):
        number, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDeviceGet(ctypes.byref(number), index) == 0
        assert driver.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active)) == 0
        found.append(active.value)
    return found


@pytest.mark.skipif(torch.version.hip is not None, reason="asks the CUDA driver")
def test_the_only_context_is_on_the_device_asked_for(file: Path) -> None:
    last = torch.cuda.device_count() - 1
    assert call(contexts_after_a_load, str(file), f"cuda:{last}") == [0] * last + [1]
