"""Which rivals are meant, and where they are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorlift.bench.rivals import DEFAULT, RIVALS, chosen
from tensorlift.errors import RequestError


def test_default_ones_are_known() -> None:
    assert [rival.name for rival in chosen(",".join(DEFAULT))] == list(DEFAULT)


def test_list_may_have_spaces_doubles_and_nothing() -> None:
    assert [rival.name for rival in chosen(" runai, safetensors,,runai")] == ["runai", "safetensors"]
    assert chosen("") == []


def test_every_rival_has_an_adapter_and_a_command() -> None:
    from tensorlift.bench import rivals

    for rival in RIVALS.values():
        module, _, function = rival.adapter.partition(":")
        assert module == rivals.__name__
        assert callable(getattr(rivals, function))
        assert rival.pip.startswith("pip install ")


def test_unknown_one_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"no rival is called 'dcp'; there are safetensors, safetensors-rc"
    ):
        chosen("safetensors,dcp")
    with pytest.raises(RequestError, match="'dcp'"):
        chosen("safetensors", [f"dcp={tmp_path}"])


@pytest.mark.parametrize("text", ["runai", "runai=", "runai=/nowhere/at/all"])
def test_folder_has_to_be_there(text: str) -> None:
    with pytest.raises(RequestError, match="NAME=FOLDER"):
        chosen("runai", [text])


def test_folder_of_its_own_is_enough(tmp_path: Path) -> None:
    (tmp_path / "instanttensor").mkdir()
    (rival,) = chosen("instanttensor", [f"instanttensor={tmp_path}"])
    assert rival.folder == tmp_path
    assert rival.obstacle("cuda:1") is None
    assert rival.obstacle("cpu") == "loads to cuda only"
