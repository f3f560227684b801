"""FlashAttention: exact attention in tiles, without the T × S matrix, forward and backward.

Sources: Dao et al. 2022 (FlashAttention); Dao 2023 (FlashAttention-2); Milakov and Gimelshein 2018
(online softmax).
Cost: the FLOPs of plain attention, and far fewer bytes between the GPU's memory (HBM) and its
processors' own (SRAM): `costs.attention_bytes`. The backward pass needs 5 products instead of 4,
because the weights are computed again; the Triton kernels compute them twice and need 7. Memory
kept for the backward pass: the output and one log-sum-exp per row, instead of T × S weights.

Two versions of the same loop: `tiled_attention` in plain torch, to read and to count bytes with,
and the Triton kernels of `minillm.kernels`. In both, the backward pass of `FlashAttention`
recomputes the weights. The online softmax is derived in `kernels/online_softmax.py`.
Causal masks align the last query with the last key, as everywhere.
Not here: dropout, sliding windows, biases.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.kernels.availability import on_device_of, rows_contiguous
from minillm.tools.checks import check_whole

LN_2, LOG2_E = math.log(2), math.log2(math.e)


@dataclass
class Traffic:
    """Counts the bytes that tiles would move between HBM and SRAM if each were a GPU program."""

    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        """Bytes loaded and stored."""
        return self.loaded + self.stored


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    block_t: int = 64,
    block_s: int = 64,
    traffic: Traffic | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v by online softmax over tiles of block_t queries and block_s keys.

    q (B, T, H, D), k and v (B, S, K, D); returns (B, T, H, D). The inputs are not checked here;
    `minillm.attention` does that. scale: 1/sqrt(D) unless given.
    traffic: if given, adds up the bytes that a kernel with these tiles moves: each query tile once,
    each tile of keys and values once for every query tile of every query head that sees it, the
    output and the log-sum-exp once.
    Each step, a tile of queries with a tile of keys, runs for all heads and sequences at once; on a
    GPU each head has its own programs.
    Raises ValueError if block_t or block_s is not a whole number of 1 or more.
    """
    check_whole("block_t", block_t)
    check_whole("block_s", block_s)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _tiled_forward(q, k, v, causal, scale, block_t, block_s, traffic or Traffic())[0]


def _tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    block_t: int,
    block_s: int,
    traffic: Traffic,
) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, D) and log-sum-exp (B, H, T); the loops of `kernels/flash_forward.py`."""
    T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = _heads_first(q, k, v)  # (B, K, G, T, D), twice (B, K, 1, S, D)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for t0 in range(0, T, block_t):  # on a GPU: one program each, all at once
        t = slice(t0, t0 + block_t)
        q_tile = q[..., t, :].float()  # (B, K, G, block_t, D)
        last_key = _last_keys(t0, q_tile, T, S, causal)
        m = torch.full(q_tile.shape[:-1], -torch.inf, device=q.device)
        total, acc = torch.zeros_like(m), torch.zeros_like(q_tile)
        traffic.loaded += q[..., t, :].nbytes
        for s0 in range(0, int(last_key[-1]) + 1, block_s):
            k_tile, v_tile = k[..., s0 : s0 + block_s, :], v[..., s0 : s0 + block_s, :]
            # Each of the G query heads has a program that loads them.
            traffic.loaded += G * (k_tile.nbytes + v_tile.nbytes)
            # (B, K, G, block_t, block_s), as exponents of 2
            scores = q_tile @ k_tile.float().mT * (scale * LOG2_E)
            scores = scores.masked_fill(_hidden(s0, k_tile, last_key), -torch.inf)
            m_new = torch.maximum(m, scores.amax(-1))
            weights = torch.exp2(scores - m_new[..., None])
            # The sums so far are relative to the old maximum.
            rescale = torch.exp2(m - m_new)
            total = total * rescale + weights.sum(-1)
            acc = acc * rescale[..., None] + weights.to(v.dtype).float() @ v_tile.float()
            m = m_new
        out[..., t, :] = (acc / total[..., None]).to(out.dtype)
        lse[..., t] = (m + torch.log2(total)) * LN_2
    traffic.stored += out.nbytes + lse.nbytes
    return _tokens_first(out).contiguous(), lse.flatten(1, 2)


def _tiled_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    block_t: int,
    block_s: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the shapes of q, k, v, by the formulas of `kernels/flash_backward.py`.

    Only one tile of weights exists at a time.
    """
    T, S, K, dtype = q.shape[1], k.shape[1], k.shape[2], q.dtype
    grad, out = _grouped(grad, K), _grouped(out, K)  # (B, K, G, T, D)
    q, k, v = _heads_first(q, k, v)
    lse = lse.unflatten(1, (K, -1))  # (B, K, G, T)
    delta = (grad.float() * out.float()).sum(-1)  # (B, K, G, T): Σ_s P dP
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    for t0 in range(0, T, block_t):
        t = slice(t0, t0 + block_t)
        q_tile, grad_tile = q[..., t, :].float(), grad[..., t, :].float()
        last_key = _last_keys(t0, q_tile, T, S, causal)
        for s0 in range(0, int(last_key[-1]) + 1, block_s):
            s = slice(s0, s0 + block_s)
            k_tile, v_tile = k[..., s, :].float(), v[..., s, :].float()
            scores = q_tile @ k_tile.mT * scale  # (B, K, G, block_t, block_s)
            scores = scores.masked_fill(_hidden(s0, k_tile, last_key), -torch.inf)
            weights = torch.exp(scores - lse[..., t, None])  # P again
            dscores = weights * (grad_tile @ v_tile.mT - delta[..., t, None])  # P ∘ (dP - delta)
            dq[..., t, :] += dscores @ k_tile * scale
            # The heads of a group share k and v, so their gradients add up.
            dk[..., s, :] += (dscores.mT @ q_tile * scale).sum(2, keepdim=True)
            dv[..., s, :] += (weights.to(dtype).float().mT @ grad_tile).sum(2, keepdim=True)
    return tuple(_tokens_first(x).to(dtype) for x in (dq, dk, dv))


