"""load() and open(): right bytes, owned tensors, and nothing left behind however a pass ends."""

from __future__ import annotations

import gc
import io
import os
import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import leaks
from support.checkpoints import Row, Written, random_checkpoint, random_row, write_safetensors
from support.tensors import assert_state, assert_tensor
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.errors import (
    DeviceError,
    DtypeError,
    OptionError,
    RequestError,
    TensorNotFoundError,
    TruncatedError,
)
from tensorlift.stats import LoadStats
from tensorlift.tensors.transfer import Transfer
from tensorlift.tensors.views import Table

MIB = 1 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return random_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), shards=3, tensors=60, elements=20_000, seed=1
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Row]]:
    rows = {f"t{k}": random_row("BF16", [512, 1024], k) for k in range(12)}
    return write_safetensors(tmp_path_factory.mktemp("large") / "m.safetensors", rows), rows


# Two tensors an arena, two arenas ahead.
SMALL_ARENAS = {"arena_size": 2 * MIB + 4096, "buffer_size": 4 * MIB + 8192, "chunk_size": "64KiB"}


def test_every_tensor_is_right_and_owned(written: Written) -> None:
    state = loading.load(written.path)
    assert_state(state, written.tensors)


@pytest.mark.parametrize("arena", ["4KiB", "70000", "1GiB"])
def test_arenas_of_any_size(written: Written, arena: str) -> None:
    assert_state(loading.load(written.path, arena_size=arena, threads=2), written.tensors)
    assert_state(dict(iter(loading.open(written.path, arena_size=arena, buffer_size=arena))), written.tensors)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 12), st.sampled_from([1, 8, 4096]))
def test_random_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shards: int, tensors: int, align: int
) -> None:
    folder = tmp_path_factory.mktemp("random")
    made = random_checkpoint(folder, shards, tensors, seed)
    assert_state(loading.load(folder), made.tensors)
    path = write_safetensors(folder / "one" / "m.safetensors", made.tensors, align=align)
    assert_state(loading.load(path), made.tensors)


def test_what_was_loaded_outlives_everything(large: tuple[Path, dict[str, Row]]) -> None:
    path, rows = large
    with leaks.nothing_left():
        state = loading.load(path, **SMALL_ARENAS)
        kept = state["t3"]
        del state
        gc.collect()
        assert_tensor(kept, rows["t3"])
        del kept


def test_names(written: Written) -> None:
    names = list(written.tensors)
    chosen = [names[5], names[100]]
    assert_state(loading.load(written.path, names=chosen), {name: written.tensors[name] for name in chosen})
    layer = re.compile(r"layers\.1\..*")
    some = {name: row for name, row in written.tensors.items() if layer.fullmatch(name)}
    for names_of in (layer, "layers.1.*", lambda name: name.startswith("layers.1.")):
        assert_state(loading.load(written.path, names=names_of), some)
        assert loading.open(written.path, names=names_of).names == list(some)
    assert loading.load(written.path, names=lambda name: False) == {}
    with pytest.raises(TensorNotFoundError, match=r"nothing\.like\.it"):
        loading.load(written.path, names="nothing.like.it")


def test_only_what_is_wanted_is_read(large: tuple[Path, dict[str, Row]]) -> None:
    state = loading.load(large[0], names=["t2", "t7"])
    assert sum(state.stats.readers.values()) == state.stats.bytes == 2 * MIB


def test_the_state_is_a_dict_for_everybody(written: Written) -> None:
    state = loading.load(written.path, names=["*.bf16", "*.f32", "*.i64", "*.bool"])
    copy = pickle.loads(pickle.dumps(state))
    assert type(copy) is OrderedDict
    buffer = io.BytesIO()
    torch.save(state, buffer)
    saved = sum(tensor.nbytes for tensor in state.values())
    assert buffer.tell() < saved + 1000 * len(state)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=True)
    assert list(again) == list(state)


def test_stats(large: tuple[Path, dict[str, Row]]) -> None:
    stats = loading.load(large[0], **SMALL_ARENAS).stats
    assert isinstance(stats, LoadStats)
    assert (stats.bytes, stats.tensors, stats.files) == (12 * MIB, 12, 1)
    assert stats.rate > 0
    assert {"headers", "plan", "allocate", "read", "hand_out", "close", "total"} <= set(stats.seconds)
    assert stats.arenas == 6
    with loading.open(large[0], **SMALL_ARENAS) as weights:
        assert weights.stats.bytes == 0
        steps = iter(weights)
        next(steps)
        assert (weights.stats.bytes, weights.stats.tensors) == (2 * MIB, 2), "read ahead is not done yet"
        list(steps)
        assert weights.stats.bytes == 12 * MIB
    assert weights.stats.tensors == 12
    assert weights.stats.device_peak_bytes <= 4 * MIB + 8192


