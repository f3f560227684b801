"""A GGUF file as a checkpoint: llama.cpp's names, row order and number formats converted back.

Sources: the GGUF specification (docs/gguf.md of ggml); for the row order of q and k in Llama files
`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from minillm.config import ModelConfig
from minillm.quantization.grid import QuantizedMatrix
from minillm.weights.build import SLICE_BYTES
from minillm.weights.gguf_config import config_from_gguf
from minillm.weights.gguf_header import gguf_package, read_gguf

# GGUF module -> Hugging Face module, inside a layer and outside
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_FOUR_BITS = {"Q4_0": 2, "Q4_1": 4}  # and the bytes before the numbers of a block


class GGUFCheckpoint:
    """One GGUF file of the Llama, Qwen2 or Qwen3 family, under Hugging Face names."""

    def __init__(self, path: Path):
        self.path, self.label = path, str(path)
        self.fields, self._tensors = read_gguf(path)
        self.config = self._read_config()
        # Names
        to_hf = dict(_TOP_NAMES)
        for i in range(self.config.n_layers):
            to_hf |= {f"blk.{i}.{gg}": f"model.layers.{i}.{hf}" for gg, hf in _LAYER_NAMES.items()}
        self._names: dict[str, str] = {}  # Hugging Face name -> GGUF name
        for name in self._tensors:
            stem, _, kind = name.rpartition(".")
            if name != _ROPE_FREQUENCIES:
                # A name unknown in GGUF files must not pass for a Hugging Face one.
                known = f"{to_hf[stem]}.{kind}" if stem in to_hf else f"{name} (in GGUF)"
                self._names[known] = name
        self.shapes = {hf: self._tensors[gg].shape for hf, gg in self._names.items()}

    def _read_config(self) -> ModelConfig:
        """The metadata as a `ModelConfig`, with the file's own divisors of the frequencies."""
        config = config_from_gguf(self.path, self.fields, set(self._tensors))
        if _ROPE_FREQUENCIES in self._tensors:  # Llama 3's scaling, stored as its (D/2,) divisors
            factors = self._read(_ROPE_FREQUENCIES, 0, 1)[0].tolist()
            config = replace(config, rope_factors=tuple(factors))
        return config

    def _read(self, gguf_name: str, first: int, n_rows: int) -> Tensor:
        """Rows of a tensor, (n_rows, fastest dimension) in float32."""
        t = self._tensors[gguf_name]
        row_bytes = t.n_bytes * t.shape[-1] // math.prod(t.shape)  # rows are whole blocks
        offset = t.offset + first * row_bytes
        data = np.fromfile(self.path, np.uint8, count=n_rows * row_bytes, offset=offset)
        data = data.reshape(n_rows, row_bytes)
        if t.type in _FOUR_BITS:  # as in the default checkpoint: the package takes far longer
            q, d, m = _four_bits(data, t.type)
            return q.float().mul_(d[..., None]).add_(m[..., None]).flatten(1)
        gguf = gguf_package()
        with np.errstate(all="ignore"):  # what is not finite is refused when it is copied
            return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[t.type]))

    def stored_in_4_bits(self, name: str) -> QuantizedMatrix | None:
        """A matrix in Q4_0 or Q4_1 as the file stores it."""
        t = self._tensors[self._names[name]]
        if t.type not in _FOUR_BITS:
            return None
        data = np.fromfile(self.path, np.uint8, count=t.n_bytes, offset=t.offset)
        q, d, m = _four_bits(data.reshape(self.shapes[name][0], -1), t.type)
        # d · q + m = d · (q - 8) + (m + 8 · d)
        parts = (q.flatten(1), d.bfloat16(), (m + 8 * d).bfloat16())
        return QuantizedMatrix(*(self._unpermuted(name, x) for x in parts))

    def _unpermuted(self, name: str, rows: Tensor) -> Tensor:
        """Whole heads of q or k in Hugging Face's row order; anything else as it is.

        llama.cpp rotates the pairs (0, 1), (2, 3), …; here the pairs are (i, i + D/2).
        """
        llama = self.fields["general.architecture"] == "llama"
        if not (llama and re.search(r"self_attn\.[qk]_proj", name)):
            return rows
        D = self.config.d_head
        return rearrange(rows, "(h pair two) ... -> (h two pair) ...", h=len(rows) // D, two=2)

    def slices(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> Iterator[Tensor]:
        shape, gguf_name = self.shapes[name], self._names[name]
        rows = range(shape[0]) if rows is None else rows
        wanted = slice(None) if columns is None else slice(columns.start, columns.stop)
        if len(shape) == 1:  # a norm or a bias
            yield self._unpermuted(name, self._read(gguf_name, 0, 1)[0])[rows.start : rows.stop]
            return
        # Dequantizing needs several temporaries of the piece's size.
        step = max(1, SLICE_BYTES // (16 * shape[1]))
        if "self_attn" in name:
            step = max(1, step // self.config.d_head) * self.config.d_head  # whole heads
        for first in range(rows.start, rows.stop, step):
            piece = self._read(gguf_name, first, min(step, rows.stop - first))
            yield self._unpermuted(name, piece)[:, wanted]


def _four_bits(rows: np.ndarray, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers q of Q4_0 or Q4_1, (rows, blocks, 32), and of each block d and m: d · q + m.

    A block is a scale d in float16, in Q4_1 also a minimum m, and 16 bytes: number j in the low
    half of byte j, number j + 16 in the high half. In Q4_0 m is -8 · d.
    """
    n_header_bytes = _FOUR_BITS[kind]
    blocks = torch.from_numpy(rows).unflatten(1, (-1, n_header_bytes + 16))
    header, packed = blocks[..., :n_header_bytes], blocks[..., n_header_bytes:]
    numbers = header.contiguous().view(torch.float16).float()  # d, or d and m
    d = numbers[..., 0]
    m = numbers[..., 1] if kind == "Q4_1" else -8 * d
    return torch.cat((packed & 15, packed >> 4), -1), d, m
