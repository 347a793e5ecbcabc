"""The order of work on a device: streams, modes, current devices, graphs, and what a trace shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.checkpoints import Row, Written
from support.device import MIB, NO_DEVICE, SMALL, assert_right, call
from tensorlift import loading
from tensorlift.errors import RequestError

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)

# About a second on an H200: far longer than a whole load of these files.
LONG_WORK_CYCLES = 1_000_000_000


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


def test_tensors_are_ready_in_the_stream_that_was_current(file: Path, rows: dict[str, Row]) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_WORK_CYCLES // 10)
        state = loading.load(file, device="cuda", **SMALL)
        copies = {name: tensor.clone() for name, tensor in state.items()}
    # As with any tensor: another stream waits for the first.
    torch.cuda.current_stream().wait_stream(side)
    again = {name: tensor.clone() for name, tensor in state.items()}
    torch.cuda.synchronize()
    assert_right(copies, rows)
    assert_right(again, rows)


def test_load_into_comes_after_what_the_stream_has_to_do(file: Path, rows: dict[str, Row]) -> None:
    state = {name: torch.empty(MIB, dtype=torch.uint8, device="cuda") for name in rows}
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG_WORK_CYCLES // 10)
        for tensor in state.values():
            tensor.fill_(77)
        loading.load_into(state, file, **SMALL)
        copies = {name: tensor.clone() for name, tensor in state.items()}
    torch.cuda.synchronize()
    assert_right(copies, rows)
    assert_right(state, rows)


@pytest.mark.parametrize("inference", [False, True])
def test_other_surroundings_do_not_matter(checkpoint: Written, inference: bool) -> None:
    with torch.inference_mode(inference), torch.device("meta"):
        state = loading.load(checkpoint.path, device="cuda")
        with loading.open(checkpoint.path, device="cuda", **SMALL) as weights:
            streamed = dict(weights)
    for tensors in (state, streamed):
        assert_right(tensors, checkpoint.tensors)
        assert not any(tensor.is_inference() for tensor in tensors.values())
    number = next(tensor for tensor in state.values() if tensor.dtype is torch.float32)
    assert number.requires_grad_().requires_grad


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device here")
def test_another_current_device(file: Path, rows: dict[str, Row]) -> None:
    with torch.cuda.device(0):
        state = loading.load(file, device="cuda:1", **SMALL)
        with loading.open(file, device="cuda:1", **SMALL) as weights:
            streamed = {name: tensor.clone() for name, tensor in weights}
        assert torch.cuda.current_device() == 0
    for tensors in (state, streamed):
        assert {tensor.device for tensor in tensors.values()} == {torch.device("cuda", 1)}
        assert_right(tensors, rows)
    with torch.cuda.device(1):
        assert {t.device.index for t in loading.load(file, device="cuda").values()} == {1}


def loads_in_a_graph(file: str) -> list[str]:
    """In a fresh process: what loads raise while a graph is captured, and whether the graph is good then."""
    target = {f"t{k}": torch.zeros(MIB, dtype=torch.uint8, device="cuda") for k in range(24)}
    count = torch.zeros(1, device="cuda")
    loading.load(file, device="cuda")
    # Made before: a pass that begins inside.
    opened = loading.open(file, device="cuda")
    torch.cuda.synchronize()
    said = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count.add_(1)
        for act in (
            lambda: loading.load(file, device="cuda"),
            lambda: next(iter(opened)),
            lambda: loading.load_into(target, file),
        ):
            try:
                act()
                said.append("nothing")
            except RequestError as error:
                said.append(str(error))
    graph.replay()
    torch.cuda.synchronize()
    assert count.item() == 1
    # Afterwards all is as before.
    assert len(loading.load(file, device="cuda")) == 24
    return said


def test_a_load_while_a_graph_is_captured_is_refused(file: Path) -> None:
    said = call(loads_in_a_graph, str(file))
    assert len(said) == 3
    assert all("captur" in text for text in said), said


@pytest.mark.filterwarnings("ignore")
def test_no_copy_on_the_device_and_no_wait_a_tensor(checkpoint: Written) -> None:
    loading.load(checkpoint.path, device="cuda")
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        state = loading.load(checkpoint.path, device="cuda")
        with loading.open(checkpoint.path, device="cuda") as weights:
            streamed = dict(weights)
    names = [event.name for event in profile.events()]
    if not any("Memcpy HtoD" in name for name in names):
        pytest.skip("the profiler sees no copies here")
    assert not [name for name in names if "DtoD" in name]
    # torch's own, at the beginning and the end of a profile and where memory is made, do not count tensors.
    assert len([name for name in names if "Synchronize" in name]) < 20 < len(state) == len(streamed)
