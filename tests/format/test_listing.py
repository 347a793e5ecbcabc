"""Which files make a checkpoint, from names alone."""

import json

import pytest

from tensorlift.errors import CheckpointError
from tensorlift.format.listing import choose_files, choose_index, foreign_suffix, natural_key, parse_index


def shards(total: int, stem: str = "model-", first: int = 1) -> list[str]:
    return [f"{stem}{k:05d}-of-{total:05d}.safetensors" for k in range(first, first + total)]


def test_numbers_sort_as_numbers():
    names = [
        "model-10.safetensors",
        "model-2.safetensors",
        "model.safetensors",
        "a2b10",
        "a2b9",
        "a02b9",
        "2",
        "x",
    ]
    assert sorted(names, key=natural_key) == [
        "2",
        "a02b9",
        "a2b9",
        "a2b10",
        "model-2.safetensors",
        "model-10.safetensors",
        "model.safetensors",
        "x",
    ]
    assert natural_key("9" * 100_000) < natural_key("1" + "0" * 100_000)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([], []),
        (["config.json", "pytorch_model.bin", "tokenizer.model"], []),
        (["b.safetensors", "a.safetensors"], ["a.safetensors", "b.safetensors"]),
        (["part10.safetensors", "part9.safetensors"], ["part9.safetensors", "part10.safetensors"]),
        (["UPPER.SAFETENSORS"], ["UPPER.SAFETENSORS"]),
        (["._model.safetensors", ".hidden.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "model.safetensors.part", "model.safetensors.bak"], ["model.safetensors"]),
        (["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["consolidated.safetensors", *shards(2)], shards(2)),
        (["consolidated-00001-of-00001.safetensors", *shards(2)], shards(2)),
        (["model.safetensors", *shards(3)], shards(3)),
        (shards(12)[::-1], shards(12)),
        (shards(3, first=0), shards(3, first=0)),
        # openai/gpt-oss counts from 0 up to the total itself.
        (["model-00000-of-00002.safetensors", *shards(2)], ["model-00000-of-00002.safetensors", *shards(2)]),
        (["a-2-of-2.safetensors", "a-1-of-2.safetensors"], ["a-1-of-2.safetensors", "a-2-of-2.safetensors"]),
    ],
)  # fmt: skip
def test_choose_files(names, chosen):
    assert choose_files(names, "folder") == chosen


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (shards(3)[:2], "missing: model-00003-of-00003.safetensors"),
        (shards(3)[1:], "missing: model-00001-of-00003.safetensors"),
        ([*shards(3)[::2], "model.safetensors"], "missing: model-00002-of-00003.safetensors"),
        (shards(3, first=0)[:2], "missing: model-00002-of-00003.safetensors"),
        (["model-00001-of-100000000.safetensors"], "1 of 100,000,000 shards"),
        ([*shards(2), *shards(3)], "2 sets of shards"),
        ([*shards(2), *shards(2, "mtp-")], "2 sets of shards"),
    ],
)
def test_choose_files_refuses(names, words):
    with pytest.raises(CheckpointError, match=r"^folder: ") as caught:
        choose_files(names, "folder")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_choose_index():
    usual, other = "model.safetensors.index.json", "model.fp16.safetensors.index.json"
    assert choose_index(["model.safetensors", "pytorch_model.bin.index.json"], "folder") is None
    assert choose_index([other], "folder") == other
    assert choose_index([other, usual], "folder") == usual
    assert choose_index(["._" + usual], "folder") is None
    with pytest.raises(CheckpointError, match=r"several index files.*a\.safetensors\.index\.json"):
        choose_index([other, "a.safetensors.index.json"], "folder")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("model.safetensors", None),
        ("no_extension", None),
        ("UPPER.SAFETENSORS", None),
        ("blobs/0123abc", None),
        ("model-v1.5", None),
        (".bin", None),
        ("model.safetensors.index.json", None),
        ("folder.bin/model", None),
        ("a.bin", ".bin"),
        ("folder/A.PTH", ".pth"),
        ("config.json", ".json"),
        ("pytorch_model.bin.index.json", ".json"),
        ("photo.jpg", ".jpg"),
        ("model.safetensors.zip", ".zip"),
        ("model.safetensors.incomplete", ".incomplete"),
        ("x.gguf", ".gguf"),
    ],
)
def test_foreign_suffix(name, suffix):
    assert foreign_suffix(name) == suffix


