"""The KV cache in 8 or 4 bits: less memory per token, so more tokens in the same memory.

Source: Liu et al. 2024 (KIVI), sections 3 and 4.
Cost: for D = 64 numbers, bfloat16 takes 128 bytes, int8 66 and int4 36, so the same memory holds
about two or three and a half times as many tokens. The Triton kernel reads the small form directly.
The other backends first convert what they read to the model's dtype, which takes longer than it
saves: there the gain is room, not time.

    int8   x ≈ scale · q               q from -127 to 127
    int4   x ≈ scale · q + minimum     q from 0 to 15

Which numbers share a scale? The D numbers of one token and head, or one channel of a head over 32
tokens. Keys have channels that are large in all tokens (rotary pairs that turn slowly): per token
they dominate the scale, so other channels lose resolution. Values have none. So KIVI quantizes keys
per channel and values per token. A group of keys can be rounded only once its 32 tokens are there
and are sure to stay; until then the newest keys are in the model's dtype.
KIVI also cuts a token's values into groups of 32 channels; here one scale covers all D of a head.

    QuantizedStorage    both per token: for any index, so also for the pages of `minillm.paged`
    ChannelKeyStorage   keys per channel: for contiguous sequences

Only writing and reading differ from `minillm.kv_cache.KVStorage`.
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
"""Tokens whose keys share a scale in each channel, as in KIVI. KIVI keeps the newest 128 keys and
values in 16 bits; here only keys, the newest 32 to 63."""


class QuantizedStorage(KVStorage):
    """Keys and values in `bits` bits, 8 or 4, with scales in float16.

    Per layer: k and v (*shape, K, D) in int8 or (*shape, K, D / 2) packed bytes; their scales
    (*shape, K, 1), or (*shape, K, 2) with the minimum beside the scale.
    Raises ValueError for other bits, and for 4 bits with an odd D.
    """

    plain = False

    def __init__(self, model: Decoder, shape: tuple[int, int], *, bits: int = 8):
        L, K, D = model.kv_shape
        if bits not in (8, 4):
            raise ValueError(f"bits is {brief(bits)}; choose 8 or 4.")
        if bits == 4 and D % 2:
            raise ValueError(f"4 bits need an even head dimension, and this model has {D}; use 8.")
        self.bits, self.dtype = bits, model.dtype
        kind, width = (torch.int8, D) if bits == 8 else (torch.uint8, D // 2)  # two in a byte
        self.k = torch.zeros(L, *shape, K, width, dtype=kind, device=model.device)
        self.v = torch.zeros_like(self.k)
        n_scales = 1 if bits == 8 else 2  # the scale, and for 4 bits the minimum
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
        """x (…, D) as stored, and its scales (…, 1 or 2)."""
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
    """Values per token; keys per channel over groups of 32 tokens, the newest groups not rounded.

    For a contiguous cache: the index in `write` and `read` is (all sequences, a slice of slots),
    and `read` follows `write`. A group is rounded when 32 newer tokens are there, so rewinding by
    up to 32 tokens meets only keys as they were given. Farther back, what is left of a group keeps
    its rounding error and is rounded once more, with its new neighbours.
    A pass reads its own keys as they are: no token's scale depends on later ones.
    """

    def __init__(self, model: Decoder, shape: tuple[int, int], *, bits: int = 8):
        super().__init__(model, shape, bits=bits)
        L, K, D = model.kv_shape
        batch, n_groups = shape[0], -(-shape[1] // GROUP)
        n_scales = self.v_scales.shape[-1]
        scales = torch.zeros(
            L, batch, n_groups, n_scales, K, D, dtype=torch.float16, device=model.device
        )
        self._set_scales(scales, self.v_scales)
        # A whole group, and the beginning of the next.
        self.newest = torch.zeros(L, batch, 2 * GROUP, K, D, dtype=model.dtype, device=model.device)
        self.stored.append(self.newest)
        self._first = [0] * L  # per layer: the slot of the first key in `newest`
        self._given: tuple[int, Tensor] | None = None  # between `write` and `read`

    def write(self, layer: int, at: Any, k: Tensor, v: Tensor) -> None:
        keys, values, scales, v_scales = self.layers[layer]
        values[at], v_scales[at] = self._stored(v)
        start, first, newest = at[1].start, self._first[layer], self.newest[layer]
        if start < first:  # rewound into a group that was rounded: take it up again
            first = start - start % GROUP
            newest[:, : start - first] = self._keys(layer, start)[:, first:]
        given = torch.cat((newest[:, : start - first], k), 1)  # (B, tokens from `first` on, K, D)
        self._given = first, given  # what this pass reads
        n_final = max(0, given.shape[1] // GROUP - 1)  # groups with a whole group behind them
        end = first + n_final * GROUP
        if n_final:
            groups = given[:, : n_final * GROUP].unflatten(1, (n_final, GROUP))
            q, found = rounded(groups, self.bits, 2)  # (B, n_final, GROUP, K, D); scales with 1
            keys[:, first:end] = self._packed(q.flatten(1, 2))
            scales[:, first // GROUP : end // GROUP] = torch.cat(found, 2)
        newest[:, : given.shape[1] - n_final * GROUP] = given[:, n_final * GROUP :]
        self._first[layer] = end

    def read(self, layer: int, at: Any) -> tuple[Tensor, Tensor]:
        _, values, _, v_scales = self.layers[layer]
        first, in_full = self._given or (self._first[layer], self.newest[layer])
        self._given = None
        keys = torch.cat((self._keys(layer, first), in_full[:, : at[1].stop - first]), 1)
        return keys, self._loaded(values[at], v_scales[at])

    def _keys(self, layer: int, end: int) -> Tensor:
        """The rounded keys (B, end, K, D), in the model's dtype."""
        keys, _, scales, _ = self.layers[layer]
        n_groups = -(-end // GROUP)
        q = self._unpacked(keys[:, : n_groups * GROUP])
        missing = n_groups * GROUP - q.shape[1]  # the cache may end within a group
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, missing)).unflatten(1, (n_groups, GROUP))
        # q is now (B, n_groups, GROUP, K, D), and each of `found` (B, n_groups, 1, K, D).
        found = scales[:, :n_groups].to(self.dtype).split(1, 2)
        return dequantized(q, found).flatten(1, 2)[:, :end]


def rounded(x: Tensor, bits: int, dim: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x in 8 or 4 bits, with one scale along `dim`: q, and (scale,) or (scale, minimum).

    Scales have size 1 in `dim`. They are rounded to float16 before q is chosen, so that q is the
    best for the stored scale.
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
    """The inverse of `rounded`, in the dtype of q and the scales."""
    scaled = q * scales[0]
    return scaled if len(scales) == 1 else scaled + scales[1]


class QuantizedKVCache(KVCache):
    """`KVCache` in 8 or 4 bits.

    keys: "token" for one scale per token and head, "channel" for one per channel of 32 tokens.
    Raises ValueError for other choices.
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
    """The storage of a paged cache for kv_dtype "int8", "int4" or None, the model's own dtype.

    Raises ValueError for another kv_dtype.
    """
    if kv_dtype is None:
        return KVStorage
    if kv_dtype not in KV_DTYPES:
        raise ValueError(
            f"kv_dtype is {brief(kv_dtype)}; choose None, {' or '.join(map(repr, KV_DTYPES))}."
        )
    return partial(QuantizedStorage, bits=KV_DTYPES[kv_dtype])
