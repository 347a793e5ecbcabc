"""What a load changes of the interpreter, and that it puts it back."""

import gc
import os
import sys
import threading

import pytest
import torch
from safetensors.torch import save_file

from tensorlift.loading import load_into
from tensorlift.tensors import filling
from tensorlift.tensors.interpreter import collector_paused, short_turns


@pytest.fixture(autouse=True)
def interval():
    """Whatever a test does to it."""
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_turns_are_short_inside_and_as_before_behind(interval):
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(0.0005)
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == interval


def test_turns_come_back_behind_an_error(interval):
    with pytest.raises(KeyError), short_turns():
        raise KeyError
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("chosen", [0.0001, 0.0005])
def test_shorter_turns_stay(chosen):
    sys.setswitchinterval(chosen)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(chosen)
    assert sys.getswitchinterval() == pytest.approx(chosen)


def test_what_somebody_sets_meanwhile_stays():
    with short_turns():
        sys.setswitchinterval(0.002)
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_scopes_that_end_in_another_order_leave_nothing(interval):
    one, two = short_turns(), short_turns()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    two.__exit__(None, None, None)
    assert sys.getswitchinterval() == interval


def test_a_load_has_them_while_bytes_wait_for_it(tmp_path, interval, monkeypatch):
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    seen = []
    match = filling.match
    monkeypatch.setattr(filling, "match", lambda *a: seen.append(sys.getswitchinterval()) or match(*a))
    load_into({"a": torch.zeros(4)}, tmp_path / "a.safetensors")
    assert seen == [pytest.approx(0.0005)]
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_child_does_not_keep_what_another_threads_load_has_changed(interval):
    inside, over = threading.Event(), threading.Event()

    def load():
        with short_turns(), collector_paused():
            inside.set()
            over.wait()

    thread = threading.Thread(target=load)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() and sys.getswitchinterval() == interval else 1)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
    assert sys.getswitchinterval() == interval
