"""The library's scanner: what it reads, and what it leaves to Python's reader."""

from __future__ import annotations

import json
import re

import pytest

from support.checkpoints import BITS
from support.tree import ROOT
from tensorlift.engine import abi, headers
from tensorlift.engine.headers import HeaderScan

ENTRY = '{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}'


def scanned(text: str) -> object:
    return HeaderScan(text.encode()).result()


def test_every_column() -> None:
    head = {
        "__metadata__": {"format": "pt", "nested": '{"a": "}"}'},
        "one": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "zwö": {"shape": [], "data_offsets": [24, 25], "dtype": "U8"},
        "none": {"dtype": "F8_E4M3FNUZ", "shape": [0, 2**62, 1], "data_offsets": [25, 25]},
        "again": {"dtype": "F8_E4M3FNUZ", "shape": [0, 2**62, 1], "data_offsets": [25, 25]},
    }
    for text in (
        json.dumps(head, ensure_ascii=False),
        json.dumps(head, ensure_ascii=False, indent=2) + "   ",
    ):
        found = HeaderScan(text.encode()).result()
        assert found is not None
        assert found.names == ["one", "zwö", "none", "again"]
        assert found.shapes == [(2, 3), (), (0, 2**62, 1), (0, 2**62, 1)]
        first = 8 + len(text.encode())
        assert [start - first for start in found.starts.tolist()] == [0, 24, 25, 25]
        assert found.sizes.tolist() == [24, 1, 0, 0]
        assert found.tiled
        assert [sorted(BITS)[0] in BITS, len(set(found.dtypes.tolist()))] == [True, 3]
        assert found.metadata is not None
        assert json.loads(found.metadata) == head["__metadata__"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "{}x", '{"a":ENTRY', '{"a":ENTRY}}', '{"a":ENTRY,}', '{"a":ENTRY,"a":ENTRY}',
        '{"\\u0061":ENTRY}', '{"a\n":ENTRY}', '{"a":null}', '{"a":{}}',
        '{"__metadata__":null}', '{"__metadata__":{"a":"}', '{"__metadata__":{},"__metadata__":{}}',
        '{"__metadata__":{"a":"\\',
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_python(text: str) -> None:
    assert scanned('{"a":ENTRY}'.replace("ENTRY", ENTRY)) is not None
    assert scanned(text.replace("ENTRY", ENTRY)) is None


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        ("BF16", "BF17"), ("BF16", "BF1"), ("BF16", ""), ("BF16", "BOOL F4"), ("2,3", "02,3"),
        ("2,3", "2,-3"), ("2,3", "2,3.0"), ("2,3", "2,3,"), ("2,3", f"{2**63}"), ("2,3", f"{2**62},2,0"),
        ("0,12", "0,12,13"), ("0,12", "12,0"), ("0,12", "12"), ('"dtype"', '"kind"'), ('"shape"', '"dtype"'),
        ("]}", '],"more":1}'), ("0,12", "0,11"), ("0,12", "0,14"), ("BF16", "F4"), ("BF16", "F6_E2M3"),
        ("[2,3]", f"[{2**62}]"),
        ("2,3", ",".join("1" * 65)),
    ],
)  # fmt: skip
def test_entries_that_are_not_plain(plain: str, other: str) -> None:
    assert scanned('{"a":' + ENTRY.replace(plain, other) + "}") is None


def test_a_scan_that_nobody_takes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []
    call = abi.library().call
    free = call["tl_header_free"]
    monkeypatch.setitem(call, "tl_header_free", lambda handle: (freed.append(handle), free(handle)))
    scan = HeaderScan(b'{"a":' + ENTRY.encode() + b"}")
    taken = scan.result()
    del scan
    HeaderScan(b"no header")
    assert len(freed) == 2
    assert taken is not None
    assert taken.names == ["a"]


def test_the_facts_lie_as_in_c() -> None:
    declared = (ROOT / "native/include/tensorlift.h").read_text()
    names = re.findall(r"^    TL_HEADER_(\w+)", declared, re.MULTILINE)
    places = [
        headers._HANDLE, headers._PLAIN, headers._NBYTES, headers._COUNT, headers._TILED, headers._BEGIN,
        headers._END, headers._FILE_BYTES, headers._DEVICE, headers._INODE, headers._FACTS,
    ]  # fmt: skip
    assert names == [
        "HANDLE", "PLAIN", "NBYTES", "COUNT", "TILED", "METADATA_BEGIN", "METADATA_END", "FILE_BYTES",
        "DEVICE", "INODE", "FACTS",
    ]  # fmt: skip
    assert places == list(range(len(names)))
