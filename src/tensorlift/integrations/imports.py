"""What to do once a module of an engine has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["imported_publisher", "when_imported"]


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then(module)``: now if the module is there already, else right after its import.

    A plug-in that imported what it extends would make each process of an engine pay for it, those that never
    load a model among them (3 s for vLLM's loaders).
    """
    module = sys.modules.get(name)
    # One that is still being imported is in the table too, and lacks what comes further down.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        then(module)
    else:
        sys.meta_path.insert(0, _Once(name, then))


def imported_publisher() -> Any:
    """What offers this process's models, where a loader has brought it; None elsewhere. Imports nothing."""
    module = sys.modules.get("tensorlift.integrations.publisher")
    return None if module is None else module.publisher


class _Once(MetaPathFinder):
    """Has the other finders find a module, and adds a step to its execution."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then, self._asking = name, then, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the one module, as others give it; None for all others."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
