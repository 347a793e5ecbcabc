"""What tests of several modules begin with."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tensorlift.integrations import publisher as publishing


@pytest.fixture
def publisher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[publishing.Publisher]:
    """One of rank 0, whose log is kept."""
    caplog.set_level(logging.INFO)
    made = publishing.Publisher()
    monkeypatch.setattr(publishing, "rank", lambda: 0)
    yield made
    made.close()
