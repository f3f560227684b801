"""Sharing key/value heads: multi-query and grouped-query attention, made from a model that was trained without.

Sources: Shazeer 2019 (multi-query: one key/value head for all query heads); Ainslie et al. 2023 (grouped-query, and
section 2.1: merge the heads of a trained checkpoint by averaging, then "uptrain" on a small share of the original steps).
Cost: the cache and what each decode step reads of it shrink by K_old / K_new (`costs.kv_cache_bytes`); so do the key and
value matrices; FLOPs of the attention scores stay the same.
Sharing itself is nothing special in `minillm.attention`: query head h reads key/value head h // (H/K), for any K.
Not here: choosing which heads to put together; consecutive ones are, as in the paper.
"""

import copy
import dataclasses
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model import Decoder, Linear

METHODS = ("mean", "first", "random")


def merge_kv_heads(model: Decoder, n_kv_heads: int, *, method: str = "mean") -> Decoder:
    """A copy of `model` with `n_kv_heads` key/value heads, each made of K / n_kv_heads consecutive ones.

    method: "mean" averages the heads' projections, which Ainslie et al. found best; "first" keeps the first head of each
    group; "random" draws new matrices, with biases of 0. The last two are there to compare with (their figure 4).
    Rotary positions turn all heads alike, so the average of turned keys is the turned average.
    Raises ValueError when n_kv_heads does not divide the model's K, or for an unknown method.
    """
    old = model.config
    if type(n_kv_heads) is not int or n_kv_heads < 1 or old.n_kv_heads % n_kv_heads:
        divisors = [n for n in range(1, old.n_kv_heads + 1) if old.n_kv_heads % n == 0]
        raise ValueError(
            f"n_kv_heads is {n_kv_heads!r}; {old.name} has {old.n_kv_heads} key/value heads, "
            f"which can be merged into {' or '.join(map(str, divisors))}."
        )
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")

    merged = copy.deepcopy(model)
    merged.config = dataclasses.replace(old, n_kv_heads=n_kv_heads)
    H, K, D = old.n_heads, old.n_kv_heads, old.d_head

    def merge(rows: Tensor) -> Tensor:
        """Rows ((H + 2K) * D, …) of the fused projection to ((H + 2 n_kv_heads) * D, …)."""
        q, k, v = rows.split((H * D, K * D, K * D))
        return torch.cat((q, _merge(k, n_kv_heads, D, method), _merge(v, n_kv_heads, D, method)))

    for layer in merged.layers:
        layer.config = merged.config
        fused = layer.qkv
        layer.qkv = Linear(fused.in_features, (H + 2 * n_kv_heads) * D, bias=fused.bias is not None, device="meta")
        for name, parameter in fused.named_parameters():
            setattr(layer.qkv, name, nn.Parameter(merge(parameter.detach()), requires_grad=parameter.requires_grad))
    return merged.train(model.training)


def _merge(rows: Tensor, n: int, d_head: int, method: str) -> Tensor:
    """Rows (K * D, …) of one projection to (n * D, …)."""
    groups = rows.unflatten(0, (n, -1, d_head))  # (n, K/n, D, …)
    if method == "mean":
        return groups.to(torch.promote_types(rows.dtype, torch.float32)).mean(1).to(rows.dtype).flatten(0, 1)
    if method == "first":
        return groups[:, 0].flatten(0, 1)
    new = torch.zeros_like(groups[:, 0])  # (n, d_head, …); a bias stays 0, as `Linear` starts
    return (new if rows.dim() == 1 else new.normal_(std=0.02)).flatten(0, 1)


def next_token_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token, of each token of `tokens` (B, T) given those before it (T at least 2)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def uptrain(model: Decoder, batches: Iterable[Tensor], *, lr: float) -> list[float]:
    """Train `model` in place on batches of token ids (B, T), one AdamW step each; returns the loss before each step.

    Ainslie et al. 2023, section 2.1: after merging, training goes on as it was, for a share α of the original steps.
    Nothing is special about it, so a small model can be trained from scratch with it too.
    """
    learned = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    try:
        for tokens in batches:
            loss = next_token_loss(model, tokens)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    finally:
        optimizer.zero_grad()  # the gradients are of no more use, and as large as the model
        for parameter, required in learned:
            parameter.requires_grad_(required)
    return losses
