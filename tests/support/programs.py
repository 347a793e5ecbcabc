"""Programs of the tree that are no modules of the package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from support.tree import ROOT


def program_of(path: str) -> ModuleType:
    """A Python program by its path from the root, loaded but not run."""
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
