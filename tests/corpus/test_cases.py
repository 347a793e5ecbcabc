"""Every case that has to load or to be refused, through every way in."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import tensorlift
from corpus.checks import check_case, check_file, empty_state, nothing_left, sentinel
from corpus.make_cases import make
from corpus.oracle import expected

LOADING = [
    "a_space_padded",
    "a_misaligned_inside",
    "a_metadata_shapes",
    "a_zero_size",
    "a_scalars",
    "a_dtypes",
    "a_many",
]
LOADING += ["a_large_single", "c_hub_cache", "c_paths"]
REFUSED = ["b_truncated", "b_not_safetensors", "b_header_length", "b_layout", "b_unknown_dtype"]
# What has to be there for an answer at all; a case that needs it longer hangs.
pytestmark = pytest.mark.timeout(60)


def by_load(path, case, file):
    return dict(tensorlift.load(path))


def by_open(path, case, file):
    with tensorlift.open(path) as weights:
        return dict(weights)


def by_safe_open(path, case, file):
    with tensorlift.safe_open(path, "pt") as f:
        return {name: f.get_tensor(name) for name in reversed(f.keys())}


def by_load_file(path, case, file):
    return dict(tensorlift.load_file(path))


def by_load_into(path, case, file):
    state = empty_state(case, file)
    tensorlift.load_into(state, path)
    return state


WAYS = [by_load, by_open, by_safe_open, by_load_file, by_load_into]


@pytest.mark.parametrize("case_id", LOADING)
@pytest.mark.parametrize("way", WAYS)
def test_loads(corpus, cases, case_id, way):
    case = cases[case_id]
    refused = case.get("may_refuse", [])
    way(
        corpus / cases["a_scalars"]["files"][0], cases["a_scalars"], cases["a_scalars"]["files"][0]
    )  # warm up
    with nothing_left():
        for file in case["files"]:
            if Path(file).stem not in refused:
                check_file(way(corpus / file, case, file), case, file)


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_torch_lacks_is_refused_when_wanted(corpus, code):
    path = corpus / "a_dtypes" / f"{code}.safetensors"
    with nothing_left():
        for way in (tensorlift.load, lambda p: dict(iter(tensorlift.open(p)))):
            with pytest.raises(tensorlift.DtypeError) as caught:
                way(path)
            assert code in str(caught.value)
            assert "'w'" in str(caught.value) or "w" in str(caught.value).split()
        with tensorlift.safe_open(path, "pt") as f:
            assert f.keys() == ["w", "w1"]
            with pytest.raises(tensorlift.DtypeError, match=code):
                f.get_tensor("w")


def demanded(case, file, path) -> list[str]:
    """What the error for a file has to have."""
    words = []
    for name in case["error_names"]:
        if name == "the file's path":
            words.append(str(path))
        elif name == "the length":
            words.append(f"{case['lengths'][file]:,}")
        elif name == "the tensor's name":
            words.append("'odd'" if "dtype" in case["id"] else "'")
        elif name == "the dtype as written":
            words.append(case["dtypes"][file])
        else:
            words.append(name)
    return words


def refusals(path, state):
    return {
        "load": lambda: tensorlift.load(path),
        "open": lambda: dict(iter(tensorlift.open(path))),
        "safe_open": lambda: tensorlift.safe_open(path, "pt"),
        "load_into": lambda: tensorlift.load_into(state, path, strict=False),
    }


@pytest.mark.parametrize("case_id", REFUSED)
@pytest.mark.parametrize("way", ["load", "open", "safe_open", "load_into"])
def test_is_refused(corpus, cases, case_id, way):
    case = cases[case_id]
    with nothing_left():
        for file in case["files"]:
            path = corpus / file
            state = sentinel(["a", "b", "ok", "odd", "first", "last"])
            with pytest.raises(tensorlift.FileError) as caught:
                refusals(path, state)[way]()
            for word in demanded(case, file, path):
                assert word in str(caught.value), file
            assert all(bool((tensor == 7).all()) for tensor in state.values())


@pytest.mark.parametrize("way", ["load", "open", "safe_open", "load_into"])
def test_a_missing_shard_is_refused_before_anything_is_read(corpus, cases, way):
    case = cases["c_missing_shard"]
    state = {
        name: torch.full(shape, 7).to(torch.uint8)
        for f in case["files"]
        for name, _, shape, _ in expected(case, f)
    }
    with nothing_left(), pytest.raises(tensorlift.CheckpointError) as caught:
        refusals(corpus / "c_missing_shard", state)[way]()
    assert case["error_names"][0] in str(caught.value)
    assert all(bool((tensor == 7).all()) for tensor in state.values())


def test_consolidated_files_are_left_out(corpus, cases):
    """Each tensor comes once, with the shards' values, and only the bytes of the shards are read."""
    case = cases["c_consolidated"]
    state = tensorlift.load(corpus / "c_consolidated")
    check_case(state, case)
    assert state.stats.files == 2


@pytest.mark.parametrize("where", ["models--org--name", "linked_dir"])
def test_hub_cache_by_every_path(corpus, cases, where, monkeypatch):
    case = cases["c_hub_cache"]
    folder = corpus / "c_hub_cache" / where
    check_case(tensorlift.load(folder), case)
    monkeypatch.chdir(folder.parent)
    check_case(tensorlift.load(where), case)
    check_case(tensorlift.load(f"./{where}/"), case)


def test_paths_in_every_form(corpus, cases, monkeypatch):
    case = cases["c_paths"]

    class Fspath:
        def __fspath__(self):
            return os.fspath(path)

    for file in case["files"]:
        path = corpus / file
        for form in (str(path), os.fsencode(path), path, Fspath(), [path], (str(path),), (p for p in [path])):
            check_file(tensorlift.load(form), case, file)
        monkeypatch.chdir(path.parent)
        check_file(tensorlift.load(path.name), case, file)
        monkeypatch.chdir(corpus)


def test_a_tensor_larger_than_every_buffer(corpus, cases):
    case = cases["a_large_single"]
    file = case["files"][0]
    small = {"chunk_size": "1MiB", "arena_size": "8MiB", "buffer_size": "16MiB"}
    check_file(tensorlift.load(corpus / file, **small), case, file)
    with tensorlift.open(corpus / file, **small) as weights:
        check_file(dict(weights), case, file)


@pytest.mark.skipif(
    "TENSORLIFT_TEST_BIG" not in os.environ, reason="10 GB of memory: set TENSORLIFT_TEST_BIG=1"
)
@pytest.mark.timeout(600)
def test_beyond_one_read_and_4_gib(tmp_path):
    """The files are holes but for their marks; the tensors are not: 4 GiB of memory each."""
    if shutil.disk_usage(tmp_path).free < 8 << 30:
        pytest.skip("less than 8 GiB of disk free")
    big = {case["id"]: case for case in make(tmp_path, big=True)}
    for case_id in ("a_large_single", "a_many"):
        for file in big[case_id]["files"]:
            check_file(tensorlift.load(tmp_path / file), big[case_id], file)
