"""A checkpoint in Hugging Face format: config.json beside one or more .safetensors files.

Source: the safetensors format (README of huggingface/safetensors).
"""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.hf_config import from_hf
from minillm.tools.checks import brief
from minillm.weights.build import SLICE_BYTES
from minillm.weights.files import MEGABYTE, PATH, check_file, read_json

_DTYPES = ("F32", "F16", "BF16")
_OPEN_BYTES, _OPEN_FILES = 64 << 20, 64


class SafetensorsFolder:
    """The tensors of a folder, read in slices through the safetensors package."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.label, self._open = str(folder), safe_open
        raw = read_json(folder / "config.json")
        self.config = from_hf(raw, name=folder.resolve().name)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._path: dict[str, Path] = {}  # tensor -> its file
        self._files: dict[Path, Any] = {}  # open now
        self._n_read = 0  # bytes since they were opened
        for path in _files(folder):
            try:
                self._list_tensors(path)
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is truncated or not a safetensors file ({brief(str(error), 300)}); "
                    "fetch it again."
                ) from error

        # Two different matrices cannot be one, whatever the config says; transformers agrees.
        if self.config.tie_embeddings and not self._head_is_the_embedding():
            self.config = replace(self.config, tie_embeddings=False)

    def _head_is_the_embedding(self) -> bool:
        """True if there is no head of its own, or only a copy of the embedding."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.shapes or embedding not in self.shapes:
            return True  # a missing embedding is named later
        if self.shapes[head] != self.shapes[embedding] or len(self.shapes[head]) != 2:
            return False
        pairs = zip(self.slices(head), self.slices(embedding), strict=True)
        return all(torch.equal(one.float(), other.float()) for one, other in pairs)

    def _list_tensors(self, path: Path) -> None:
        """Note the name, shape and file of each tensor in `path`, without reading its numbers."""
        with self._open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118, safe_open returns no dict
                if name in self._path:
                    raise ValueError(
                        f"{path} and {self._path[name].name} both hold {brief(name)}; remove the "
                        "file that does not belong to this checkpoint."
                    )
                tensor = f.get_slice(name)
                if tensor.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"{path} stores {brief(name)} as {tensor.get_dtype()}; only "
                        f"{', '.join(_DTYPES)} are supported."
                    )
                self.shapes[name] = tuple(tensor.get_shape())
                self._path[name] = path

    def stored_in_4_bits(self, name: str) -> None:
        return None  # these folders hold floating-point numbers

    def slices(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> Iterator[Tensor]:
        shape, path = self.shapes[name], self._path[name]
        rows = range(shape[0]) if rows is None else rows
        n_rows = max(1, SLICE_BYTES // (4 * math.prod(shape[1:])))  # per piece, in float32
        # A file is memory-mapped while it is open, and the pages that were read count as this
        # process's memory. Reopening it now and then keeps them few; reopening it for every tensor
        # would read the header of a large checkpoint thousands of times.
        if self._n_read > _OPEN_BYTES or len(self._files) >= _OPEN_FILES:
            self._files, self._n_read = {}, 0
        if path not in self._files:
            self._files[path] = self._open(path, framework="pt")
        tensor = self._files[path].get_slice(name)
        for first in range(rows.start, rows.stop, n_rows):
            wanted = slice(first, min(first + n_rows, rows.stop))
            if columns is None:
                piece = tensor[wanted]
            else:
                piece = tensor[wanted, columns.start : columns.stop]
            # Whole rows are counted: a page holds the other columns as well.
            self._n_read += len(piece) * math.prod(shape[1:]) * piece.element_size()
            yield piece


def _files(folder: Path) -> list[Path]:
    """The files that hold the tensors: model.safetensors if it exists, else the index's shards.

    The single file takes precedence, as in transformers: saving one into a folder leaves an older
    index behind.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        check_file(single)
        return [single]
    if not index.exists():
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor {index.name}; only safetensors are read, "
            "not pickles."
        )
    # Shards: names in this folder only, as an index is untrusted too
    weight_map = read_json(index, limit=20 * MEGABYTE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; fetch it again.")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index} names {brief(name)}; shards must be .safetensors files in the same "
                "folder."
            )
        if not os.path.exists(folder / name):  # False also for a name that cannot exist
            raise FileNotFoundError(
                f"{brief(str(folder / name), PATH)} is missing, though {index.name} names it; "
                "fetch it again."
            )
        check_file(folder / name)
    return [folder / name for name in names]
