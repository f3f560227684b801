"""Sharing key/value heads: a trained model turned into a multi-query or grouped-query one.

Sources: Shazeer 2019 (multi-query: one key/value head for all query heads); Ainslie et al. 2023
(grouped-query, and section 2.1: merge the heads of a trained checkpoint by averaging, then
"uptrain" for a small share of the original steps).
Cost: the cache, and the bytes of it that a decode step reads, shrink by K_old / K_new
(`costs.kv_cache_bytes`); so do the key and value matrices. The FLOPs of the attention scores stay
the same.
Shared heads are no special case in `minillm.attention`: query head h reads key/value head
h // (H/K), for any K.
Not here: choosing which heads to merge; consecutive ones are merged, as in the paper.
"""

import copy
import dataclasses

import torch
from einops import rearrange, reduce
from torch import Tensor, nn

from minillm.model import Decoder, Linear

METHODS = ("mean", "first", "random")


def merge_kv_heads(model: Decoder, n_kv_heads: int, *, method: str = "mean") -> Decoder:
    """A copy of `model` with `n_kv_heads` key/value heads, each merged from K / n_kv_heads others.

    method: "mean" averages the projections of consecutive heads, which Ainslie et al. found best;
    "first" keeps the first head of each group; "random" draws new matrices, with biases of 0. The
    last two are baselines (their figure 4).
    RoPE rotates all heads alike, so the average of rotated keys is the rotated average.
    Raises ValueError when n_kv_heads does not divide the model's K, for an unknown method, and for
    a model whose qkv matrices are not plain `Linear`.
    """
    _check_mergeable(model, n_kv_heads, method)
    old = model.config
    H, K, D = old.n_heads, old.n_kv_heads, old.d_head

    def merge(rows: Tensor) -> Tensor:
        """Rows ((H + 2K) * D, …) of the fused projection to ((H + 2 n_kv_heads) * D, …)."""
        q, k, v = rows.split((H * D, K * D, K * D))
        return torch.cat((q, _merge(k, n_kv_heads, D, method), _merge(v, n_kv_heads, D, method)))

    merged = copy.deepcopy(model)
    merged.config = dataclasses.replace(old, n_kv_heads=n_kv_heads)
    for layer in merged.layers:
        layer.config = merged.config
        fused = layer.qkv
        n_rows, biased = (H + 2 * n_kv_heads) * D, fused.bias is not None
        layer.qkv = Linear(fused.in_features, n_rows, bias=biased, device="meta")  # only a shape
        for name, old_rows in fused.named_parameters():
            rows = nn.Parameter(merge(old_rows.detach()), requires_grad=old_rows.requires_grad)
            setattr(layer.qkv, name, rows)
    return merged.train(model.training)


def _check_mergeable(model: Decoder, n_kv_heads: int, method: str) -> None:
    """ValueError for what `merge_kv_heads` cannot do."""
    old = model.config
    if type(n_kv_heads) is not int or n_kv_heads < 1 or old.n_kv_heads % n_kv_heads:
        divisors = [n for n in range(1, old.n_kv_heads + 1) if old.n_kv_heads % n == 0]
        raise ValueError(
            f"n_kv_heads is {n_kv_heads!r}; {old.name} has {old.n_kv_heads} key/value heads, "
            f"which can be merged into {' or '.join(map(str, divisors))}."
        )
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")
    for layer in model.layers:
        if type(layer.qkv) is not Linear:
            raise ValueError(
                f"The qkv matrices of {old.name} are {type(layer.qkv).__name__}, not plain Linear; "
                "merge the heads before `prepack` or any other replacement of the matrices."
            )


def _merge(rows: Tensor, n: int, D: int, method: str) -> Tensor:
    """Rows (K * D, …) of one projection to (n * D, …), g = K / n heads at a time."""
    if method == "mean":
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))  # 16-bit sums would round
        return reduce(wide, "(n g d) ... -> (n d) ...", "mean", n=n, d=D).to(rows.dtype)
    first = rearrange(rows, "(n g d) ... -> n g d ...", n=n, d=D)[:, 0]  # (n, D, …)
    if method == "first":
        return first.flatten(0, 1)
    new = torch.zeros_like(first)
    if rows.dim() > 1:  # a bias starts at 0, as in `Linear`
        new.normal_(std=0.02)
    return new.flatten(0, 1)
