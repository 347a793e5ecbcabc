"""Keys and tokens as callers give them."""

from __future__ import annotations

import string
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.errors import OptionError
from tensorlift.forking.fork import fork_into
from tensorlift.forking.keys import checked_key, checked_token, told_key, what_is_there
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed


def test_the_name_of_a_model_is_a_key() -> None:
    assert checked_key("org/model") == ModelKey(model="org/model")
    key = ModelKey(model="m", tp=(1, 2))
    assert checked_key(key) == key


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "key is ''; expected the name of a model or a ModelKey"),
        (None, "key is null; expected the name"),
        (ModelKey(model=5), "no ModelKey that can be sent: .*`str`"),  # type: ignore[arg-type]
        (ModelKey(model="m" * 5000), "no ModelKey that can be sent: .*4096"),
        (ModelKey(model="m", tp=(0, 0)), "no ModelKey that can be sent"),
        (ModelKey(model="m", ep=(2, 2)), "key has rank 2 of 2 in ep; ranks count from 0"),
    ],
)
def test_what_is_no_key(key: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        checked_key(key)


def test_tokens() -> None:
    assert checked_token(None) == ""
    assert checked_token("töken") == "töken"
    for bad in ("", " ", "a b", "a\r\nb", "a\x00", "a\x85", "a\xa0", "€", "\ud800", "a\xad"):
        with pytest.raises(OptionError, match="token ") as caught:
            checked_token(bad)
        assert bad.strip() == "" or bad not in str(caught.value)
    with pytest.raises(OptionError, match="token is a bytes; expected a str"):
        checked_token(b"secret")  # type: ignore[arg-type]


LATIN = [chr(code) for code in range(256) if chr(code).isprintable() and not chr(code).isspace()]


def test_each_character_of_a_token_passes() -> None:
    """Through the header of HTTP and the code of the socket."""
    import torch

    from tensorlift.forking.fork import fork_into

    token = "".join(LATIN)
    assert set(string.ascii_letters) < set(token)
    with Seed({"t": torch.ones(3)}, "m", token=token) as seed:
        into = {"t": torch.zeros(3)}
        fork_into(into, seed.url, token=token)
        assert (into["t"] == 1).all()


@given(st.text(max_size=20))
@settings(deadline=None)
def test_a_token_is_taken_or_refused(token: str) -> None:
    try:
        assert checked_token(token).encode("latin-1").strip() == token.encode("latin-1")
    except OptionError:
        assert not token or not set(token) <= set(LATIN)


def test_keys_in_messages() -> None:
    assert told_key(ModelKey(model="m")) == "'m' (target)"
    assert told_key(ModelKey(model="m", engine="vLLM 1, cpu")) == "'m' (target, vLLM 1, cpu)"
    key = ModelKey(model="m\n", role="draft", dtype="bf16", tp=(1, 2), ep=(0, 4), processed=False)
    assert told_key(key) == r"'m\n' (draft, bf16, tp 1 of 2, ep 0 of 4, not processed)"
    keys = [ModelKey(model="m", tp=(rank, 2)) for rank in range(2)]
    assert what_is_there(keys, ModelKey(model="m", tp=(3, 4))) == (
        "'m' (target, tp 0 of 2), 'm' (target, tp 1 of 2); its tp is 2, not 4, and a fork does not split "
        "weights anew"
    )
    mine = ModelKey(model="o/m", processed=False)
    assert what_is_there([mine], ModelKey(model="o/m")) == (
        "'o/m' (target, not processed); key=ModelKey(model='o/m', processed=False) is that one"
    )
    part = ModelKey(model="o/m", tp=(1, 2))
    assert what_is_there([part], msgspec.structs.replace(part, processed=False)).endswith(
        "; key=ModelKey(model='o/m', tp=(1, 2)) is that one"
    )
    many = [ModelKey(model=f"m{k}") for k in range(30)]
    assert what_is_there(many, ModelKey(model="x", tp=(0, 2))).endswith("'m19' (target) and 10 more")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("chunk_bytes", value) for value in (-5, 0, 1.5, True, "some")),
        *(("connections", value) for value in (-1, 0, "some")),
        *(("patience", value) for value in (0, -1, float("nan"), float("inf"), "some")),
    ],
)
def test_numbers_that_a_fork_cannot_work_with(name: str, value: Any) -> None:
    """Chunks of fewer than no bytes were none: the fork said that it had all."""
    with pytest.raises(OptionError, match=f"^{name} is "):
        fork_into({"a": torch.zeros(5)}, "http://127.0.0.1:1", **{name: value})
