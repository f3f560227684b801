"""Checkpoint to model: Hugging Face folders, GGUF files, hub ids, and the default checkpoint.

Files come from others, so nothing here unpickles or executes them, sizes are checked against the
file before anything is allocated, and every tensor's name and shape is checked against the config
before the model is built. Either a whole model comes back or one sentence that says what is wrong.

    default.py             the default checkpoint, fetched once
    gguf_header.py         what a GGUF file holds, and where
    gguf_checkpoint.py     a GGUF file under Hugging Face names
    safetensors_folder.py  config.json and its .safetensors files
    tokenizer_files.py     vocabularies, merges and chat templates
    files.py               reading untrusted files
    loading.py             which of these a source is; the model and its tokenizer
    build.py               names and shapes checked, tensors copied in
"""

import importlib
from typing import Any

_HOME = {"load": "loading", "fetch_default": "default", "read_gguf": "gguf_header"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minillm.weights' has no attribute {name!r}")
    return getattr(importlib.import_module(f"minillm.weights.{_HOME[name]}"), name)
