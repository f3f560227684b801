"""The KV cache: keep the keys and values of past tokens instead of recomputing them.

Source: Pope et al. 2022, sections 2 and 3.3; Shazeer 2019, section 2.4 (incremental decoding).
Cost: 2 * L * K * D numbers stored per token, all of them read again for each new token
(`costs.kv_cache_bytes`).
What it saves: without it, token n of an answer pays the forward pass of all n tokens before it.

Storing and attending are two things. `KVStorage` writes the keys and values of new tokens and reads
old ones; a cache that stores them in another form overrides those two methods and nothing else.
A cache says which slots, and passes what was read to `minillm.attention`.
Not here: sequences of different lengths in one batch, and growing on demand; the paged cache does
both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.cache import Cache
from minillm.layers.attention import check_backend, default_scale, unchecked_attention
from minillm.model import Decoder
from minillm.tools.checks import brief, check_whole


class KVStorage:
    """Keys and values (K, D) of every slot, for every layer.

    shape: of the slots: (B, max_len) in a contiguous cache, (n_blocks, P) in a paged one.
    `at` in the methods is an index into the slots, as PyTorch takes it.
    """

    plain = True
    """Whether keys and values are stored as they are given, so that a kernel may write them."""

    def __init__(self, model: Decoder, shape: tuple[int, int]):
        L, K, D = model.kv_shape
        self._keep(torch.zeros(L, *shape, K, D, dtype=model.dtype, device=model.device))

    def _keep(self, empty: Tensor) -> None:
        self.k, self.v = empty, torch.zeros_like(empty)  # (L, *shape, K, D)
        # Views, (*shape, K, D) each, made once: making them in every layer of every step is slow.
        self.layers = [(self.k[i], self.v[i]) for i in range(len(empty))]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, reserved whether full or not."""
        return self.k.nbytes + self.v.nbytes

    def write(self, layer: int, at: Any, k: Tensor, v: Tensor) -> None:
        """Store k and v (…, K, D) in the slots `at`."""
        keys, values = self.layers[layer]
        keys[at] = k
        values[at] = v

    def read(self, layer: int, at: Any) -> tuple[Tensor, Tensor]:
        """Keys and values (…, K, D) of the slots `at`, in the model's dtype."""
        keys, values = self.layers[layer]
        return keys[at], values[at]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy all slots of the sequences, or the blocks, with these numbers, in all layers."""
        self.k[:, target], self.v[:, target] = self.k[:, source], self.v[:, source]


class StorageByHead(KVStorage):
    """The same numbers, but in memory the slots of each head lie in one piece.

    Attention goes through a sequence head by head, and a CPU reads that faster. Pages, which are
    gathered slot by slot, stay as `KVStorage` has them.
    """

    def __init__(self, model: Decoder, shape: tuple[int, int]):
        L, K, D = model.kv_shape
        B, n_slots = shape
        by_head = torch.zeros(L, B, K, n_slots, D, dtype=model.dtype, device=model.device)
        self._keep(by_head.transpose(2, 3))


class KVCache(Cache):
    """Keys and values of `batch_size` sequences of equal length, `length` tokens so far.

    storage: how they are stored; (B, max_len) slots are reserved at once.
    """

    def __init__(
        self,
        model: Decoder,
        batch_size: int,
        max_len: int,
        *,
        backend: str = "auto",
        storage: Callable[[Decoder, tuple[int, int]], KVStorage] = StorageByHead,
    ):
        check_whole("batch_size", batch_size)
        check_whole("max_len", max_len)
        if max_len > model.config.max_seq_len:
            raise ValueError(
                f"max_len is {max_len}; {model.config.name} was trained for at most "
                f"{model.config.max_seq_len} positions."
            )
        check_backend(backend)
        self.storage = storage(model, (batch_size, max_len))
        self.made_for = model.kv_format
        self.batch_size, self.max_len, self.backend = batch_size, max_len, backend
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def positions(self, n_new: int) -> range:
        """Positions of the next `n_new` tokens; ValueError if they don't fit."""
        if self.length + n_new > self.max_len:
            raise ValueError(
                f"The cache holds {self.length} of at most {self.max_len} tokens; {n_new} more "
                "don't fit. Make it with a larger max_len, or rewind it."
            )
        return range(self.length, self.length + n_new)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, T, H, D), k and v (B, T, K, D) of the T new tokens; returns (B, T, H, D)."""
        if layer == 0 and len(q) != self.batch_size:
            raise ValueError(
                f"The tokens are a batch of {len(q)}; this cache was made for a batch of "
                f"{self.batch_size}."
            )
        end = self.length + q.shape[1]
        self.storage.write(layer, (slice(None), slice(self.length, end)), k, v)
        keys, values = self.storage.read(layer, (slice(None), slice(end)))
        return unchecked_attention(q, keys, values, True, default_scale(q), self.backend)

    def advance(self, n_new: int) -> None:
        self.length += n_new

    def rewind(self, n: int) -> None:
        """Forget the last `n` tokens; their slots are overwritten by the next ones."""
        if type(n) is not int or not 0 <= n <= self.length:
            raise ValueError(
                f"rewind by {brief(n)} tokens; the cache holds {self.length}, so give 0 to "
                f"{self.length}."
            )
        self.length -= n
