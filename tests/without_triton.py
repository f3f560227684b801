"""A pytest plugin: the package triton cannot be found, as on a system that it does not exist for.

Run with it: `PYTHONPATH=tests python -m pytest -p without_triton`.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

assert "triton" not in sys.modules, "load this plugin with -p, before anything imports triton"


class _PathFinderWithoutTriton:
    """Python's own finder of packages, but for one. `importlib.util.find_spec` asks it, too."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name.split(".")[0] == "triton" else PathFinder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(PathFinder, name)  # what importlib.metadata asks for, say


sys.meta_path[sys.meta_path.index(PathFinder)] = _PathFinderWithoutTriton()
