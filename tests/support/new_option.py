"""An option that the library gets in a test: load formats have to take it without a list of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tensorlift import loading
from tensorlift.integrations import settings
from tensorlift.options import LoadOptions


def added(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Adds ``brand_new``, a number; the dict gets what a load was opened with."""
    field: Any = dataclasses.field(
        default=None,
        metadata={"parse": lambda value, name: int(value), "unit": "", "automatic": "", "doc": ""},
    )
    more = dataclasses.make_dataclass(
        "More", [("brand_new", "int | None", field)], bases=(LoadOptions,), frozen=True, kw_only=True
    )
    monkeypatch.setattr(settings, "LoadOptions", more)
    seen: dict[str, Any] = {}
    opened = loading.open

    def recorded(*args: Any, brand_new: int, **options: Any) -> Any:
        seen["brand_new"] = brand_new
        return opened(*args, **options)

    monkeypatch.setattr(loading, "open", recorded)
    return seen
