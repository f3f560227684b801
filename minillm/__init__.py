"""minillm: LLM inference from first principles to the hardware limit, a readable module each.

Names are imported on first use, so that `import minillm` itself costs nothing.
"""

import importlib
from typing import Any

_HOME = {  # public name -> the module that defines it
    "ModelConfig": "config",
    "Hardware": "hardware",
    "Tokenizer": "tokenizer",
    "Sampling": "sampling",
    "attention": "layers.attention",
    "Decoder": "model",
    "load": "weights.loading",
    "KVCache": "kv_cache",
    "generate": "generation",
    "prepack": "prepacked",
    "merge_kv_heads": "gqa",
    "BlockAllocator": "blocks",
    "OutOfBlocks": "blocks",
    "PagedKVCache": "paged",
    "paged_attention": "ragged",
    "Engine": "serving.engine",
    "EngineConfig": "serving.engine_config",
    "quantize": "quantization.quantize",
    "model_bytes": "quantization.quantize",
    "QuantizedKVCache": "quantization.kv_cache",
    "sparsify": "quantization.sparsity",
    "make_student": "distillation.student",
    "load_student": "distillation.student",
    "distill": "distillation.distill",
    "ModelDrafter": "speculation.drafters",
    "NgramDrafter": "speculation.drafters",
    "MedusaDrafter": "speculation.medusa",
    "load_heads": "speculation.medusa_heads",
    "speculative_generate": "speculation.speculative",
    "tensor_parallel": "parallel.tensor",
    "pipeline_parallel": "parallel.pipeline",
}
_MODULES = {
    name: name
    for name in (
        "blocks", "card", "config", "costs", "evaluate", "fragmentation", "gqa", "hardware",
        "kv_cache", "measure", "model", "paged", "sampling", "tokenizer", "training", "weights",
    )
} | {"plots": "tools.plots"}  # fmt: skip

__version__ = "1.0.0"
__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"minillm.{_MODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"minillm.{_HOME[name]}"), name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
