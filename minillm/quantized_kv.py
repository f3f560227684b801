"""The KV cache in 8 or 4 bits: keys and values of every token and head on a grid of their own.

Source: Liu et al. 2024 (KIVI), section 3, for what is quantized; the grids here are per token for
keys and values alike, the paper's baseline.
Cost: with D = 64, int8 stores 66 bytes where bfloat16 stores 128, int4 stores 36. So a memory holds
about twice or three and a half times as many tokens. What is read is turned back into the model's
dtype first, which on a CPU takes longer than it saves: the gain is room, not time.

    int8   x ≈ scale · q               a scale for each token and head
    int4   x ≈ scale · q + minimum     a scale and a minimum for each token and head

Writing and reading is all that differs from `minillm.kv_cache.Rows`, so the contiguous cache and
the paged one take these rows as they are.
Not here: keys per channel, which lose less and need the newest tokens kept aside.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.checks import brief
from minillm.grid import divisor, pack, unpack
from minillm.kv_cache import KVCache, Rows
from minillm.model import Decoder

KV_DTYPES = {"int8": 8, "int4": 4}


class QuantizedRows(Rows):
    """Rows in `bits` bits, 8 or 4, with their scales in float16."""

    def __init__(self, model: Decoder, shape: tuple[int, int], *, bits: int = 8):
        L, K, D = model.kv_shape
        if bits not in (8, 4):
            raise ValueError(f"bits is {brief(bits)}; choose 8 or 4.")
        if bits == 4 and D % 2:
            raise ValueError(f"4 bits need an even head dimension, and this model has {D}; use 8.")
        self.bits, self.dtype = bits, model.dtype
        kind, width = (torch.int8, D) if bits == 8 else (torch.uint8, D // 2)
        self.k = torch.zeros(L, *shape, K, width, dtype=kind, device=model.device)
        self.v = torch.zeros_like(self.k)
        n_scales = 1 if bits == 8 else 2
        scales = torch.zeros(L, *shape, K, n_scales, dtype=torch.float16, device=model.device)
        self.k_scales, self.v_scales = scales, torch.zeros_like(scales)
        self.layers = [(self.k[i], self.v[i]) for i in range(L)]
        self._scales = [(self.k_scales[i], self.v_scales[i]) for i in range(L)]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.k, self.v, self.k_scales, self.v_scales))

    def write(self, layer: int, at: Any, k: Tensor, v: Tensor) -> None:
        places = zip(self.layers[layer], self._scales[layer], strict=True)
        for (stored, scales), x in zip(places, (k, v), strict=True):
            stored[at], scales[at] = self._quantized(x.float())

    def read(self, layer: int, at: Any) -> tuple[Tensor, Tensor]:
        (k, v), (k_scales, v_scales) = self.layers[layer], self._scales[layer]
        return self._dequantized(k[at], k_scales[at]), self._dequantized(v[at], v_scales[at])

    def copy(self, source: Tensor, target: Tensor) -> None:
        for x in (self.k, self.v, self.k_scales, self.v_scales):
            x[:, target] = x[:, source]

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (…, K, D) as stored, with scales (…, K, 1 or 2)."""
        if self.bits == 8:
            scale = (x.abs().amax(-1, keepdim=True) / 127).half()
            return (x / divisor(scale)).round().clamp(-127, 127).to(torch.int8), scale
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale, minimum = ((high - low) / 15).half(), low.half()
        q = ((x - minimum.float()) / divisor(scale)).round().clamp(0, 15).to(torch.uint8)
        return pack(q.flatten(0, -2)).view(*q.shape[:-1], -1), torch.cat((scale, minimum), -1)

    def _dequantized(self, stored: Tensor, scales: Tensor) -> Tensor:
        if self.bits == 8:
            return stored.to(self.dtype) * scales.to(self.dtype)
        q = unpack(stored.flatten(0, -2)).view(*stored.shape[:-1], -1)
        scale, minimum = scales.to(self.dtype).chunk(2, -1)
        return q.to(self.dtype) * scale + minimum


class QuantizedKVCache(KVCache):
    """`KVCache` in 8 or 4 bits; ValueError for other bits."""

    def __init__(
        self, model: Decoder, batch_size: int, max_len: int, *, bits: int = 8, backend: str = "auto"
    ):
        rows = partial(QuantizedRows, bits=bits)
        super().__init__(model, batch_size, max_len, backend=backend, rows=rows)


def rows_for(kv_dtype: str | None, given: Callable[..., Rows] | None) -> Callable[..., Rows]:
    """What stores a cache's rows: as `given`, or "int8", "int4", or None: the model's numbers."""
    if kv_dtype is None:
        return given or Rows
    if given is not None:
        raise ValueError("rows and kv_dtype both say how the cache is stored; give one of them.")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(
            f"kv_dtype is {brief(kv_dtype)}; choose None, {' or '.join(map(repr, KV_DTYPES))}."
        )
    return partial(QuantizedRows, bits=KV_DTYPES[kv_dtype])
