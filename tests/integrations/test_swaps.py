"""Attributes that are replaced for a while."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable

import pytest

from tensorlift.integrations.swaps import Swap, Swaps


class Holder:
    @staticmethod
    def double(number: int) -> int:
        return 2 * number


def plus_one(plain: Callable[[int], int]) -> Callable[[int], int]:
    return lambda number: plain(number) + 1


def find() -> list[Swap]:
    return [Swap(Holder, "double", plus_one)]


def test_nested_users_replace_once_and_restore_the_very_object() -> None:
    swaps, before = Swaps(), vars(Holder)["double"]
    with swaps.made(find):
        with swaps.made(find):
            assert Holder.double(2) == Holder().double(2) == 5
        assert Holder.double(2) == 5
    assert vars(Holder)["double"] is before


def test_restored_after_an_error() -> None:
    swaps = Swaps()
    with pytest.raises(KeyError), swaps.made(find):
        raise KeyError
    assert Holder.double(2) == 4


def test_nothing_is_replaced_where_finding_fails() -> None:
    swaps = Swaps()

    def fails() -> list[Swap]:
        raise KeyError

    with pytest.raises(KeyError), swaps.made(fails):
        raise AssertionError
    with swaps.made(find):
        assert Holder.double(2) == 5
    assert Holder.double(2) == 4


def test_nothing_is_replaced_where_replacing_fails() -> None:
    swaps, before = Swaps(), vars(Holder)["double"]
    with pytest.raises(KeyError), swaps.made(lambda: [*find(), Swap(Holder, "nowhere", plus_one)]):
        raise AssertionError
    assert vars(Holder)["double"] is before


def test_what_another_put_over_it_stays() -> None:
    module, swaps = types.SimpleNamespace(work=lambda number: number), Swaps()
    with swaps.made(lambda: [Swap(module, "work", plus_one)]):
        ours = module.work
        module.work = theirs = lambda number: 10 * ours(number)
    assert module.work is theirs
    assert module.work(1) == 20


def test_the_last_thread_restores() -> None:
    swaps, inside, leave = Swaps(), threading.Event(), threading.Event()

    def stay() -> None:
        with swaps.made(find):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(60)
    with swaps.made(find):
        pass
    assert Holder.double(2) == 5
    leave.set()
    thread.join(60)
    assert Holder.double(2) == 4
