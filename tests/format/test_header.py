"""One malformed header a rule, the legal oddities, and what messages say."""

import json
import struct
import time

import numpy as np
import pytest

from support.checkpoints import BITS, header_bytes, nbytes_of, random_row
from support.headers import parsed_in_both_ways
from tensorlift.errors import HeaderError, TruncatedError
from tensorlift.format.dtypes import ALL
from tensorlift.format.header import LONGEST_HEADER, PREFIX_BYTES, header_length

PATH = "folder/file.safetensors"


def whole(header: bytes | dict, data_bytes: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


def opened(content: bytes, path: str = PATH):
    length = header_length(content[:PREFIX_BYTES], len(content), path)
    return parsed_in_both_ways(content[8 : 8 + length], len(content), path)


def entry(begin: int, end: int, shape=None, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


ONE = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


def test_columns_are_in_the_order_of_the_bytes():
    header = opened(
        whole(
            {
                "c": entry(6, 8, [1], "BF16"),
                "z": entry(2, 2, [0, 3]),
                "a": entry(0, 2),
                "b": entry(2, 6, [], "F32"),
            },
            8,
        )
    )
    assert header.names == ["a", "z", "b", "c"]
    assert header.shapes == [(2,), (0, 3), (), (1,)]
    assert [ALL[i].code for i in header.dtypes] == ["U8", "U8", "F32", "BF16"]
    first = int(header.starts[0])
    assert (header.starts - first).tolist() == [0, 2, 2, 6]
    assert header.sizes.tolist() == [2, 0, 4, 2]
    assert (header.starts.dtype, header.sizes.dtype, header.dtypes.dtype) == (np.int64, np.int64, np.uint8)
    assert header.metadata is None


def test_ties_of_empty_tensors_keep_the_order_of_the_json():
    header = opened(
        whole({"b": entry(4, 4, [0]), "a": entry(4, 4, [0]), "d": entry(0, 4), "c": entry(0, 0, [0])}, 4)
    )
    assert header.names == ["c", "d", "b", "a"]


@pytest.mark.parametrize("code", BITS)
def test_every_dtype(code):
    size = nbytes_of(code, (4, 8))
    header = opened(whole(header_bytes({"w": random_row(code, (4, 8))}), size))
    assert ALL[header.dtypes[0]].code == code
    assert header.sizes.tolist() == [size]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{%s}", None),
        ('{"__metadata__":{},%s}', {}),
        ('{"__metadata__":null,%s}', None),
        ('{"__metadata__":{"format":"pt"},%s}', {"format": "pt"}),
        ('{%s,"__metadata__":{"a":"1"}}', {"a": "1"}),
        ('{ "__metadata__" : {"a":"1"} ,%s}', {"a": "1"}),
        ('{"__metadata__":{"dtype":"F32"},%s}', {"dtype": "F32"}),
        ('{"__metadata__":{"shape":"[1]","data_offsets":"x"},%s}', {"shape": "[1]", "data_offsets": "x"}),
        ('{"__metadata__":{"a:b":"{\\"c\\":\\"d\\"}"},%s}', {"a:b": '{"c":"d"}'}),
        ('{"__metadata__":{"\\u003a":"\\n\\ud83d\\ude00"},%s}', {":": "\n\N{GRINNING FACE}"}),
        ('{"__metadata__":{"k":"\\"__metadata__\\":"},%s}', {"k": '"__metadata__":'}),
    ],
)
def test_metadata(text, expected):
    content = whole(text.replace("%s", '"w:\N{SNOWMAN}":' + ONE).encode(), 4)
    header = opened(content)
    assert header.metadata == expected
    assert header.names == ["w:\N{SNOWMAN}"]


@pytest.mark.parametrize(
    "text",
    [
        '{"a":%s}' + " " * 1000,
        '{"a":%s}\n\t ',
        '{"":%s}',
        '{"a" : { "shape" : [ 4 ] , "dtype":"U8", "data_offsets":[0 , 4]}}',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"extra":{"deep":[1,{"x":null}]}}}',
        '{"a\\"\\\\b":%s}',
        '{"\\u0000\\u001b[31m":%s}',
        '{"x\\"__metadata__":%s}',
    ],
)
def test_legal_but_unusual(text):
    text = text.replace("%s", ONE)
    header = opened(whole(text.encode(), 4))
    assert header.shapes == [(4,)]
    assert header.names == list(json.loads(text))


def test_a_header_without_tensors():
    header = opened(whole(b"{}"))
    assert header.names == []
    assert len(header.starts) == len(header.sizes) == len(header.dtypes) == 0


