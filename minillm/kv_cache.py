"""The KV cache: keep the keys and values of past tokens instead of recomputing them.

Source: Pope et al. 2022, section 2 and 3.3; Shazeer 2019, section 2.4 (incremental decoding).
Cost: 2 * L * K * D numbers stored per token, all of them read again for each new token (`costs.kv_cache_bytes`).
What it saves: without it, token n of an answer pays the forward pass of all n tokens before it again.
Not here: sequences of different lengths in one batch, and growing on demand; the paged cache does both.

This file also holds the protocol that every cache follows. The model knows nothing else about other tokens:

    positions = cache.positions(T)            # where the T new tokens stand, for the rotary embedding: a range, or (T,)
    out = cache.attend(layer, q, k, v)        # once a layer: store k and v, attend, return the new tokens' output
    cache.advance(T)                          # after the last layer: the tokens now count as past
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minillm.attention import attend, check_backend

if TYPE_CHECKING:
    from minillm.model import Decoder


class Cache(Protocol):
    """What `Decoder.forward` asks of the object passed as `cache`."""

    def positions(self, n_new: int) -> range | Tensor: ...
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def advance(self, n_new: int) -> None: ...


class NoCache:
    """Causal attention among the tokens given: nothing is kept, everything is recomputed at the next step."""

    def __init__(self, backend: str = "auto"):
        check_backend(backend)
        self.backend = backend

    def positions(self, n_new: int) -> range:
        return range(n_new)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, True, q.shape[-1] ** -0.5, self.backend)

    def advance(self, n_new: int) -> None:
        pass


class KVCache:
    """Keys and values of `batch_size` sequences of equal length, in two buffers of (L, B, max_len, K, D).

    length: tokens stored per sequence. nbytes: bytes of the two buffers, reserved whether full or not.
    """

    def __init__(self, model: "Decoder", batch_size: int, max_len: int, *, backend: str = "auto"):
        for name, value in (("batch_size", batch_size), ("max_len", max_len)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more.")
        if max_len > model.config.max_seq_len:
            raise ValueError(f"max_len is {max_len}; {model.config.name} was trained for at most {model.config.max_seq_len} positions.")
        check_backend(backend)
        c = model.config
        shape = (c.n_layers, batch_size, max_len, c.n_kv_heads, c.d_head)
        self.k = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.v = torch.zeros_like(self.k)
        self._layers = [(self.k[i], self.v[i]) for i in range(c.n_layers)]  # views, (B, max_len, K, D) each
        self.length = 0
        self.max_len = max_len
        self.backend = backend

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def positions(self, n_new: int) -> range:
        """Positions of the next `n_new` tokens; ValueError if they don't fit."""
        if self.length + n_new > self.max_len:
            raise ValueError(
                f"The cache holds {self.length} of at most {self.max_len} tokens; {n_new} more don't fit. "
                "Make it with a larger max_len, or rewind it."
            )
        return range(self.length, self.length + n_new)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, T, H, D), k and v (B, T, K, D) of the T new tokens; returns (B, T, H, D)."""
        start, end = self.length, self.length + q.shape[1]
        if q.shape[0] != self.k.shape[1]:
            raise ValueError(f"The tokens are a batch of {q.shape[0]}; this cache was made for a batch of {self.k.shape[1]}.")
        if k.shape[2:] != self.k.shape[3:]:
            raise ValueError(
                f"k has heads of shape {tuple(k.shape[2:])}, the cache {tuple(self.k.shape[3:])}: it was made for another model."
            )
        keys, values = self._layers[layer]
        keys[:, start:end] = k
        values[:, start:end] = v
        return attend(q, keys[:, :end], values[:, :end], True, q.shape[-1] ** -0.5, self.backend)

    def advance(self, n_new: int) -> None:
        self.length += n_new

    def rewind(self, n: int) -> None:
        """Forget the last `n` tokens; their slots are overwritten by the next ones."""
        if type(n) is not int or not 0 <= n <= self.length:
            raise ValueError(f"rewind by {n!r} tokens; the cache holds {self.length}, so give 0 to {self.length}.")
        self.length -= n
