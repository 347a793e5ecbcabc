"""Symbolic links to files and folders of a checkpoint."""

from pathlib import Path

import pytest

from support.checkpoints import random_row, write_safetensors
from tensorlift.errors import CheckpointError, CheckpointNotFoundError, HeaderError, ReadError
from tensorlift.sources import find, read_headers


def rows(*names: str):
    return {name: random_row("F32", [3], seed) for seed, name in enumerate(names)}


def loaded(path):
    return read_headers(find(path))


def test_links(tmp_path):
    write_safetensors(tmp_path / "blobs" / "0123", rows("w"))
    link = tmp_path / "model.safetensors"
    link.symlink_to(Path("blobs") / "0123")
    assert loaded(tmp_path).names == ["w"]
    assert loaded(link).shards[0].path == str(link)
    (tmp_path / "blobs" / "0123").unlink()
    with pytest.raises(CheckpointNotFoundError, match="a symbolic link to 'blobs/0123', which is not there"):
        find(link)
    with pytest.raises(CheckpointError, match="a symbolic link to 'blobs/0123', which is not there"):
        find(tmp_path)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(ReadError, match="in a circle"):
        find(circle)


def test_a_link_out_of_the_folder_is_followed_and_shows_little_of_what_is_no_checkpoint(tmp_path):
    """The Hub's cache is made of such links; who may make them can name any file that the caller may read."""
    write_safetensors(tmp_path / "elsewhere" / "weights", rows("w"))
    (tmp_path / "elsewhere" / "words").write_bytes(b"\x10\0\0\0\0\0\0\0NOSECRET" + b"SECRET" * 100)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.safetensors").symlink_to(tmp_path / "elsewhere" / "weights")
    (folder / "inside").symlink_to(tmp_path / "elsewhere")
    assert loaded(folder).names == ["w"]
    (folder / "model.safetensors.index.json").write_text('{"weight_map":{"w":"inside/weights"}}')
    assert loaded(folder).names == ["w"]
    (folder / "b.safetensors").symlink_to(tmp_path / "elsewhere" / "words")
    with pytest.raises(HeaderError) as caught:
        loaded(folder / "b.safetensors")
    assert "NOSECRET" in str(caught.value)
    assert str(caught.value).count("SECRET") == 1
