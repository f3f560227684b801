"""The header of a GGUF file: metadata, and where each tensor lies.

Source: the GGUF specification (docs/gguf.md of ggml). The gguf package has a reader as well, but it
trusts the counts in the file, so that a forged one makes it build lists of many gigabytes, and it
is slow on a vocabulary.
"""

import importlib
import math
import re
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from minillm.tools.checks import brief

_STRING, _LIST = 8, 9
# struct codes of the scalar types
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_MAX_ITEMS = 4_000_000  # values in all lists together; a vocabulary has a few 100,000
_PART_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # as llama.cpp names the parts of a model
_MERGE = "merge all of them into one file first: llama-gguf-split --merge FIRST-PART model.gguf"


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in a GGUF file.

    shape: in PyTorch's order, the fastest dimension last.
    """

    shape: tuple[int, ...]
    type: str  # "F32", "Q4_K", …
    offset: int  # bytes from the start of the file
    n_bytes: int


class _Damaged(Exception):
    """What is wrong with the file, as part of a sentence."""


class _Unsupported(Exception):
    """Why a file that is not damaged cannot be read, and what to do: the rest of a sentence."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The metadata and the tensor table of a GGUF file.

    ValueError for one that is damaged, truncated or forged, for one part of several, and for
    numbers in a format that the gguf package cannot convert.
    """
    try:
        with path.open("rb") as f:
            return _read(_Reader(f, path.stat().st_size))
    except _Unsupported as error:
        raise ValueError(f"{path} {error}.") from error
    except UnicodeDecodeError:
        reason = "a name or text in its header is not UTF-8"
    except _Damaged as error:
        reason = str(error)
    part = _PART_NAME.search(path.name)
    advice = "fetch it again"
    if part and int(part[2]) > 1:  # cut by another tool than llama.cpp's, or damaged as well
        advice = f"by its name it is part {int(part[1])} of {int(part[2])}: {_MERGE}"
    raise ValueError(f"{path} is not a usable GGUF file: {reason}; {advice}.")


class _Reader:
    """Reads numbers, strings and lists; refuses to read past the end or to build huge lists."""

    def __init__(self, f: BinaryIO, size: int):
        self.f, self.size = f, size
        self._items = 0

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > self.size - self.f.tell():
            raise _Damaged("it ends in the middle of its header")
        return self.f.read(n_bytes)

    def integer(self, n_bytes: int = 8) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def text(self) -> str:
        return self.take(self.integer()).decode("utf-8")

    def scalars(self, kind: int, count: int) -> list[Any]:
        layout = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _LIST:
            kind, count = self.integer(4), self.integer()
            # Before the list is built: the count may be forged.
            self._items += count
            if self._items > _MAX_ITEMS or kind == _LIST:
                raise _Damaged("a list in its metadata is too long or nested")
            if kind in _SCALARS:
                return self.scalars(kind, count)
            return [self.value(kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise _Damaged(f"a field has the unknown type {kind}")
        return self.scalars(kind, 1)[0]


def _read(reader: _Reader) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Magic, version, counts; key, type and value of each field; then the table of tensors."""
    if reader.take(4) != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    version, n_tensors, n_fields = reader.integer(4), reader.integer(), reader.integer()
    _check_version(version)
    if n_tensors > 100_000 or n_fields > 10_000:
        raise _Damaged(f"it claims {n_tensors} tensors and {n_fields} fields, too many to be true")
    # Metadata
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        key = reader.text()
        if key in fields:
            raise _Damaged(f"the field {brief(key)} appears twice")
        fields[key] = reader.value(reader.integer(4))
    _refuse_parts(fields)
    # Tensors: name, shape, type, offset in the data
    table = []
    for _ in range(n_tensors):
        name, n_dims = reader.text(), reader.integer(4)
        if not 1 <= n_dims <= 4:
            raise _Damaged(f"{brief(name)} has {n_dims} dimensions")
        # GGUF lists the fastest dimension first.
        shape = tuple(reader.integer() for _ in range(n_dims))[::-1]
        table.append((name, shape, reader.integer(4), reader.integer()))
    return fields, _place(table, fields.get("general.alignment", 32), reader)