def test_parse_index():
    weights = {"a": "x.safetensors", "b": "sub/y.safetensors", "c": "blob"}
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weights})
    assert parse_index(text.encode(), "i") == weights
    assert parse_index(b"\xef\xbb\xbf" + text.encode(), "i") == weights
    assert parse_index(b'{"weight_map":{"a":"x","a":"x"}}', "i") == {"a": "x"}


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map":{"a":"x","b:c":"y:z"}}',
        '{"weight_map":{"a":"x","b:c":"y:z"},"metadata":null}',
        '{"weight_map":{"a":"x","b:c":"y:z"},"metadata":{"a":1,"b":{"a":"x","c":[2]}}}',
        '{"weight_map":{"a":"x","b:c":"y:z"},"metadata":{"a":7,"a":7}}',
        '{"weight_map":{"a":"x","b:c":"y:z"},"metadata":{"a":"\\""}}',
        '{"weight_map":{"a":"x","b:c":"y:z"},"another":[1,2]}',
        '{"weight_map":{"a":"x","b:c":"y:z"},"weight_map":{"a":"x","b:c":"y:z"}}',
        '{"weight_map":{"a":"x","\\u0062:c":"y:z"}}',
        ' {"metadata" : NaN , "weight_map" : {"a":"x" , "b:c":"y:z"}}\n',
    ],
)
def test_all_ways_of_writing_an_index(text):
    assert list(parse_index(text.encode(), "i").items()) == [("a", "x"), ("b:c", "y:z")]


def test_names_beyond_ascii():
    weights = {"schön": "größe.safetensors", "日本": "語"}
    for ascii_only in (True, False):
        text = json.dumps({"weight_map": weights}, ensure_ascii=ascii_only)
        assert parse_index(text.encode(), "i") == weights


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "no valid JSON"),
        (b"{", "no valid JSON"),
        (b"\xff\xfe", "no valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"[]", "no 'weight_map'"),
        (b"{}", "no 'weight_map'"),
        (b'{"weight_map":[]}', "no 'weight_map'"),
        (b'{"weight_map":{}}', "lists no tensor"),
        (b'{"weight_map":{"w":1}}', "tensor 'w' in 1"),
        (b'{"weight_map":{"w":null}}', "tensor 'w' in null"),
        (b'{"weight_map":{"w":["x"]}}', "tensor 'w' in ['x']"),
        (b'{"weight_map":{"w":""}}', "tensor 'w' in ''"),
        (b'{"weight_map":{"w":"/etc/passwd"}}', "tensor 'w' in '/etc/passwd'"),
        (b'{"weight_map":{"w":"../x.safetensors"}}', "tensor 'w' in '../x.safetensors'"),
        (b'{"weight_map":{"w":"a/../../x.safetensors"}}', "tensor 'w' in 'a/../../x.safetensors'"),
        (b'{"weight_map":{"w":"./x.safetensors"}}', "tensor 'w' in './x.safetensors'"),
        (b'{"weight_map":{"w":"x\\u0000.safetensors"}}', "tensor 'w' in 'x\\x00.safetensors'"),
        (b'{"weight_map":{"w":"pytorch_model.bin"}}', "'pytorch_model.bin'"),
        (b'{"weight_map":{"w":"a","w":"b"}}', "'w' comes twice"),
        (b'{"weight_map":{"w":"a"},"weight_map":{"w":"b"}}', "'weight_map' comes twice"),
        (b'{"weight_map":{"w":"a"},"metadata":{"x":1,"x":2}}', "'x' comes twice"),
        (b'{"weight_map":{"w":"a"},"metadata":1,"metadata":2}', "'metadata' comes twice"),
        (b'{"weight_map":{"w":"a"},"other":{"x":1,"x":2}}', "'x' comes twice"),
        (b'{"weight_map":{"w":"a"},"metadata":"\xff"}', "no valid JSON"),
    ],
)
def test_parse_index_refuses(text, words):
    with pytest.raises(CheckpointError, match=r"^folder/i\.json: ") as caught:
        parse_index(text, "folder/i.json")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a\udfff/b.safetensors"])
def test_shards_named_with_half_a_surrogate_pair_are_refused(name):
    with pytest.raises(CheckpointError, match="no name of a file"):
        parse_index(json.dumps({"weight_map": {"t": name}}).encode(), "index")


def test_shards_named_with_a_byte_that_is_no_utf8():
    assert parse_index(json.dumps({"weight_map": {"t": "a\udcff.safetensors"}}).encode(), "index")
