"""Headers joined into one table, and what of it is selected."""

import re

import numpy as np
import pytest

from tensorlift.errors import CheckpointError, RequestError, TensorNotFoundError
from tensorlift.format.checkpoint import Checkpoint, Shard, join
from tensorlift.format.header import Header


def shard(path: str, names: list[str], metadata=None, inode: int | None = None) -> Shard:
    count = len(names)
    header = Header(
        metadata,
        list(names),
        np.zeros(count, np.uint8),
        [(k,) for k in range(count)],
        np.arange(count, dtype=np.int64) * 8 + 100,
        np.full(count, 8, dtype=np.int64),
    )
    return Shard(path, path.encode(), 100 + 8 * count, 1, hash(path) if inode is None else inode, header)


def test_one_file():
    checkpoint = join([shard("x", ["a", "b"], {"k": "v"})], "x")
    assert checkpoint.names == ["a", "b"]
    assert checkpoint.shard_of.tolist() == [0, 0]
    assert checkpoint.metadata == {"k": "v"}
    assert len(checkpoint) == 2
    assert "a" in checkpoint
    assert "c" not in checkpoint


def test_shards_follow_each_other():
    checkpoint = join(
        [shard("x", ["a", "b"]), shard("y", []), shard("z", ["c"], {}), shard("v", [], {"k": "v"})], "f"
    )
    assert checkpoint.names == ["a", "b", "c"]
    assert checkpoint.shard_of.tolist() == [0, 0, 2]
    assert checkpoint.starts.tolist() == [100, 108, 100]
    assert checkpoint.shapes == [(0,), (1,), (0,)]
    assert checkpoint.metadata == {}
    assert (checkpoint.shard_of.dtype, checkpoint.starts.dtype) == (np.int32, np.int64)
    assert (checkpoint.dtypes.dtype, checkpoint.sizes.dtype) == (np.uint8, np.int64)


def test_a_name_in_two_files_is_refused():
    with pytest.raises(CheckpointError, match=r"^f: tensor 'b' is in both x and z"):
        join([shard("x", ["a", "b"]), shard("y", ["c"]), shard("z", ["b"])], "f")


def test_one_file_under_two_names_is_taken_once():
    checkpoint = join(
        [shard("x", ["a"], inode=7), shard("link", ["a"], inode=7), shard("y", ["b"], inode=8)], "f"
    )
    assert [s.path for s in checkpoint.shards] == ["x", "y"]
    assert checkpoint.names == ["a", "b"]


INDEX = {"a": "x", "b": "y"}


def test_the_index_decides_between_two():
    checkpoint = join([shard("x", ["a", "b"]), shard("y", ["a", "b"])], "f", INDEX, ["x", "y"])
    assert checkpoint.names == ["a", "b"]
    assert checkpoint.shard_of.tolist() == [0, 1]
    assert checkpoint.starts.tolist() == [100, 108]
    assert checkpoint.shapes == [(0,), (1,)]


def test_what_the_index_does_not_list_is_loaded_too():
    checkpoint = join([shard("x", ["a", "extra"]), shard("y", ["b"])], "f", INDEX, ["x", "y"])
    assert checkpoint.names == ["a", "extra", "b"]


def test_what_the_index_does_not_list_may_not_be_in_two():
    with pytest.raises(CheckpointError, match="'extra' is in both x and y"):
        join([shard("x", ["a", "extra"]), shard("y", ["b", "extra"])], "f", INDEX, ["x", "y"])


def test_a_shard_that_lacks_a_listed_tensor():
    with pytest.raises(CheckpointError, match="'b' is in y, but it is not; x holds it"):
        join([shard("x", ["a", "b"]), shard("y", ["c"])], "f", INDEX, ["x", "y"])
    with pytest.raises(CheckpointError, match=r"'a' is in x, but it is not \(and 1 more"):
        join([shard("x", []), shard("y", [])], "f", INDEX, ["x", "y"])


@pytest.fixture
def layers() -> Checkpoint:
    names = [f"model.layers.{k}.{part}.weight" for k in range(12) for part in ("q_proj", "k_proj")]
    return join([shard("x", [*names, "lm_head.weight", "odd[0]*"])], "f")


def test_index_finds_rows(layers):
    assert layers.index("model.layers.1.q_proj.weight") == 2
    assert layers.names[layers.index("lm_head.weight")] == "lm_head.weight"


@pytest.mark.parametrize(
    ("wrong", "close"),
    [("lm_head.wieght", "'lm_head.weight'"), ("layers.3.q_proj.weight", "'model.layers.3.q_proj.weight'")],
)
def test_a_name_that_is_not_there_gets_names_that_come_close(layers, wrong, close):
    with pytest.raises(TensorNotFoundError) as caught:
        layers.index(wrong)
    assert close in str(caught.value)
    assert wrong in str(caught.value)
    assert isinstance(caught.value, KeyError)


def test_a_part_of_names_is_told_how_many_have_it():
    checkpoint = join([shard("x", [f"model.layers.{k}.input_norm.weight" for k in range(1200)])], "x")
    with pytest.raises(TensorNotFoundError) as caught:
        checkpoint.select(["norm"])
    said = (
        "whole names are compared, and 1,200 have this as a part, such as 'model.layers.0.input_norm.weight'"
    )
    assert str(caught.value).endswith(said)


def test_a_name_like_no_other_gets_no_suggestion(layers):
    with pytest.raises(TensorNotFoundError) as caught:
        layers.index("%%%")
    assert "mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (None, 26),
        ("lm_head.weight", 1),
        (["lm_head.weight", "lm_head.weight"], 1),
        ("*", 26),
        ("model.layers.1.*", 2),
        ("model.layers.[0-4].q*", 5),
        ("model.layers.1?.*", 4),
        ("odd[0]*", 1),
        (re.compile(r"model\.layers\.\d\..*"), 20),
        ([re.compile("lm.*"), "model.layers.1.*", "odd[0]*"], 4),
        (lambda name: name.endswith("weight"), 25),
        (lambda name: False, 0),
        ([], 0),
        ((n for n in ["lm_head.weight"]), 1),
    ],
)
def test_select(layers, names, count):
    rows = layers.select(names)
    assert rows.dtype == np.int64
    assert len(rows) == count
    assert rows.tolist() == sorted(set(rows.tolist()))


@pytest.mark.parametrize(
    "names",
    [
        "lm_head",
        "LM_HEAD.*",
        "layers.1.*",
        ["lm_head.weight", "nothing.*"],
        re.compile("layers"),
        re.compile("LM.*"),
    ],
)
def test_what_matches_nothing_is_an_error(layers, names):
    with pytest.raises(TensorNotFoundError, match=r"^f: "):
        layers.select(names)


@pytest.mark.parametrize(
    "names", [3, b"lm_head.weight", [b"x"], [None], re.compile(b"x"), [["lm_head.weight"]], 1.5]
)
def test_filters_of_other_types_are_refused(layers, names):
    with pytest.raises(RequestError, match=r"^names: "):
        layers.select(names)


def test_the_consumers_own_error_comes_out(layers):
    def refuse(name):
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        layers.select(refuse)
