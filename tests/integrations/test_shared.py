"""Devices, versions, imports and the iterator that engines share."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import pytest
import torch
from safetensors.torch import save_file

from tensorlift.errors import CheckpointError, DeviceError, TruncatedError
from tensorlift.integrations import versions, weights
from tensorlift.integrations.devices import check_device, current_device
from tensorlift.integrations.imports import when_imported
from tensorlift.integrations.settings import Settings

log = logging.getLogger("test")
CPU = torch.device("cpu")


def test_devices_by_name_alone():
    assert check_device("cuda:3", "vLLM").type == "cuda"
    assert current_device(check_device("cpu", "vLLM")) == CPU
    for other in ("xpu", "tpu", "npu:1", "hpu", "mps", ""):
        with pytest.raises(DeviceError, match="vLLM runs on device"):
            check_device(other, "vLLM")


def test_the_current_device_is_the_workers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert current_device(torch.device("cuda")) == torch.device("cuda", 2)


def test_another_version_warns_once(caplog, monkeypatch):
    monkeypatch.setattr(versions, "_told", set())
    with caplog.at_level(logging.WARNING):
        versions.check_version("vLLM", "0.32.0+cpu", "0.32.0", log)
        assert not caplog.records
        versions.check_version("vLLM", "0.33.1", "0.32.0", log)
        versions.check_version("vLLM", "0.33.1", "0.32.0", log)
    assert len(caplog.records) == 1
    assert "leave --load-format out" in caplog.text


def test_a_step_after_an_import_that_has_not_happened(tmp_path, monkeypatch):
    (tmp_path / "late_one.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    when_imported("late_one", lambda module: seen.append(module.value))
    assert seen == []
    import late_one

    when_imported("late_one", lambda module: seen.append(module.value + 1))
    assert seen == [late_one.value, 2]
    del sys.modules["late_one"]


@pytest.fixture
def files(tmp_path):
    made = []
    for k in (10, 2):
        made.append(str(tmp_path / f"model-{k}.safetensors"))
        save_file({f"t{k}.a": torch.arange(8.0) + k, f"t{k}.b": torch.ones(3)}, made[-1])
    return made


def test_tensors_come_in_the_engines_order_with_prefix_and_one_line(files, caplog):
    delivery = weights.Delivery()
    opened: list[list[str]] = []
    with caplog.at_level(logging.INFO):
        came = dict(
            weights.iterate(
                files, Settings(), device=CPU, prefix="x.", delivery=delivery, opened=opened.append, log=log
            )
        )
    assert list(came) == delivery.names == list(opened[0]) == ["x.t2.a", "x.t2.b", "x.t10.a", "x.t10.b"]
    assert torch.equal(came["x.t10.a"], torch.arange(8.0) + 10)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tensorlift: rank 0: 88 bytes")
    assert all(word in line for word in ("readers:", "fallbacks:", "pinned at most", "arenas at most"))


def test_where_a_model_stops_is_said_unless_the_error_says_it(files, caplog):
    delivery = weights.Delivery()
    pairs = weights.iterate(files, Settings(), device=CPU, delivery=delivery, log=log)
    delivery.failed(RuntimeError("early"), log)
    next(pairs)
    delivery.failed(CheckpointError("ours"), log)
    assert not caplog.records
    delivery.failed(RuntimeError("size"), log)
    assert "RuntimeError: size. The model had tensor 't2.a' last" in caplog.text


def test_what_is_not_needed_is_not_read(files, caplog):
    with caplog.at_level(logging.INFO):
        came = weights.iterate(files, Settings(), device=CPU, needed=lambda name: name.endswith("a"), log=log)
        assert [name for name, _ in came] == ["t2.a", "t10.a"]
    assert "rank 0: 64 bytes" in caplog.text


def test_every_name_is_checked_before_any_file_is_opened(files):
    with pytest.raises(CheckpointError, match=r"other\.bin"):
        weights.iterate([*files, "nowhere/other.bin"], Settings(), device=CPU, log=log)
    with pytest.raises(CheckpointError, match="no files"):
        weights.iterate([], Settings(), device=CPU, log=log)


def test_a_truncated_file_is_seen_before_the_first_tensor(files):
    with open(files[0], "r+b") as file:
        file.truncate(100)
    with pytest.raises((TruncatedError, CheckpointError)):
        next(weights.iterate(files, Settings(), device=CPU, log=log))


def test_the_bar_is_the_engines_unless_the_setting_says_otherwise(files):
    reports: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def bar():
        yield lambda done, total: reports.append((done, total))

    list(weights.iterate(files, Settings(), device=CPU, bar=bar, log=log))
    assert reports[-1] == (88, 88)
    reports.clear()
    list(weights.iterate(files, Settings({"progress": False}), device=CPU, bar=bar, log=log))
    assert reports == []


def test_other_kinds_of_weights_are_named(tmp_path):
    for name in ("a.bin", "b.txt", "c.PT"):
        (tmp_path / name).touch()
    assert [path.rpartition("/")[2] for path in weights.other_weights(str(tmp_path))] == ["a.bin", "c.PT"]
    assert weights.other_weights(str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_is_none_is_named(tmp_path, text):
    weights.check_index(str(tmp_path / "nowhere"))
    weights.check_index(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        weights.check_index(str(tmp_path))


def test_an_index_that_is_no_file_or_too_long_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors.index.json"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: .* found a named pipe"):
        weights.check_index(str(tmp_path))
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    for module in ("format.listing", "sources.finding"):
        monkeypatch.setattr(f"tensorlift.{module}.LARGEST_INDEX", 1000)
    with pytest.raises(CheckpointError, match="the index has more than 1,000 bytes"):
        weights.check_index(str(tmp_path))