def test_progress(large: tuple[Path, dict[str, Row]]) -> None:
    for run in (
        lambda report: loading.load(large[0], progress=report, **SMALL_ARENAS),
        lambda report: list(loading.open(large[0], progress=report, **SMALL_ARENAS)),
    ):
        seen: list[tuple[int, int]] = []
        run(lambda done, total: seen.append((done, total)))  # noqa: B023
        assert seen == sorted(seen)
        assert seen[-1] == (12 * MIB, 12 * MIB)


def test_open_in_file_order_with_metadata(tmp_path: Path) -> None:
    rows = {name: random_row("F32", [3], k) for k, name in enumerate("zay")}
    path = write_safetensors(tmp_path / "m.safetensors", rows, {"format": "pt"})
    with loading.open(path) as weights:
        assert weights.metadata == {"format": "pt"}
        assert weights.names == ["z", "a", "y"]
        assert len(weights) == 3
        assert weights.device == torch.device("cpu")
        assert_state(dict(weights), rows)


def consumers(path: Path) -> Iterator[Any]:
    """Ways in which a pass ends before its end."""

    def early_break() -> None:
        for _ in loading.open(path, **SMALL_ARENAS):
            break

    def closed_inside() -> None:
        with loading.open(path, **SMALL_ARENAS) as weights:
            for name, _ in weights:
                if name == "t4":
                    weights.close()
                    break

    def dropped() -> None:
        iterator = iter(loading.open(path, **SMALL_ARENAS))
        next(iterator)

    def left_suspended() -> None:
        with loading.open(path, **SMALL_ARENAS) as weights:
            iterator = iter(weights)
            next(iterator)
        assert list(iterator) == []

    def in_a_cycle() -> None:
        weights = loading.open(path, **SMALL_ARENAS)
        cycle: list[Any] = [weights, iter(weights)]
        cycle.append(cycle)
        next(cycle[1])

    yield from (early_break, closed_inside, dropped, left_suspended, in_a_cycle)


@pytest.mark.parametrize("which", range(5))
def test_a_pass_that_ends_early_leaves_nothing(large: tuple[Path, dict[str, Row]], which: int) -> None:
    consume = list(consumers(large[0]))[which]
    with leaks.nothing_left():
        consume()


def test_tensors_that_were_handed_out_stay_after_an_early_end(large: tuple[Path, dict[str, Row]]) -> None:
    kept = {}
    for name, tensor in loading.open(large[0], **SMALL_ARENAS):
        kept[name] = tensor
        if name == "t5":
            break
    assert_state(kept, {name: large[1][name] for name in kept})


def test_the_consumers_exception_comes_out_unchanged(large: tuple[Path, dict[str, Row]]) -> None:
    class Mine(Exception):
        pass

    mine = Mine("own")
    with leaks.nothing_left():

        def consume() -> None:
            with loading.open(large[0], **SMALL_ARENAS) as weights:
                for _ in weights:
                    raise mine

        with pytest.raises(Mine) as caught:
            consume()
        assert caught.value is mine
        assert mine.__cause__ is None
        mine.__traceback__ = None
        del caught


def test_a_report_that_raises_stops_the_load(large: tuple[Path, dict[str, Row]]) -> None:
    def report(done: int, total: int) -> None:
        raise KeyError("mine")

    with leaks.nothing_left(), pytest.raises(KeyError, match="mine") as caught:
        loading.load(large[0], progress=report)
    caught.value.__traceback__ = None


def test_one_pass_only(written: Written) -> None:
    weights = loading.open(written.path)
    list(weights)
    with pytest.raises(RequestError, match="iterated over already"):
        iter(weights)
    weights.close()
    with pytest.raises(RequestError, match="closed"):
        iter(weights)


def test_dropped_tensors_are_gone_while_the_pass_goes_on(large: tuple[Path, dict[str, Row]]) -> None:
    alive = []
    before = abi.library().arena_live()
    for _name, tensor in loading.open(large[0], **SMALL_ARENAS):
        del tensor
        alive.append(abi.library().arena_live() - before)
    # Two arenas of 2 MiB are the bound of 4 MiB.
    assert max(alive) <= 2


