"""Checkpoint to model: Hugging Face folders, GGUF files, hub ids, and the default checkpoint.

Files are untrusted, so nothing here unpickles or executes them, sizes are checked against the file
before anything is allocated, and every tensor's name and shape is checked against the config before
the model is built. The result is a complete model, or one sentence that says what is wrong.

    files.py               reading untrusted files
    build.py               names and shapes checked, tensors copied in
    safetensors_folder.py  config.json and its .safetensors files
    gguf_header.py         what a GGUF file holds, and where
    gguf_config.py         its metadata as a config, and what is refused
    gguf_checkpoint.py     a GGUF file under Hugging Face names
    tokenizer_files.py     vocabularies, merges and chat templates
    default.py             the default checkpoint, fetched once
    loading.py             which kind a source is; the model and its tokenizer
"""

import importlib
from typing import Any

_HOME = {"load": "loading", "fetch_default": "default", "read_gguf": "gguf_header"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minillm.weights' has no attribute {name!r}")
    return getattr(importlib.import_module(f"minillm.weights.{_HOME[name]}"), name)