def bad(entry_text: str) -> bytes:
    return b'{"w":{' + entry_text.encode() + b"}}"


GOOD_DTYPE, GOOD_SHAPE, GOOD_RANGE = '"dtype":"U8"', '"shape":[4]', '"data_offsets":[0,4]'

BROKEN = {
    # rule: (header, bytes of data, what the message has to have)
    "not utf-8": (b'{"\xff":' + ONE.encode() + b"}", 4, "UTF-8"),
    "not utf-8 in a part that nobody needs": (b'{"w":{"x":"\xff","dtype":"U8"}}', 4, "UTF-8"),
    "leading space": (b' {"w":' + ONE.encode() + b"}", 4, "begin with '{'"),
    "byte order mark": (b'\xef\xbb\xbf{"w":' + ONE.encode() + b"}", 4, "begin with '{'"),
    "an array": (b"[1,2]", 0, "begin with '{'"),
    "cut off": (b'{"w":', 0, "JSON"),
    "trailing text": (b"{} x", 0, "JSON"),
    "trailing NUL": (b"{}\0\0\0", 0, "JSON"),
    "trailing comma": (b'{"w":' + ONE.encode() + b",}", 4, "JSON"),
    "control character": (b'{"w\n":' + ONE.encode() + b"}", 4, "JSON"),
    "half a surrogate pair": (b'{"w\\ud800":' + ONE.encode() + b"}", 4, "surrogate"),
    "nested deeply": (b'{"w":{"x":' + b"[" * 100_000, 0, "nested too deeply"),
    "nested deeply, closed": (
        b'{"w":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        0, "nested too deeply",
    ),
    "metadata is a list": (b'{"__metadata__":[]}', 0, "__metadata__"),
    "metadata is a tensor": (b'{"__metadata__":' + ONE.encode() + b"}", 4, "__metadata__"),
    "metadata has a number": (b'{"__metadata__":{"a":1}}', 0, "__metadata__['a']"),
    "metadata twice": (
        b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"1"}}',
        0, "'__metadata__' comes twice",
    ),
    "a key of metadata twice": (b'{"__metadata__":{"a":"1","a":"2"}}', 0, "'a' comes twice"),
    "a name twice": ('{"w":%s,"w":%s}'.replace("%s", ONE).encode(), 4, "'w' comes twice"),
    "a name twice, once as an escape": (
        '{"w":%s,"\\u0077":%s}'.replace("%s", ONE).encode(),
        4, "'w' comes twice",
    ),
    "a key twice": (
        bad('"dtype":"F32",' + ", ".join((GOOD_DTYPE, GOOD_SHAPE, GOOD_RANGE))),
        4, "'dtype' comes twice",
    ),
    "entry is a list": (b'{"w":["U8",[4],[0,4]]}', 4, "'w'"),
    "entry is null": (b'{"w":null}', 0, "'w'"),
    "no dtype": (bad(f"{GOOD_SHAPE},{GOOD_RANGE}"), 4, "no 'dtype'"),
    "no shape": (bad(f"{GOOD_DTYPE},{GOOD_RANGE}"), 4, "no 'shape'"),
    "no offsets": (bad(f"{GOOD_DTYPE},{GOOD_SHAPE}"), 4, "no 'data_offsets'"),
    "unknown dtype": (bad(f'"dtype":"F7",{GOOD_SHAPE},{GOOD_RANGE}'), 4, "'F7'"),
    "dtype in lower case": (bad(f'"dtype":"u8",{GOOD_SHAPE},{GOOD_RANGE}'), 4, "'u8'"),
    "dtype is a number": (bad(f'"dtype":8,{GOOD_SHAPE},{GOOD_RANGE}'), 4, "unknown dtype 8"),
    "dtype is null": (bad(f'"dtype":null,{GOOD_SHAPE},{GOOD_RANGE}'), 4, "unknown dtype null"),
    "shape is a number": (bad(f'{GOOD_DTYPE},"shape":4,{GOOD_RANGE}'), 4, "found 4"),
    "shape with a float": (bad(f'{GOOD_DTYPE},"shape":[4.0],{GOOD_RANGE}'), 4, "found [4.0]"),
    "shape with a bool": (bad(f'{GOOD_DTYPE},"shape":[4,true],{GOOD_RANGE}'), 4, "found [4, true]"),
    "shape with a string": (bad(f'{GOOD_DTYPE},"shape":["4"],{GOOD_RANGE}'), 4, "found ['4']"),
    "shape below 0": (bad(f'{GOOD_DTYPE},"shape":[-2,-2],{GOOD_RANGE}'), 4, "found [-2, -2]"),
    "shape beyond int64": (bad(f'{GOOD_DTYPE},"shape":[18446744073709551616,0],{GOOD_RANGE}'), 4, "'w'"),
    "shape of 4,000 digits": (bad(f'{GOOD_DTYPE},"shape":[{"9" * 4000}],{GOOD_RANGE}'), 4, "bits"),
    "shape of 5,000 digits": (bad(f'{GOOD_DTYPE},"shape":[{"9" * 5000}],{GOOD_RANGE}'), 4, "JSON"),
    "NaN": (bad(f'{GOOD_DTYPE},"shape":[NaN],{GOOD_RANGE}'), 4, "NaN"),
    "Infinity where nobody looks": (
        bad(f'"x":Infinity,{GOOD_DTYPE},{GOOD_SHAPE},{GOOD_RANGE}'),
        4, "Infinity",
    ),
    "float offsets": (bad(f'{GOOD_DTYPE},{GOOD_SHAPE},"data_offsets":[0.0,4.0]'), 4, "found [0.0, 4.0]"),
    "exponent": (bad(f'{GOOD_DTYPE},{GOOD_SHAPE},"data_offsets":[0,4e0]'), 4, "found [0, 4.0]"),
    "one offset": (bad(f'{GOOD_DTYPE},{GOOD_SHAPE},"data_offsets":[0]'), 4, "found [0]"),
    "three offsets": (bad(f'{GOOD_DTYPE},{GOOD_SHAPE},"data_offsets":[0,2,4]'), 4, "found [0, 2, 4]"),
    "offsets backwards": (bad(f'{GOOD_DTYPE},{GOOD_SHAPE},"data_offsets":[4,0]'), 4, "found [4, 0]"),
    "offsets below 0": (bad(f'{GOOD_DTYPE},{GOOD_SHAPE},"data_offsets":[-4,0]'), 4, "found [-4, 0]"),
    "offsets beyond int64": (
        bad(f'{GOOD_DTYPE},{GOOD_SHAPE},"data_offsets":[{2**64},{2**64 + 4}]'),
        4, "2**63",
    ),
    "shape larger": ({"w": entry(0, 4, [1000, 1000], "F32")}, 4, "takes 4,000,000 bytes"),
    "shape smaller": ({"w": entry(0, 4096, [1], "F32")}, 4096, "takes 4 bytes"),
    "product beyond int64": ({"w": entry(0, 64, [2**32, 2**32, 4])}, 64, "more elements"),
    "bytes beyond int64": ({"w": entry(0, 64, [2**61 + 8], "F64")}, 64, "takes 18,446,744,073,709,551,680"),
    "product beyond int64, of an empty tensor": ({"w": entry(0, 0, [2**40, 0, 2**40])}, 0, "more elements"),
    "empty with bytes": ({"w": entry(0, 64, [0])}, 64, "takes 0 bytes"),
    "one element without bytes": ({"w": entry(0, 0, [1])}, 0, "takes 1 byte"),
    "half a byte": ({"w": entry(0, 2, [3], "F4")}, 2, "F4 [3] takes 12 bits"),
    "three quarters of a byte": ({"w": entry(0, 1, [1], "F6_E2M3")}, 1, "F6_E2M3 [1] takes 6 bits"),
    "overlap": ({"v": entry(0, 64), "w": entry(32, 96)}, 96, "32 bytes would belong to both"),
    "alias": ({"v": entry(0, 64), "w": entry(0, 64)}, 64, "both have the same bytes"),
    "empty inside another": ({"v": entry(0, 64), "w": entry(32, 32, [0])}, 64, "'w'"),
    "hole in front": ({"w": entry(16, 64)}, 64, "16 bytes before it belong to no tensor"),
    "hole between": ({"v": entry(0, 16), "w": entry(32, 64)}, 64, "16 bytes before it belong to no tensor"),
    "bytes left over": ({"w": entry(0, 64)}, 71, "7 bytes after the last tensor"),
    "bytes left over without a tensor": (b"{}", 1, "1 byte after the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_header(rule):
    header, data_bytes, words = BROKEN[rule]
    with pytest.raises(HeaderError) as caught:
        opened(whole(header, data_bytes))
    text = str(caught.value)
    assert text.startswith(PATH)
    assert words in text
    assert text.isprintable()
    if "'w'" in repr(header) or isinstance(header, dict):
        assert "'w'" in text


def test_a_range_past_the_end_is_a_truncated_file():
    content = whole({"v": entry(0, 64), "w": entry(64, 4160)}, 128)
    with pytest.raises(TruncatedError, match=r"4,032 bytes missing.*'w'.*64 of 4,096 bytes are there"):
        opened(content)


CUTS = [0, 1, 4, 7, 8, 9, 40, 80]


@pytest.mark.parametrize("nbytes", CUTS)
def test_every_cut_is_a_truncated_file(nbytes):
    content = whole({"v": entry(0, 8), "w": entry(8, 24)}, 24)
    for cut in (nbytes, len(content) - 1 - nbytes):
        with pytest.raises(TruncatedError) as caught:
            opened(content[:cut])
        assert str(caught.value).startswith(PATH)


@pytest.mark.parametrize(
    ("claim", "error"),
    [
        (2**64 - 1, HeaderError),
        (2**63 - 1, HeaderError),
        (2**64 - 8, HeaderError),
        (LONGEST_HEADER + 1, HeaderError),
        (LONGEST_HEADER, TruncatedError),
        (1000, TruncatedError),
        (0, HeaderError),
        (1, HeaderError),
    ],
)
def test_length_field(claim, error):
    raw = b'{"w":' + ONE.encode() + b"}    "
    content = struct.pack("<Q", claim) + raw + bytes(4)
    with pytest.raises(error, match=f"{claim:,} byte"):
        opened(content)


def test_the_longest_header_is_allowed():
    """The length alone is looked at here: nothing of that size is made."""
    assert header_length(struct.pack("<Q", LONGEST_HEADER) + b"{", LONGEST_HEADER + 8, PATH) == LONGEST_HEADER
    with pytest.raises(HeaderError, match="at most 100,000,000"):
        header_length(struct.pack("<Q", LONGEST_HEADER + 1) + b"{", LONGEST_HEADER + 9, PATH)


FOREIGN = {
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "Xet pointer": b"# xet version 0\nfilesize = 1\n",
    "web page": b"\n<!DOCTYPE html><html><body>404</body></html>",
    "XML or HTML": b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
    "JPEG": b"\xff\xd8\xff\xe0\0\x10JFIF\0" + bytes(50),
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(50),
    "zip archive": b"PK\x03\x04" + bytes(400),
    "pickle": b"\x80\x02}q\0(X\x01\0\0\0" + bytes(50),
    "GGUF": b"GGUF\x03\0\0\0" + bytes(50),
    "gzip": b"\x1f\x8b\x08\0" + bytes(50),
    "tar archive": bytes(257) + b"ustar\0" + bytes(249),
    "zeros": bytes(4096),
    "JSON text": b'{"error": "Invalid username or password."}',
    "text that starts with 'Entry not found'": b"Entry not found",
    "ELF": b"\x7fELF\x02\x01\x01" + bytes(60),
    "AppleDouble": b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(60),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_files_are_called_by_their_name(kind):
    with pytest.raises(HeaderError) as caught:
        opened(FOREIGN[kind])
    assert kind in str(caught.value)
    assert str(caught.value).startswith(PATH)


def test_a_good_file_that_looks_like_another_is_loaded():
    """Its length field, 0x8b1f, is how gzip files begin; only what is refused anyway is judged by that."""
    raw = b"{}" + b" " * (0x8B1F - 2)
    content = whole(raw)
    assert content.startswith(b"\x1f\x8b")
    assert opened(content).names == []


def test_hostile_names_and_paths_are_cut_and_escaped():
    name = "\x1b[31m\u202e" + "x" * 10_000
    content = whole(
        json.dumps({name: entry(0, 4, [5])}, ensure_ascii=False).replace("\x1b", "\\u001b").encode(), 4
    )
    with pytest.raises(HeaderError) as caught:
        opened(content, "new\nline\udcff.safetensors")
    text = str(caught.value)
    assert text.isprintable()
    assert text.startswith("new\\nline\\udcff.safetensors: tensor '\\x1b[31m\\u202e")
    assert len(text) < 500
    text.encode()


def test_long_shapes_are_cut():
    content = whole({"w": entry(0, 4, [1] * 100_000 + [5])}, 4)
    with pytest.raises(HeaderError) as caught:
        opened(content)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("shape", [[2**63 - 1] * 50_000, [0] + [2**62] * 50_000, [2**63 - 1] * 50_000 + [0]])
def test_shapes_of_very_many_dimensions_are_refused_at_once(shape):
    # Their whole product has a million digits, and takes a minute.
    begin = time.perf_counter()
    with pytest.raises(HeaderError, match=r"'a': U8 .* has more elements than"):
        opened(whole({"a": entry(0, 0, shape)}))
    assert time.perf_counter() - begin < 5


def test_very_many_dimensions_of_one_are_legal():
    header = opened(whole({"a": entry(0, 2, [1] * 999 + [2])}, 2))
    assert header.sizes.tolist() == [2]
