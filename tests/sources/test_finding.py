"""What a caller may name, and what is said where it makes no checkpoint."""

import builtins
import os
from pathlib import Path

import pytest

from support.checkpoints import random_checkpoint, random_row, write_index, write_safetensors, write_sharded
from tensorlift.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FileError,
    HeaderError,
    ReadError,
    TruncatedError,
)
from tensorlift.sources import find, read_headers


class Fspath:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


def rows(*names: str):
    return {name: random_row("F32", [3], seed) for seed, name in enumerate(names)}


def loaded(path):
    return read_headers(find(path))


@pytest.fixture
def nothing_is_opened(monkeypatch):
    """Fails the test where a file is opened: names are to be checked first."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"opened {args}")

    def set_up():
        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(builtins, "open", refuse)

    return set_up


@pytest.mark.parametrize("form", [str, Path, os.fsencode, Fspath, lambda p: Fspath(os.fsencode(p))])
def test_forms_of_a_path(tmp_path, form, monkeypatch):
    written = random_checkpoint(tmp_path / "folder", shards=3)
    names = set(written.tensors)
    assert set(loaded(form(str(written.path))).names) == names
    assert set(loaded(form(str(written.path / "model.safetensors.index.json"))).names) == names
    assert set(loaded([form(str(file)) for file in written.files]).names) == names
    monkeypatch.chdir(written.path)
    checkpoint = loaded(form(written.files[1].name))
    assert checkpoint.shards[0].path == written.files[1].name
    assert checkpoint.shards[0].absolute == os.fsencode(written.files[1])


@pytest.mark.parametrize("form", [list, tuple, iter, lambda files: (file for file in files)])
def test_lists_keep_the_callers_order(tmp_path, form):
    files = [write_safetensors(tmp_path / name, rows(name)) for name in ("b", "a", "c")]
    assert loaded(form(files)).names == ["b", "a", "c"]


@pytest.mark.parametrize(
    "path", [None, 3, 1.5, object(), {"a": 1}, bytearray(b"x"), memoryview(b"x"), [None], [["x"]]]
)
def test_other_types_are_refused_by_name(path):
    wrong = path[0] if isinstance(path, list) else path
    with pytest.raises(TypeError, match=type(wrong).__name__):
        find(path)


def test_an_open_file_is_refused(tmp_path):
    file = write_safetensors(tmp_path / "x.safetensors", rows("w"))
    with open(file, "rb") as opened, pytest.raises(TypeError, match="BufferedReader"):
        find(opened)


NAMES = [
    b"with space & 100%.safetensors",
    "\u00fcn\u00ef \u4e2d\U0001f4a9.safetensors".encode(),
    b"-dash.safetensors",
    b"[glob]*?.safetensors",
    b"no_extension",
    b"UPPER.SAFETENSORS",
    b"semi;colon|pipe$HOME.safetensors",
    b"new\nline.safetensors",
    b"raw_\xff\xfe.safetensors",
    b"model-v1.5",
]


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_load(tmp_path, name):
    path = os.path.join(os.fsencode(tmp_path), name)
    write_safetensors(Path(os.fsdecode(path)), rows("w"))
    for form in (path, os.fsdecode(path), Path(os.fsdecode(path)), [path]):
        assert loaded(form).names == ["w"]
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(HeaderError) as caught:
        loaded(path)
    assert str(caught.value).isprintable()
    str(caught.value).encode()


def test_a_path_through_a_link_and_back(tmp_path):
    """'link/..' is the parent of what the link leads to, as the kernel has it."""
    write_safetensors(tmp_path / "real" / "model.safetensors", rows("w"))
    (tmp_path / "real" / "inner").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
    assert loaded(f"{tmp_path}/link/../model.safetensors").names == ["w"]


@pytest.mark.parametrize(
    "name",
    [
        "a.bin",
        "a.pt",
        "a.pth",
        "a.ckpt",
        "a.gguf",
        "a.onnx",
        "a.h5",
        "a.npz",
        "a.json",
        "a.jpg",
        "a.ZIP",
        "a.md",
    ],
)
def test_other_suffixes_are_refused_before_any_file_is_opened(tmp_path, name, nothing_is_opened):
    good = write_safetensors(tmp_path / "good.safetensors", rows("a"))
    wrong = write_safetensors(tmp_path / name, rows("w"))
    nothing_is_opened()
    for given in (wrong, [good, wrong]):
        with pytest.raises(CheckpointError) as caught:
            find(given)
        assert str(wrong) in str(caught.value)
        assert Path(name).suffix.lower() in str(caught.value)


def test_a_list_with_a_name_that_is_not_there_opens_nothing(tmp_path, nothing_is_opened):
    good = write_safetensors(tmp_path / "good.safetensors", rows("a"))
    nothing_is_opened()
    with pytest.raises(CheckpointNotFoundError, match=r"godo\.safetensors: no such file.*'good.safetensors'"):
        find([good, tmp_path / "godo.safetensors"])


def test_lists_take_files_only(tmp_path):
    written = random_checkpoint(tmp_path / "folder", shards=2)
    with pytest.raises(
        CheckpointError, match=r"folder: a list takes safetensors files, and this is a folder"
    ):
        find([written.path])
    with pytest.raises(
        CheckpointError, match=r"index\.json: a list takes safetensors files, and this is an index"
    ):
        find([written.path / "model.safetensors.index.json"])
    with pytest.raises(CheckpointError, match="the list of files is empty"):
        find([])


@pytest.mark.parametrize("path", ["a\0b", b"a\0b", Path("x/a\0b")])
def test_a_nul_is_refused(path):
    with pytest.raises(CheckpointError, match="NUL character"):
        find(path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "the path is empty"),
        ("~/model.safetensors", "'~' is not expanded"),
        ("s3://bucket/model", "this is an address"),
        ("http://127.0.0.1:7000", "running seeds (tensorlift://host:port)"),
        ("nowhere/*.safetensors", "are not expanded here"),
        ("\ud800", "half a surrogate pair"),
    ],
)
def test_paths_that_cannot_be(path, words):
    with pytest.raises(CheckpointError) as caught:
        find(path)
    assert words in str(caught.value)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointNotFoundError) as caught:
        find(tmp_path / "a" / "b")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.errno == 2
    assert str(caught.value).startswith(f"{tmp_path}/a/b: no such file or folder")
    file = write_safetensors(tmp_path / "x.safetensors", rows("w"))
    with pytest.raises(CheckpointNotFoundError, match=r"x\.safetensors' is a file"):
        find(file / "y")


def test_a_misspelled_file_of_a_folder_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    random_checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tensorlift.sources.hub.cached", lambda *_: pytest.fail("the Hub was asked"))
    with pytest.raises(CheckpointNotFoundError, match=r"in 'model' there is 'model\.safetensors'"):
        find("model/model.safetensor")


def test_a_bare_name_is_told_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointNotFoundError) as caught:
        find("some-model")
    assert f"the working folder '{tmp_path}' has 1 other entry" in str(caught.value)
    assert str(caught.value).endswith("a model of the Hub is asked for as 'organisation/name'")
    for no_id in (b"some-model", tmp_path / "some-model", "some.safetensors", "pytorch_model.bin"):
        with pytest.raises(CheckpointNotFoundError) as caught:
            find(no_id)
        assert "Hub" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "give the folder that it is in"),
        ("x.safetensors.part", "a download that was not finished"),
        ("x.bin", "convert it"),
    ],
)
def test_a_suffix_says_what_to_do(tmp_path, name, words):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=words):
        find(tmp_path / name)


def test_a_path_that_is_too_long():
    with pytest.raises(ReadError, match="too long") as caught:
        find("x" * 5000)
    assert caught.value.errno == 36


def test_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="found a named pipe"):
        find(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="found a named pipe"):
        find(tmp_path)
    with pytest.raises(CheckpointError, match="found a character device"):
        find("/dev/null")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "it is empty"),
        (["config.json", "pytorch_model.bin"], "weights in .bin have to be converted"),
        (["readme.md"], "it has 'readme.md'"),
        (
            ["unet/x.safetensors", "vae/x.safetensors", "model_index.json"],
            "in the folders 'unet', 'vae' inside it",
        ),
    ],
)
def test_a_folder_without_safetensors(tmp_path, entries, words):
    for entry in entries:
        (tmp_path / entry).parent.mkdir(exist_ok=True)
        (tmp_path / entry).touch()
    with pytest.raises(CheckpointNotFoundError) as caught:
        find(tmp_path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_the_index_decides(tmp_path):
    write_sharded(
        tmp_path, {"m-00001-of-00002.safetensors": rows("a"), "m-00002-of-00002.safetensors": rows("b")}
    )
    write_safetensors(tmp_path / "model.safetensors", rows("a", "b", "stray"))
    write_safetensors(tmp_path / "consolidated.safetensors", rows("other"))
    found = find(tmp_path)
    assert [source.member for source in found.files] == sorted(set(found.weight_map.values()))
    assert read_headers(found).names == ["a", "b"]


def test_shards_of_an_index_come_in_natural_order(tmp_path):
    write_sharded(tmp_path, {f"model-{k}.safetensors": rows(f"t{k}") for k in (10, 9, 1, 2)})
    assert loaded(tmp_path).names == ["t1", "t2", "t9", "t10"]


def test_an_index_in_subfolders(tmp_path):
    write_safetensors(tmp_path / "sub" / "x.safetensors", rows("a"))
    index = write_index(tmp_path, {"a": "sub/x.safetensors"}, "other.safetensors.index.json")
    assert loaded(index).names == loaded(tmp_path).names == ["a"]


BAD_SHARDS = {
    "missing": lambda path: None,
    "empty": lambda path: path.touch(),
    "a Git LFS pointer": lambda path: path.write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    ),
    "a JPEG picture": lambda path: path.write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF\0" + bytes(100)),
    "a folder": lambda path: path.mkdir(),
    "a named pipe": lambda path: os.mkfifo(path),
    "bytes missing": lambda path: path.write_bytes(b"\x40\0\0\0\0\0\0\0{}"),
}


@pytest.mark.parametrize("kind", BAD_SHARDS)
@pytest.mark.parametrize("index", [True, False])
def test_bad_shards_are_named(tmp_path, kind, index):
    names = [f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]
    write_sharded(tmp_path, {name: rows(name) for name in names}, index=index)
    (tmp_path / names[1]).unlink()
    BAD_SHARDS[kind](tmp_path / names[1])
    with pytest.raises(FileError) as caught:
        loaded(tmp_path)
    assert names[1] in str(caught.value)
    assert kind in str(caught.value)


def test_a_listed_tensor_that_its_shard_lacks(tmp_path):
    write_sharded(tmp_path, {"x.safetensors": rows("a"), "y.safetensors": rows("b")}, index=False)
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor 'c' is in .*y\.safetensors, but it is not"):
        loaded(tmp_path)


def test_a_name_in_two_files_of_a_folder(tmp_path):
    write_sharded(tmp_path, {"x.safetensors": rows("a"), "y.safetensors": rows("a")}, index=False)
    with pytest.raises(CheckpointError, match=r"'a' is in both .*x\.safetensors and .*y\.safetensors"):
        loaded(tmp_path)


def test_a_bad_index(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", rows("a"))
    index = tmp_path / "model.safetensors.index.json"
    for text, words in (
        (b"", "no valid JSON"),
        (b'{"weight_map":{"a":"../model.safetensors"}}', "'../model.safet"),
    ):
        index.write_bytes(text)
        with pytest.raises(CheckpointError) as caught:
            find(tmp_path)
        assert str(index) in str(caught.value)
        assert words in str(caught.value)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(CheckpointError, match="found a named pipe"):
        find(tmp_path)
    index.unlink()
    index.mkdir()
    with pytest.raises(CheckpointError, match="found a folder"):
        find(tmp_path)


def test_an_index_without_an_end(tmp_path):
    """A hole of 101 MB: refused by its size, not parsed."""
    write_safetensors(tmp_path / "model.safetensors", rows("a"))
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 101_000_000)
    with pytest.raises(CheckpointError, match="more than 100,000,000 bytes"):
        find(tmp_path)


def test_first_bad_file_in_order_is_reported(tmp_path):
    files = [write_safetensors(tmp_path / f"{k}.safetensors", rows(f"t{k}")) for k in range(12)]
    for k in (4, 9, 11):
        files[k].write_bytes(b"")
    with pytest.raises(TruncatedError, match=r"4\.safetensors"):
        loaded(files)
