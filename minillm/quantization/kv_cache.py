"""The KV cache in 8 or 4 bits: less memory for each token, so more tokens in the same memory.

Source: Liu et al. 2024 (KIVI), sections 3 and 4.
Cost: with D = 64, int8 stores 66 bytes where bfloat16 stores 128, int4 stores 36. So a memory holds
about twice or three and a half times as many tokens. The Triton kernel reads the small form; the
other backends first turn what is read back into the model's dtype, which takes longer than it
saves: there the gain is room, not time.

    int8   x ≈ scale · q               q from -127 to 127
    int4   x ≈ scale · q + minimum     q from 0 to 15

What shares a scale? The D numbers of one token and head, or one channel of a head over 32 tokens.
Keys have channels that are large in all tokens (rotary pairs that turn slowly), and per token these
take the steps from the others. Values have none. So KIVI quantizes keys per channel and values per
token. A group of keys can be rounded only when its 32 tokens are there: the newest keys wait in 16
bits.

    QuantizedStorage    per token, both: any index, so also in the pages of `minillm.paged`
    ChannelKeyStorage   keys per channel: for sequences that lie in one piece

Writing and reading is all that differs from `minillm.kv_cache.KVStorage`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.kv_cache import KVCache, KVStorage
from minillm.model import Decoder
from minillm.quantization.grid import divisor, pack, unpack
from minillm.tools.checks import brief

KV_DTYPES = {"int8": 8, "int4": 4}
GROUP = 32
"""Tokens whose keys share a scale in each channel, as in KIVI. There the newest 128 keys and values
wait in 16 bits; here it is the keys of an unfinished group."""


class QuantizedStorage(KVStorage):
    """Keys and values in `bits` bits, 8 or 4, with their scales in float16.

    Of each layer: k and v (*shape, K, D), or D / 2 bytes, and their scales (*shape, K, 1 or 2).
    """

    plain = False

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
        self._set_scales(scales, torch.zeros_like(scales))

    def _set_scales(self, of_keys: Tensor, of_values: Tensor) -> None:
        self.k_scales, self.v_scales = of_keys, of_values
        self.stored = [self.k, self.v, of_keys, of_values]
        self.layers = list(zip(*self.stored, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.stored)

    def write(self, layer: int, at: Any, k: Tensor, v: Tensor) -> None:
        keys, values, k_scales, v_scales = self.layers[layer]
        keys[at], k_scales[at] = self._stored(k)
        values[at], v_scales[at] = self._stored(v)

    def read(self, layer: int, at: Any) -> tuple[Tensor, Tensor]:
        keys, values, k_scales, v_scales = self.layers[layer]
        return self._loaded(keys[at], k_scales[at]), self._loaded(values[at], v_scales[at])

    def copy(self, source: Tensor, target: Tensor) -> None:
        for x in self.stored:
            x[:, target] = x[:, source]

    def _stored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (…, D) as it is stored, and its scales (…, 1 or 2)."""
        q, scales = rounded(x, self.bits, -1)
        return self._packed(q), torch.cat(scales, -1)

    def _loaded(self, stored: Tensor, scales: Tensor) -> Tensor:
        scales = scales.to(self.dtype).split(1, -1)
        return dequantized(self._unpacked(stored), scales)

    def _packed(self, q: Tensor) -> Tensor:
        return q if self.bits == 8 else pack(q)

    def _unpacked(self, stored: Tensor) -> Tensor:
        return (stored if self.bits == 8 else unpack(stored)).to(self.dtype)