def _check_version(version: int) -> None:
    if version in (2, 3):
        return
    if version and version & 0xFFFF == 0:  # a small number whose bytes stand the other way round
        raise _Unsupported(
            "is a big-endian GGUF file; take the little-endian one, or convert it: "
            "gguf-convert-endian model.gguf little"
        )
    if version == 1:
        raise _Unsupported("has GGUF version 1, of August 2023; convert the model again")
    raise _Damaged(f"version {version} is not supported")


def _refuse_parts(fields: dict[str, Any]) -> None:
    """Raise for one file of a model that llama.cpp has split into several."""
    count, number = fields.get("split.count", 1), fields.get("split.no", 0)
    if count not in (0, 1):
        which = number + 1 if type(number) is int else brief(number)
        raise _Unsupported(f"is part {which} of the {brief(count)} files of one model; {_MERGE}")


def _place(
    table: list[tuple[str, tuple[int, ...], int, int]], alignment: Any, reader: _Reader
) -> dict[str, GGUFTensor]:
    """The tensors by name; each must follow the one before after padding, as llama.cpp requires."""
    sizes, types = gguf_package().GGML_QUANT_SIZES, gguf_package().GGMLQuantizationType
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
        raise _Damaged(f"its alignment {brief(alignment)} is not a multiple of 8 up to 1048576")
    start = -(-reader.f.tell() // alignment) * alignment  # the data, after the padded header
    tensors: dict[str, GGUFTensor] = {}
    expected = 0  # offset of the next tensor in the data
    for name, shape, kind, offset in table:
        # A type that can be read
        if kind not in sizes:
            raise _Damaged(
                f"{brief(name)} has the type {kind}, which the gguf package does not know (a newer "
                "version of the package may: pip install --upgrade gguf)"
            )
        block, block_bytes = sizes[types(kind)]
        type_name = types(kind).name
        if not _can_be_read(type_name):
            raise _Unsupported(
                f"is not damaged, but stores {brief(name)} as {type_name}, which the gguf package "
                "cannot convert; take a file in another format, such as Q4_K_M, Q8_0 or F16"
            )
        # A shape of whole blocks
        n_bytes = math.prod(shape) // block * block_bytes
        if not all(shape) or shape[-1] % block or name in tensors:
            raise _Damaged(
                f"{brief(name)} of shape {shape} is empty, listed twice or not made of whole "
                f"{type_name} blocks"
            )
        # A place inside the file, with no gap and no overlap
        if start + offset + n_bytes > reader.size:
            raise _Damaged(f"it is truncated: {brief(name)} ends past its last byte")
        if offset != expected:
            raise _Damaged(
                f"{brief(name)} begins at byte {offset} of the data, but the tensors before it end "
                f"at {expected}"
            )
        tensors[name] = GGUFTensor(shape, type_name, start + offset, n_bytes)
        expected += -(-n_bytes // alignment) * alignment
    return tensors


@cache
def gguf_package() -> ModuleType:
    """The package gguf, loaded without mistral_common.

    Where that is installed, gguf would load it to convert vocabularies: seconds for every start of
    a program, for something that is not used here.
    """
    unwanted = "mistral_common"
    hidden = unwanted not in sys.modules
    if hidden:
        sys.modules[unwanted] = None  # importing it now is an ImportError, which gguf expects
    try:
        return importlib.import_module("gguf")
    finally:
        if hidden:
            del sys.modules[unwanted]


@cache
def _can_be_read(type_name: str) -> bool:
    """Whether the gguf package can convert numbers of this type: asked with one block."""
    gguf = gguf_package()
    kind = gguf.GGMLQuantizationType[type_name]
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
