"""Where tokens come from, and what is none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tensorlift
from tensorlift.errors import OptionError
from tensorlift.forking.tokens import TOKEN_VARIABLE, token_of


def test_a_file_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert token_of() == ""
    monkeypatch.setenv(TOKEN_VARIABLE, " of-the-environment\n")
    assert token_of() == "of-the-environment"
    (tmp_path / "token").write_text("of-the-file\n")
    assert token_of(str(tmp_path / "token")) == "of-the-file"


NO_TOKEN = "(this is no token|token has characters that cannot go into a header)"


@pytest.mark.parametrize("content", ["two words", "new\nline", "日本", "\x00", "x" * 5000])
def test_what_is_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(OptionError, match=rf"token': {NO_TOKEN}") as caught:
        token_of(str(tmp_path / "token"))
    assert content not in str(caught.value)
    if "\x00" not in content:
        monkeypatch.setenv(TOKEN_VARIABLE, content)
        with pytest.raises(OptionError, match=rf"^TENSORLIFT_TOKEN: {NO_TOKEN}"):
            token_of()


def test_files_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(OptionError, match="is empty; expected a token"):
        token_of(str(tmp_path / "empty"))
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        token_of(str(tmp_path / "none"))


def test_no_token_is_compared_in_a_time_that_tells_of_it() -> None:
    """By hmac.compare_digest alone, everywhere."""
    secret = re.compile(r"token|password|secret", re.IGNORECASE)
    found = []
    for path in Path(tensorlift.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                names = [
                    getattr(one, "id", getattr(one, "attr", "")) for one in (node.left, *node.comparators)
                ]
                found += [f"{path}:{node.lineno}: {name}" for name in names if secret.search(name)]
    assert not found
