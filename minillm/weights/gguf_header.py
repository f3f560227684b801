"""The header of a GGUF file: metadata, and where each tensor lies.

Source: the GGUF specification (docs/gguf.md of ggml). The gguf package has a reader as well, but it
trusts the counts in the file, so that a forged one makes it build lists of many gigabytes, and it
is slow on a vocabulary.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from minillm.tools.checks import brief

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
_STRING, _LIST = 8, 9
# struct codes of the scalar types
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_MAX_ITEMS = 4_000_000  # values in all lists together; a vocabulary has a few 100,000


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in a GGUF file.

    shape: in PyTorch's order, the fastest dimension last.
    """

    shape: tuple[int, ...]
    type: str  # "F32", "Q4_1", …
    offset: int  # bytes from the start of the file
    n_bytes: int


class _Damaged(Exception):
    """What is wrong with the file, as part of a sentence."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The metadata and the tensor table of a GGUF file.

    ValueError for one that is damaged, truncated or forged.
    """
    try:
        with path.open("rb") as f:
            return _read(_Reader(f, path.stat().st_size))
    except UnicodeDecodeError:
        reason = "a name or text in its header is not UTF-8"
    except _Damaged as error:
        reason = str(error)
    raise ValueError(f"{path} is not a usable GGUF file: {reason}; fetch it again.")


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
    if version not in (2, 3):
        raise _Damaged(f"version {version} is not supported")
    if n_tensors > 100_000 or n_fields > 10_000:
        raise _Damaged(f"it claims {n_tensors} tensors and {n_fields} fields, too many to be true")
    # Metadata
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        key = reader.text()
        if key in fields:
            raise _Damaged(f"the field {brief(key)} appears twice")
        fields[key] = reader.value(reader.integer(4))
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


def _place(
    table: list[tuple[str, tuple[int, ...], int, int]], alignment: Any, reader: _Reader
) -> dict[str, GGUFTensor]:
    """The tensors by name; each must follow the one before after padding, as llama.cpp requires."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
        raise _Damaged(f"its alignment {brief(alignment)} is not a multiple of 8 up to 1048576")
    start = -(-reader.f.tell() // alignment) * alignment  # the data, after the padded header
    tensors: dict[str, GGUFTensor] = {}
    expected = 0  # offset of the next tensor in the data
    for name, shape, kind, offset in table:
        # A type that can be read
        if kind not in GGML_QUANT_SIZES:
            raise _Damaged(f"{brief(name)} has the unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        type_name = GGMLQuantizationType(kind).name
        if type_name not in TYPES:
            raise _Damaged(
                f"{brief(name)} is stored as {type_name}, but only {', '.join(TYPES)} are supported"
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
