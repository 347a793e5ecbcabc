"""No token of whoever runs the tests is taken for one of theirs."""

from __future__ import annotations

import pytest

from tensorlift.forking.tokens import TOKEN_VARIABLE


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
