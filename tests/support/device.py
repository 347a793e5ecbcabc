"""What tests on a real device share. Run as a module it calls one function, for device.call()."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import Row
from support.tensors import raw
from tensorlift import loading
from tensorlift.errors import TensorliftError

KIB, MIB = 1 << 10, 1 << 20
# Small slots and arenas: many copies, and blocks that are used again, also for small files.
SMALL = {
    "chunk_size": 64 * KIB, "slot_size": 256 * KIB, "pinned_bytes": MIB, "arena_size": MIB,
    "buffer_size": 3 * MIB,
}  # fmt: skip
NO_DEVICE = "torch finds no CUDA device here"
_TESTS = Path(__file__).resolve().parents[1]


def assert_right(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, Row]) -> None:
    assert set(tensors) == set(rows)
    for name, (_, _, expected) in rows.items():
        assert tensors[name].is_cuda, name
        assert raw(tensors[name].cpu()) == expected, name


def pools_of(tensors: Iterable[torch.Tensor]) -> set[tuple[int, ...]]:
    """The pools of torch's allocator that the tensors' memory belongs to; (0, 0) is the usual one."""
    segments = torch.cuda.memory_snapshot()
    return {
        tuple(segment["segment_pool_id"])
        for tensor in tensors
        for segment in segments
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
    }


def said_by(call: Callable[..., Any], *arguments: Any, **more: Any) -> list[str]:
    """Class and message of the package's error, empty where there is none; any other is not caught."""
    try:
        call(*arguments, **more)
    except TensorliftError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def said_by_load(path: str) -> list[str]:
    """Of a load to the device: here, for call() where there is none."""
    return said_by(loading.load, path, device="cuda")


def call(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """What the function of a test module returns in a fresh process, where no device was touched yet.

    Arguments and result are plain JSON values; AssertionError where it raises.
    """
    request = json.dumps([function.__code__.co_filename, function.__name__, arguments])
    path = os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "support.device", request],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def _answer(file: str, name: str, arguments: list[Any]) -> None:
    spec = importlib.util.spec_from_file_location("called_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["called_module"] = module
    spec.loader.exec_module(module)
    print(json.dumps(getattr(module, name)(*arguments)))


if __name__ == "__main__":
    _answer(*json.loads(sys.argv[1]))
