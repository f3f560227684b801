"""minillm: LLM inference from first principles to the hardware limit, a readable module each.

Names are imported on first use, so that `import minillm` itself costs nothing.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_HOME = {  # public name -> the module that defines it
    "ModelConfig": "config",
    "Hardware": "hardware",
    "Tokenizer": "tokenizer",
    "attention": "attention",
    "KVCache": "kv_cache",
    "QuantizedKVCache": "quantized_kv",
    "Decoder": "model",
    "load": "weights",
    "merge_kv_heads": "gqa",
    "Sampling": "sampling",
    "generate": "generate",
    "prepack": "prepack",
    "quantize": "quantize",
    "sparsify": "sparsity",
    "make_student": "student",
    "load_student": "student",
    "distill": "distill",
    "ModelDrafter": "drafters",
    "NgramDrafter": "drafters",
    "MedusaDrafter": "medusa",
    "load_heads": "medusa",
    "speculative_generate": "speculative",
    "model_bytes": "quantize",
    "BlockAllocator": "blocks",
    "OutOfBlocks": "blocks",
    "PagedKVCache": "paged",
    "paged_attention": "ragged",
    "tensor_parallel": "parallel.tensor",
    "pipeline_parallel": "parallel.pipeline",
    "Engine": "engine",
    "EngineConfig": "engine_config",
}
_MODULES = (
    "blocks",
    "config",
    "costs",
    "engine",
    "evaluate",
    "flash",
    "fragmentation",
    "gqa",
    "grid",
    "hardware",
    "kv_cache",
    "measure",
    "metrics",
    "model",
    "paged",
    "plots",
    "quantized_kv",
    "request",
    "sampling",
    "scheduler",
    "sparsity",
    "speculative",
    "student",
    "timeline",
    "tokenizer",
    "training",
    "virtual_time",
    "weights",
    "workload",
)

__version__ = "0.1.0"
__all__ = [*_HOME, *_MODULES]


class _Package(ModuleType):
    """The package, whose functions keep their names.

    `attention`, `generate`, `prepack`, `quantize`, `distill` and `card` are functions in modules of
    the same name.
    Importing a module binds it to its name in the package; here that name stays the function's.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"minillm.{_HOME[name]}"), name)
        globals()[name] = value  # found at once the next time
        return value
    if name in _MODULES:
        return importlib.import_module(f"minillm.{name}")
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
