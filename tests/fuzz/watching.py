"""Python code whose coverage atheris sees. Its own hook for imports passes over an editable installation."""

from __future__ import annotations

import types
from collections.abc import Iterator

import atheris

__all__ = ["watch"]


def watch(*modules: types.ModuleType) -> None:
    """Instruments all functions of modules and of their classes."""
    for module in modules:
        for function in _functions(vars(module), module.__name__):
            atheris.instrument_func(function)


def _functions(names: dict[str, object], module: str) -> Iterator[types.FunctionType]:
    for found in list(names.values()):
        found = getattr(found, "fget", getattr(found, "__func__", found))
        if getattr(found, "__module__", None) != module:
            continue
        if isinstance(found, types.FunctionType):
            yield found
        elif isinstance(found, type):
            yield from _functions(dict(vars(found)), module)
