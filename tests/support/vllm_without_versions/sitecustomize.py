"""Hides vLLM's own version of each token, in processes with this folder in PYTHONPATH, as if vLLM were older than 0.32.

vLLM's own code, which calls the missing method, gets None from it.
"""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

MODULE, METHOD = "vllm.v1.engine.output_processor", "_weight_version_spans"


class Hiding(importlib.abc.MetaPathFinder):
    """Loads the module, and takes the method from its class."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def without(module: Any) -> None:
            load(module)
            delattr(module.RequestState, METHOD)
            module.RequestState.__getattr__ = missing

        spec.loader.exec_module = without  # type: ignore[method-assign]
        return spec


def missing(state: Any, name: str) -> Any:
    if name == METHOD:
        return lambda: None
    raise AttributeError(name)


sys.meta_path.insert(0, Hiding())
