"""slices= on a device: rows are packed in the slots, whatever reads them, and copied as one."""

from __future__ import annotations

import pytest
import torch

from support import standin
from support.checkpoints import Written, random_row, write_safetensors
from support.parts import expected, random_parts
from support.tensors import raw
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.options import BACKENDS

KIB, MIB = 1 << 10, 1 << 20
KINDS = {"cuda": abi.DEVICE_CUDA, "hip": abi.DEVICE_HIP}
SMALL = {
    "chunk_size": 64 * KIB, "slot_size": 256 * KIB, "pinned_bytes": MIB, "arena_size": MIB,
    "buffer_size": 3 * MIB,
}  # fmt: skip


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "CUFILE"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_reader(kind: str, backend: str, checkpoint: Written) -> None:
    why = abi.library().backend_not_built(backend)
    why = why or abi.library().backend_probe(backend, str(checkpoint.files[0]))
    if why is not None:
        pytest.skip(f"{backend}: {why}")
    with standin.device(KINDS[kind]) as device:
        device.driver.set_copy_jitter_us(800, 3)
        parts = random_parts(checkpoint.tensors, 7)
        state = loading.load(checkpoint.path, device="cuda:0", slices=parts, backend=backend, **SMALL)
        assert list(state) == list(checkpoint.tensors)
        for name, row in checkpoint.tensors.items():
            assert raw(state[name]) == expected(row, parts.get(name)), name
            nbytes = state[name].nbytes
            assert state[name].untyped_storage().nbytes() == nbytes
            assert nbytes < 16 or state[name].data_ptr() % 16 == 0
        assert state.stats.bytes == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("kind", KINDS)
def test_open_and_load_into(kind: str, checkpoint: Written) -> None:
    parts = random_parts(checkpoint.tensors, 8)
    with standin.device(KINDS[kind], cpu_too=True):
        with loading.open(checkpoint.path, device="cuda:0", slices=parts, **SMALL) as weights:
            found = dict(weights)
        into = {name: torch.empty_like(tensor) for name, tensor in found.items()}
        loading.load_into(into, checkpoint.path, slices=parts, **SMALL)
        for name, row in checkpoint.tensors.items():
            for tensor in (found[name], into[name]):
                assert raw(tensor) == expected(row, parts.get(name)), name


def test_rows_longer_than_a_slot(tmp_path) -> None:  # type: ignore[no-untyped-def]
    row = random_row("U8", [5, 2 * MIB], 1)
    path = write_safetensors(tmp_path / "x.safetensors", {"a": row})
    part = (1, 100, 100 + MIB)
    with standin.device(abi.DEVICE_CUDA) as device:
        state = loading.load(path, device="cuda:0", slices={"a": part}, **SMALL)
        assert raw(state["a"]) == expected(row, part)
        assert device.driver.registered_bytes() == 0
