"""Imported at start-up in the environment of SGLang on a CPU: stands in for what is built for CUDA alone.

- torchvision's build expects two operators that a torch for CPUs does not have; defined, it imports.
- sgl_kernel has no CPU build in a registry. SGLang's torch-native paths only import names of it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Stubs:
    """A finder of modules: gets torchvision's operators ready, and makes sgl_kernel."""

    library: Any = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # As untyped as importlib's own protocol for loaders without a base class.
        loader: Any = self
        return ModuleSpec(name, loader, is_package=True) if name == "sgl_kernel" else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def refuse(*args: object, **given: object) -> None:
                raise NotImplementedError(f"sgl_kernel.{name}")

            refuse.__name__ = name
            return refuse

        vars(module).update(__version__="0.4.10", __getattr__=missing)


sys.meta_path.insert(0, _Stubs())
