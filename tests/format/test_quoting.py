"""Texts out of files in messages."""

import pytest

from tensorlift.format.quoting import clean, plural, quote


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("a\n\x1b", "'a\\n\\x1b'"),
        ("\udc80", "'\\udc80'"),
        ("\u4e2d", "'\u4e2d'"),
        ("x" * 200, "'" + "x" * 100 + "…'"),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1, "a", None], "[1, 'a', null]"),
        ([[[1]]], "[[[1]]]"),
        ({"a": 1}, "an object"),
        ({}, "{}"),
        pytest.param(10**5000, "an integer of 16,610 bits", id="5,000 digits"),
        (b"\xff{", "b'\\xff{'"),
    ],
)
def test_quote(value, text):
    assert quote(value) == text


def test_long_lists_are_cut():
    assert quote(list(range(100_000))).endswith("18, 19, …]")
    assert len(quote([["x" * 1000] * 1000] * 1000)) < 110


def test_deep_lists_are_not_walked_to_the_bottom():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert len(quote(deep)) < 110


def test_clean_keeps_what_can_be_printed():
    assert clean("\u00fc \U0001f4a9") == "\u00fc \U0001f4a9"
    assert clean("a\tb\u202e") == "a\\tb\\u202e"


def test_plural():
    assert [plural(n, "byte") for n in (0, 1, 4096)] == ["0 bytes", "1 byte", "4,096 bytes"]
