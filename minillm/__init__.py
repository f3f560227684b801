"""minillm: LLM inference from first principles to the hardware limit, one readable module per technique.

Names are imported on first use, so that `import minillm` itself costs nothing.
"""

import importlib
from typing import Any

_HOME = {  # public name -> the module that defines it
    "ModelConfig": "config",
    "Hardware": "hardware",
    "Tokenizer": "tokenizer",
    "attention": "attention",
    "KVCache": "kv_cache",
    "Decoder": "model",
    "load": "weights",
    "Sampling": "sampling",
    "generate": "generate",
}
_MODULES = ("config", "costs", "hardware", "kv_cache", "model", "plots", "sampling", "tokenizer", "weights")

__version__ = "0.1.0"
__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"minillm.{_HOME[name]}"), name)
    elif name in _MODULES:
        return importlib.import_module(f"minillm.{name}")
    else:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    # `attention` and `generate` are each a function in a module of the same name. Importing the module binds the
    # module to this name; rebinding puts the function back.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
