"""The seam: what the model asks of the object that it is given as `cache`.

The model computes what is per token. Everything that looks at other tokens is here:

    positions = cache.positions(T)       # of the T new tokens, for RoPE: a range, or a tensor (T,)
    out = cache.attend(layer, q, k, v)   # once a layer: store k and v, attend, return the output
    cache.advance(T)                     # after the last layer: the tokens now count as past

`KVCache` stores one batch of equal lengths, `PagedKVCache.batch` many sequences in blocks.
A cache inherits from `Cache`, and with it what it does not care about: any model, no slots.
"""

from typing import Protocol

from torch import Tensor

from minillm.layers.attention import check_backend, default_scale, unchecked_attention


class Cache(Protocol):
    """What `Decoder.forward` asks of the object passed as `cache`."""

    made_for: str | None = None
    """`Decoder.kv_format` of the model that it was made for; None fits any model."""

    def positions(self, n_new: int) -> range | Tensor: ...
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def advance(self, n_new: int) -> None: ...

    def slots(self, layer: int) -> tuple[Tensor, ...] | None:
        """Where a kernel may write new keys and values itself; None where only the cache can.

        Pages of keys and of values, and each new token's block and its offset there, (N,) each.
        """
        return None

    def attend_written(self, layer: int, q: Tensor) -> Tensor:
        """`attend`, when k and v lie in the `slots` already."""
        ...


class NoCache(Cache):
    """Causal attention among the tokens given: nothing is kept, each step recomputes everything."""

    def __init__(self, backend: str = "auto"):
        check_backend(backend)
        self.backend = backend

    def positions(self, n_new: int) -> range:
        return range(n_new)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return unchecked_attention(q, k, v, True, default_scale(q), self.backend)

    def advance(self, n_new: int) -> None:
        pass