def test_a_pass_in_another_thread(large: tuple[Path, dict[str, Row]]) -> None:
    weights = loading.open(large[0], **SMALL_ARENAS)
    state: dict[str, torch.Tensor] = {}
    thread = threading.Thread(target=lambda: state.update(iter(weights)))
    thread.start()
    thread.join(60)
    assert_state(state, large[1])


def test_closing_in_another_thread_while_tensors_are_made(
    large: tuple[Path, dict[str, Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = loading.open(large[0], arena_size="1GiB", buffer_size="1GiB")
    real, threads = Table.tensors, [threading.Thread(target=weights.close) for _ in range(2)]

    def tensors(*arguments: Any) -> list[torch.Tensor]:
        for thread in threads:
            thread.start()
        # As long as they would need if nothing held them back.
        threads[0].join(0.5)
        return real(*arguments)

    monkeypatch.setattr(Table, "tensors", tensors)
    with leaks.nothing_left():
        state = dict(iter(weights))
        for thread in threads:
            thread.join(60)
        assert_state(state, large[1])
        assert weights.stats.bytes == 12 * MIB
        del state


def test_a_pass_that_was_closed_in_another_thread_says_so(
    large: tuple[Path, dict[str, Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = loading.open(large[0], **SMALL_ARENAS)
    real = Transfer.wait

    def wait(*arguments: Any) -> None:
        real(*arguments)
        thread = threading.Thread(target=weights.close)
        thread.start()
        thread.join(60)

    monkeypatch.setattr(Transfer, "wait", wait)
    with leaks.nothing_left(), pytest.raises(RequestError, match="closed") as caught:
        list(weights)
    caught.value.__traceback__ = None


@pytest.mark.parametrize("wrong", ["mps", "meta", "xpu:0", "nonsense", torch.device("meta"), True, None, 1.5])
def test_a_wrong_device_is_refused_before_any_file(wrong: Any) -> None:
    for call in (loading.load, loading.open):
        with pytest.raises(DeviceError, match="cuda"):
            call("/no/such/file", device=wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: nothing to be missing")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda")])
def test_a_cuda_device_that_is_not_there(device: Any) -> None:
    with pytest.raises(DeviceError, match="there is no CUDA device"):
        loading.load("/no/such/file", device=device)
    assert not torch.cuda.is_initialized()


def test_options_are_checked_before_any_file() -> None:
    with pytest.raises(OptionError, match="unknown option 'chunk'"):
        loading.load("/no/such/file", chunk=1)


def test_f6_is_refused_when_it_is_wanted(tmp_path: Path) -> None:
    rows = {"good": random_row("F32", [4]), "bad": random_row("F6_E2M3", [8])}
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    assert_state(loading.load(path, names="good"), {"good": rows["good"]})
    with pytest.raises(DtypeError, match=r"m\.safetensors: tensor 'bad' has dtype F6_E2M3"):
        loading.load(path)
    with pytest.raises(DtypeError, match="bad"):
        iter(loading.open(path))


def test_f4_of_an_odd_row_is_refused_when_it_is_wanted(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"odd": random_row("F4", [2, 3])})
    with pytest.raises(DtypeError, match=r"'odd' has dtype F4.*\[2, 3\]"):
        loading.load(path)


def test_nothing_to_load(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {})
    assert loading.load(path) == {}
    assert list(loading.open(path)) == []
    rows = {"a": random_row("F32", [0]), "b": random_row("BF16", [3, 0])}
    path = write_safetensors(tmp_path / "z.safetensors", rows)
    assert_state(loading.load(path), rows)
    assert_state(dict(iter(loading.open(path))), rows)


def test_surroundings_do_not_matter(written: Written) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            state = loading.load(written.path)
            streamed = dict(iter(loading.open(written.path)))
            assert torch.empty(1).is_inference()
    finally:
        torch.set_default_dtype(default)
    assert_state(state, written.tensors)
    assert_state(streamed, written.tensors)


def test_the_collector_is_as_it_was(written: Written) -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            loading.load(written.path)
            for _ in loading.open(written.path):
                assert gc.isenabled() is enabled
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_a_failed_load_leaves_nothing(tmp_path: Path, large: tuple[Path, dict[str, Row]]) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", large[1])
    with leaks.nothing_left():
        weights = loading.open(path, **SMALL_ARENAS)
        os.truncate(path, 6 * MIB)
        with pytest.raises(TruncatedError, match=r"m\.safetensors.*'t5'|'t6'") as caught:
            list(weights)
        caught.value.__traceback__ = None
        del weights, caught
