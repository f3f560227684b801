"""What the reader builds stays: `keep(function)` writes it to the folder `mine/`."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`keep` and `load`, of `minillm.mine.kept`."""
    if name not in ("keep", "load"):
        raise AttributeError(f"module 'minillm.mine' has no attribute {name!r}")
    return getattr(import_module("minillm.mine.kept"), name)