def _last_keys(t0: int, q_tile: Tensor, T: int, S: int, causal: bool) -> Tensor:
    """The last key that each query of the tile (…, block_t, D) at t0 sees, (block_t,)."""
    rows = torch.arange(t0, t0 + q_tile.shape[-2], device=q_tile.device)
    return S - T + rows if causal else torch.full_like(rows, S - 1)


def _hidden(s0: int, k_tile: Tensor, last_key: Tensor) -> Tensor:
    """(block_t, block_s) booleans, True where a query does not see a key of the tile at s0."""
    keys = torch.arange(s0, s0 + k_tile.shape[-2], device=k_tile.device)
    return keys > last_key[:, None]


# einops is imported where it is used, so that the kernels run where it is not installed.


def _grouped(x: Tensor, n_kv_heads: int) -> Tensor:
    """(B, K, G, T, D): the query heads of x (B, T, H, D) by the key/value head that they share."""
    from einops import rearrange

    return rearrange(x, "b t (k g) d -> b k g t d", k=n_kv_heads)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views (B, K, G, T, D) and twice (B, K, 1, S, D): one key/value head for G query heads."""
    K = k.shape[2]
    return _grouped(q, K), _grouped(k, K), _grouped(v, K)


def _tokens_first(x: Tensor) -> Tensor:
    """(B, T, H, D) from (B, K, G, T, D): the inverse of `_grouped`."""
    from einops import rearrange

    return rearrange(x, "b k g t d -> b t (k g) d")


class FlashAttention(torch.autograd.Function):
    """`apply(q, k, v, causal, scale, backend)` with backend "tiled" or "triton".

    Saves q, k, v, the output and the log-sum-exp; the backward pass computes the weights again from
    them (Dao et al. 2022, section 3.1).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, backend: str
    ) -> Tensor:
        if backend == "triton":
            from minillm.kernels.flash_forward import flash_forward

            q, k, v = (rows_contiguous(x) for x in (q, k, v))
            with on_device_of(q):
                out, lse = flash_forward(q, k, v, causal, scale)
        else:
            out, lse = _tiled_forward(q, k, v, causal, scale, 64, 64, Traffic())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale, ctx.backend = causal, scale, backend
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if ctx.backend == "triton":
            from minillm.kernels.flash_backward import flash_backward

            with on_device_of(q):
                gradients = flash_backward(
                    rows_contiguous(grad), q, k, v, out, lse, ctx.causal, ctx.scale
                )
        else:
            gradients = _tiled_backward(grad, q, k, v, out, lse, ctx.causal, ctx.scale, 64, 64)
        return *gradients, None, None, None


def triton_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention by the Triton kernels: the decode kernel for few queries, else the forward kernel.

    q (B, T, H, D), k and v (B, S, K, D); returns (B, T, H, D). If a gradient is needed,
    `FlashAttention` runs, because the decode kernel has no backward pass.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return FlashAttention.apply(q, k, v, causal, scale, "triton")
    from minillm.kernels.flash_decode import MAX_ROWS, flash_decode
    from minillm.kernels.flash_forward import flash_forward

    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    with on_device_of(q):
        if q.shape[1] * q.shape[2] // k.shape[2] <= MAX_ROWS:
            return flash_decode(q, k, v, causal, scale)
        return flash_forward(q, k, v, causal, scale)[0]