class ChannelKeyStorage(QuantizedStorage):
    """Values per token; keys per channel over groups of 32 tokens, those of the last group in full.

    For a contiguous cache: the index in `write` and `read` is (all sequences, a slice of slots).
    """

    def __init__(self, model: Decoder, shape: tuple[int, int], *, bits: int = 8):
        super().__init__(model, shape, bits=bits)
        L, K, D = model.kv_shape
        batch, n_groups = shape[0], -(-shape[1] // GROUP)
        n_scales = self.v_scales.shape[-1]
        like = {"dtype": torch.float16, "device": model.device}
        self._set_scales(torch.zeros(L, batch, n_groups, n_scales, K, D, **like), self.v_scales)
        self.newest = torch.zeros(L, batch, GROUP, K, D, dtype=model.dtype, device=model.device)
        self.stored.append(self.newest)
        self._first = [0] * L  # the token whose key is first in `newest`

    def write(self, layer: int, at: Any, k: Tensor, v: Tensor) -> None:
        keys, values, scales, v_scales = self.layers[layer]
        values[at], v_scales[at] = self._stored(v)
        start, newest = at[1].start, self.newest[layer]
        first = start - start % GROUP
        if first != self._first[layer]:  # after a rewind, into a group that was rounded
            newest[:, : start - first] = self._keys(layer, start)[:, first:]
        rows = torch.cat((newest[:, : start - first], k), 1)
        n_full = rows.shape[1] // GROUP
        end = first + n_full * GROUP
        if n_full:
            groups = rows[:, : n_full * GROUP].unflatten(1, (n_full, GROUP))
            q, found = rounded(groups, self.bits, 2)
            keys[:, first:end] = self._packed(q.flatten(1, 2))
            scales[:, first // GROUP : end // GROUP] = torch.cat(found, 2)
        newest[:, : rows.shape[1] - n_full * GROUP] = rows[:, n_full * GROUP :]
        self._first[layer] = end

    def read(self, layer: int, at: Any) -> tuple[Tensor, Tensor]:
        _, values, _, v_scales = self.layers[layer]
        first, end = self._first[layer], at[1].stop
        newest = self.newest[layer][:, : end - first]
        keys = torch.cat((self._keys(layer, first), newest), 1)
        return keys, self._loaded(values[at], v_scales[at])

    def _keys(self, layer: int, end: int) -> Tensor:
        """Rounded keys (B, end, K, D) in the model's dtype."""
        keys, _, scales, _ = self.layers[layer]
        n_groups = -(-end // GROUP)
        q = self._unpacked(keys[:, : n_groups * GROUP])
        missing = n_groups * GROUP - q.shape[1]  # the cache may end within a group
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, missing)).unflatten(1, (n_groups, GROUP))
        found = scales[:, :n_groups].to(self.dtype).split(1, 2)
        return dequantized(q, found).flatten(1, 2)[:, :end]


def rounded(x: Tensor, bits: int, dim: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x on a grid whose numbers along `dim` share a scale: q, and scale, or scale and minimum.

    Scales are float16, with size 1 in `dim`, and rounded first: the q are best for what is stored.
    """
    x = x.float()
    if bits == 8:
        scale = (x.abs().amax(dim, keepdim=True) / 127).half()
        return (x / divisor(scale)).round().clamp(-127, 127).to(torch.int8), (scale,)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, minimum = ((high - low) / 15).half(), low.half()
    q = ((x - minimum.float()) / divisor(scale)).round().clamp(0, 15)
    return q.to(torch.uint8), (scale, minimum)


def dequantized(q: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
    """What `rounded` stands for, in the dtype of q and the scales."""
    scaled = q * scales[0]
    return scaled if len(scales) == 1 else scaled + scales[1]


class QuantizedKVCache(KVCache):
    """`KVCache` in 8 or 4 bits. keys: what shares a scale of the keys, "token" or "channel".

    ValueError for other choices.
    """

    def __init__(
        self,
        model: Decoder,
        batch_size: int,
        max_len: int,
        *,
        bits: int = 8,
        keys: str = "token",
        backend: str = "auto",
    ):
        if keys not in ("token", "channel"):
            raise ValueError(f"keys is {brief(keys)}; choose token or channel.")
        kind = QuantizedStorage if keys == "token" else ChannelKeyStorage
        storage = partial(kind, bits=bits)
        super().__init__(model, batch_size, max_len, backend=backend, storage=storage)


def storage_for(kv_dtype: str | None) -> Callable[[Decoder, tuple[int, int]], KVStorage]:
    """How a paged cache stores its keys and values: None in the model's dtype, "int8", "int4"."""
    if kv_dtype is None:
        return KVStorage
    if kv_dtype not in KV_DTYPES:
        raise ValueError(
            f"kv_dtype is {brief(kv_dtype)}; choose None, {' or '.join(map(repr, KV_DTYPES))}."
        )
    return partial(QuantizedStorage, bits=KV_DTYPES[kv_dtype])
