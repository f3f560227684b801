"""The seam: what the model asks of the object that it is given as `cache`.

The model computes what is per token. Everything that looks at other tokens is here:

    positions = cache.positions(T)       # of the T new tokens, for RoPE: a range, or a tensor (T,)
    out = cache.attend(layer, q, k, v)   # once a layer: store k and v, attend, return the output
    cache.advance(T)                     # after the last layer: the tokens now count as past

`KVCache` stores one batch of equal lengths, `PagedKVCache.batch` many sequences in blocks.

A cache may offer one thing more, for the kernel that turns, stores and writes in one go:

    slots = cache.slots(layer)           # where the new rows go, or None if only the cache can say
    out = cache.attend_written(layer, q) # `attend`, when k and v lie in those slots already
"""

from typing import Protocol

from torch import Tensor

from minillm.attention import check_backend, unchecked_attention


class Cache(Protocol):
    """What `Decoder.forward` asks of the object passed as `cache`."""

    def positions(self, n_new: int) -> range | Tensor: ...
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def advance(self, n_new: int) -> None: ...


class NoCache:
    """Causal attention among the tokens given: nothing is kept, each step recomputes everything."""

    def __init__(self, backend: str = "auto"):
        check_backend(backend)
        self.backend = backend

    def positions(self, n_new: int) -> range:
        return range(n_new)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return unchecked_attention(q, k, v, True, q.shape[-1] ** -0.5, self.backend)

    def advance(self, n_new: int) -> None:
        pass
