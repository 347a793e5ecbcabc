"""Texts out of files in messages."""

import pytest

from tensorlift.format.quoting import clean, plural, quote, some_of, without_secrets


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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:1/a/path", "http://host:1/a/path"),
        ("http://me:secret@host:1/x", "http://host:1/x"),
        ("me:secret@host:1", "host:1"),
        ("me:secret//secret@host:1", "host:1"),
        ("http://me:pass/secret@host:1", "http://host:1"),
        ("http://me:pass@secret@host:1", "http://host:1"),
        ("http://host:1/?password=secret", "http://host:1/"),
        ("tensorlift+https://host:1/org/model?token=secret", "tensorlift+https://host:1/org/model"),
        ("redis://host/0;password=secret", "redis://host/0"),
        ("http://host:1&token=secret", "http://host:1"),
        ("http://host:1#secret", "http://host:1"),
        # Which of two it is cannot be told.
        ("http://me:pass?secret@host:1", "http://..."),
        ("http://host:1/?password=secret@secret", "http://..."),
        ("me:pass#secret@host", "..."),
        ("", ""),
    ],
)
def test_without_secrets(url, shown):
    assert without_secrets(url) == shown


def test_plural():
    assert [plural(n, "byte") for n in (0, 1, 4096)] == ["0 bytes", "1 byte", "4,096 bytes"]


def test_some_of_many():
    assert some_of(["a", "b"], 2) == "a, b"
    assert some_of(["a", "b", "c"], 2, quote, "; ") == "'a'; 'b' and 1 more"
    assert some_of(list(range(5_000)), 1) == "0 and 4,999 more"
