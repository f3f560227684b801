"""FlashAttention, backward: dQ, dK and dV without ever storing the T × S matrix of weights.

Sources: Dao et al. 2022, section 3.1 and algorithm 4 (appendix B.4); Dao 2023, algorithm 2.

With scores = scale · Q Kᵀ, weights P = exp(scores - LSE) and O = P V, the gradients are

    dV = Pᵀ dO
    dP = dO Vᵀ
    dscores = P ∘ (dP - delta)
    dQ = scale · dscores K
    dK = scale · dscoresᵀ Q

where delta (one number per row) is Σ_s P dP. It equals dO · O, the row of dO times the row of O, so
no pass over the row of P is needed. P is computed again from Q, K and the log-sum-exp that the
forward pass kept: reading it would cost more time than computing it. That makes 5 products where
the forward pass has 2. Here it is 7, because the scores and dP are computed both in the kernel for
dK and dV and in the one for dQ.

Three kernels, all without atomics, so that two runs give equal bits:

    delta       one program per tile of rows
    dK and dV   one program per tile of keys of one key/value head; it walks over the queries of all
                G heads that share it
    dQ          one program per tile of queries of one head; it walks over the keys, as the forward
                pass does

Decisions:
- The dK/dV kernel computes the scores transposed, K Qᵀ, so that P and dscores enter their products
  without being transposed.
- Queries past the end need no mask: their LSE is read as +inf, so their weights are 0. Keys past
  the end need one in the dQ kernel, where exp(0 - LSE) may overflow; in the dK/dV kernel they only
  fill rows that are not stored.
Not yet timed on a GPU: the lists hold what compiles for sm_80 and sm_90 with next to nothing
spilled and without two groups of warps on the same tile, the one expected to be fastest first.
"""

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.flash_forward import LONG
from minillm.kernels.tiles import load_tile, store_tile

LOG2_E = tl.constexpr(math.log2(math.e))


def configs_dkv(d_head: int, dtype: torch.dtype) -> list[triton.Config]:
    """What to try for dK and dV, the default first."""
    if dtype == torch.float32:
        sizes = [(32, 32, 8, 1)] if 32 < d_head <= 64 else [(16, 16, 4, 1)]
    elif d_head <= 64:
        sizes = [(32, 128, 8, 2), (64, 128, 8, 2), (32, 64, 4, 2)]
    elif d_head <= 128:
        sizes = [(32, 128, 8, 2), (16, 128, 8, 2)]
    else:
        sizes = [(64, 32, 8, 2), (32, 16, 4, 2)]
    return _as_configs(sizes)


def configs_dq(d_head: int, dtype: torch.dtype) -> list[triton.Config]:
    """What to try for dQ, the default first."""
    if dtype == torch.float32:
        sizes = [(32, 16, 8, 1)] if d_head <= 128 else [(16, 16, 4, 1)]
    elif d_head <= 64:
        sizes = [(64, 64, 4, 3), (128, 64, 8, 2), (128, 32, 4, 3)]
    elif d_head <= 128:
        sizes = [(64, 64, 4, 3), (128, 64, 8, 2), (128, 32, 8, 2)]
    else:
        sizes = [(32, 32, 4, 2), (64, 32, 4, 2)]
    return _as_configs(sizes)


def _as_configs(sizes: list[tuple[int, int, int, int]]) -> list[triton.Config]:
    return [
        triton.Config({"BLOCK_T": t, "BLOCK_S": s}, num_warps=w, num_stages=n)
        for t, s, w, n in sizes
    ]


@triton.jit
def delta_kernel(
    OUT, GRAD, DELTA,
    o_stride_b, o_stride_t, o_stride_h, grad_stride_b, grad_stride_t, grad_stride_h,
    T, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """delta = Σ_d dO · O, one number for each row, in float32."""
    n_tiles = tl.cdiv(T, BLOCK_T)
    t0 = tl.program_id(0) % n_tiles * BLOCK_T
    b = (tl.program_id(0) // n_tiles // H).to(tl.int64)
    h = tl.program_id(0) // n_tiles % H
    o_head = OUT + b * o_stride_b + h * o_stride_h
    o_tile = load_tile(o_head, o_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    grad_head = GRAD + b * grad_stride_b + h * grad_stride_h
    grad_tile = load_tile(grad_head, grad_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    rows = t0 + tl.arange(0, BLOCK_T)
    delta = tl.sum(o_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(DELTA + (b * H + h) * T + rows, delta, mask=rows < T)


@triton.jit
def _add_queries(
    dk, dv, k_tile, v_tile, q_head, grad_head, lse_head, delta_head, q_stride_t, grad_stride_t,
    t0, T, first_query, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the tile of queries that starts at t0 contributes to dK and dV.

    first_query (BLOCK_S,): the first query that sees each key.
    """
    rows = t0 + tl.arange(0, BLOCK_T)
    q_tile = load_tile(q_head, q_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    grad_tile = load_tile(grad_head, grad_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    lse = tl.load(lse_head + rows, mask=rows < T, other=float("inf"))
    delta = tl.load(delta_head + rows, mask=rows < T, other=0.0)
    # (BLOCK_S, BLOCK_T): transposed
    scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
    weights = tl.exp2(scores * scale_log2 - (lse * LOG2_E)[None, :])
    if MASKED:
        weights = tl.where(rows[None, :] >= first_query[:, None], weights, 0.0)
    dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv, input_precision="ieee")
    dweights = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")
    dscores = weights * (dweights - delta[None, :])
    dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["LENGTH"])
def dkv_kernel(
    Q, K, V, GRAD, LSE, DELTA, DK, DV,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h, grad_stride_b, grad_stride_t, grad_stride_h,
    dk_stride_b, dk_stride_s, dk_stride_h,
    T, S, H, G, scale, LENGTH,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """DK and DV of one tile of keys of one key/value head.

    A walk over the queries that see it, one head of the group after another.
    """
    n_tiles, n_kv_heads = tl.cdiv(S, BLOCK_S), H // G
    # In a causal mask most queries see the first keys, so the first tiles take longest; they start
    # first.
    s0 = tl.program_id(0) % n_tiles * BLOCK_S
    b = (tl.program_id(0) // n_tiles // n_kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) // n_tiles % n_kv_heads
    k_head = K + b * k_stride_b + kv_head * k_stride_h
    k_tile = load_tile(k_head, k_stride_s, s0, S, D, BLOCK_S, BLOCK_D, True)
    v_head = V + b * v_stride_b + kv_head * v_stride_h
    v_tile = load_tile(v_head, v_stride_s, s0, S, D, BLOCK_S, BLOCK_D, True)

    first_query = s0 + tl.arange(0, BLOCK_S) - (S - T)
    begin, n_masked = 0, 0
    if CAUSAL:
        begin = tl.maximum(0, s0 - (S - T)) // BLOCK_T * BLOCK_T
        # From the query that sees the tile's last key on, nothing is masked.
        all_visible = tl.cdiv(s0 + BLOCK_S - 1 - (S - T), BLOCK_T) * BLOCK_T
        n_masked = tl.minimum(T, tl.maximum(begin, all_visible))

    dk = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for h in range(kv_head * G, kv_head * G + G):
        q_head = Q + b * q_stride_b + h * q_stride_h
        grad_head = GRAD + b * grad_stride_b + h * grad_stride_h
        lse_head, delta_head = LSE + (b * H + h) * T, DELTA + (b * H + h) * T
        if CAUSAL:
            for t0 in range(begin, n_masked, BLOCK_T):
                dk, dv = _add_queries(
                    dk, dv, k_tile, v_tile, q_head, grad_head, lse_head, delta_head, q_stride_t,
                    grad_stride_t, t0, T, first_query, scale * LOG2_E, D, BLOCK_D, BLOCK_T, True
                )  # fmt: skip
        for t0 in range(n_masked, T, BLOCK_T):
            dk, dv = _add_queries(
                dk, dv, k_tile, v_tile, q_head, grad_head, lse_head, delta_head, q_stride_t,
                grad_stride_t, t0, T, first_query, scale * LOG2_E, D, BLOCK_D, BLOCK_T, False
            )  # fmt: skip

    offset = b * dk_stride_b + kv_head * dk_stride_h  # dK and dV are laid out alike
    store_tile(DK + offset, dk_stride_s, s0, S, dk * scale, D, BLOCK_S, BLOCK_D)
    store_tile(DV + offset, dk_stride_s, s0, S, dv, D, BLOCK_S, BLOCK_D)


@triton.jit
def _add_keys(
    dq, q_tile, grad_tile, lse, delta, k_head, v_head, k_stride_s, v_stride_s, s0, last_key, S,
    scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the tile of keys that starts at s0 contributes to dQ."""
    k_tile = load_tile(k_head, k_stride_s, s0, S, D, BLOCK_S, BLOCK_D, MASKED)
    v_tile = load_tile(v_head, v_stride_s, s0, S, D, BLOCK_S, BLOCK_D, MASKED)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
    if MASKED:
        visible = s0 + tl.arange(0, BLOCK_S)[None, :] <= last_key[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    weights = tl.exp2(scores - (lse * LOG2_E)[:, None])  # (BLOCK_T, BLOCK_S)
    dweights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
    dscores = weights * (dweights - delta[:, None])
    return tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["LENGTH"])
def dq_kernel(
    Q, K, V, GRAD, LSE, DELTA, DQ,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h, grad_stride_b, grad_stride_t, grad_stride_h,
    dq_stride_b, dq_stride_t, dq_stride_h,
    T, S, H, G, scale, LENGTH,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """DQ of one tile of queries of one head: a walk over the keys that it sees."""
    n_tiles = tl.cdiv(T, BLOCK_T)
    t0 = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_T
    b = (tl.program_id(0) // n_tiles // H).to(tl.int64)
    h = tl.program_id(0) // n_tiles % H
    k_head = K + b * k_stride_b + h // G * k_stride_h
    v_head = V + b * v_stride_b + h // G * v_stride_h

    rows = t0 + tl.arange(0, BLOCK_T)
    last_key = tl.zeros([BLOCK_T], tl.int32) + S - 1
    n_full, n_keys = S // BLOCK_S * BLOCK_S, S
    if CAUSAL:
        last_key = tl.minimum(last_key, S - T + rows)
        n_full = (S - T + t0 + 1) // BLOCK_S * BLOCK_S
        n_keys = tl.minimum(S, S - T + t0 + BLOCK_T)

    q_head = Q + b * q_stride_b + h * q_stride_h
    q_tile = load_tile(q_head, q_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    grad_head = GRAD + b * grad_stride_b + h * grad_stride_h
    grad_tile = load_tile(grad_head, grad_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    lse = tl.load(LSE + (b * H + h) * T + rows, mask=rows < T, other=float("inf"))
    delta = tl.load(DELTA + (b * H + h) * T + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for s0 in range(0, n_full, BLOCK_S):
        dq = _add_keys(
            dq, q_tile, grad_tile, lse, delta, k_head, v_head, k_stride_s, v_stride_s, s0, last_key,
            S, scale * LOG2_E, D, BLOCK_D, BLOCK_S, False
        )  # fmt: skip
    for s0 in range(n_full, n_keys, BLOCK_S):
        dq = _add_keys(
            dq, q_tile, grad_tile, lse, delta, k_head, v_head, k_stride_s, v_stride_s, s0, last_key,
            S, scale * LOG2_E, D, BLOCK_D, BLOCK_S, True
        )  # fmt: skip
    dq_head = DQ + b * dq_stride_b + h * dq_stride_h
    store_tile(dq_head, dq_stride_t, t0, T, dq * scale, D, BLOCK_T, BLOCK_D)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q (B, T, H, D), k and v (B, S, K, D).

    grad: the gradient of out (B, T, H, D). out, lse (B, H, T): what the forward pass returned. The
    last dimension of every input is contiguous.
    """
    delta = row_sums(grad, out, lse)
    dk, dv = grad_kv(grad, q, k, v, lse, delta, causal, scale)
    return grad_q(grad, q, k, v, lse, delta, causal, scale), dk, dv


def row_sums(grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """delta (B, H, T) in float32."""
    B, T, H, D = out.shape
    delta, block_d = torch.empty_like(lse), max(16, triton.next_power_of_2(D))
    delta_kernel[(triton.cdiv(T, 64) * B * H,)](
        out, grad, delta, *out.stride()[:3], *grad.stride()[:3], T, H,
        D=D, BLOCK_D=block_d, BLOCK_T=64,
    )  # fmt: skip
    return delta


def grad_kv(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    causal: bool, scale: float, config: triton.Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dK and dV (B, S, K, D). config: for measurements; else as in `flash_forward`."""
    B, K = k.shape[0], k.shape[2]
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    tensors, n_heads = (q, k, v, grad, lse, delta, dk, dv), B * K
    _launch(dkv_kernel, configs_dkv, "BLOCK_S", n_heads, tensors, dk, causal, scale, config)
    return dk, dv


def grad_q(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    causal: bool, scale: float, config: triton.Config | None = None,
) -> Tensor:  # fmt: skip
    """dQ (B, T, H, D). config: as in `grad_kv`."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    tensors, n_heads = (q, k, v, grad, lse, delta, dq), q.shape[0] * q.shape[2]
    _launch(dq_kernel, configs_dq, "BLOCK_T", n_heads, tensors, dq, causal, scale, config)
    return dq


@functools.cache
def _tuned(kernel: triton.JITFunction, d_head: int, dtype: torch.dtype) -> triton.runtime.Autotuner:
    choose = configs_dkv if kernel is dkv_kernel else configs_dq
    tune = triton.autotune(choose(d_head, dtype), key=["LENGTH", "CAUSAL"], cache_results=True)
    return tune(kernel)


def _launch(
    kernel: triton.JITFunction, choose: Callable[..., list[triton.Config]], tile: str, n_heads: int,
    tensors: tuple[Tensor, ...], written: Tensor, causal: bool, scale: float,
    config: triton.Config | None,
) -> None:  # fmt: skip
    """Either kernel: a program for each `tile` of each of n_heads; `written` is what it writes."""
    q, k, v, grad = tensors[:4]
    (T, H, D), S = q.shape[1:], k.shape[1]
    strides = tuple(s for x in (q, k, v, grad, written) for s in x.stride()[:3])
    sizes = (T, S, H, H // k.shape[2], scale, triton.next_power_of_2(S))
    constants = dict(CAUSAL=causal, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)))

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(written.shape[1], meta[tile]) * n_heads,)

    if q.is_cuda and T >= LONG and config is None:
        _tuned(kernel, D, q.dtype)[grid](*tensors, *strides, *sizes, **constants)
    else:
        chosen = config or choose(D, q.dtype)[0]
        kernel[grid](*tensors, *strides, *sizes, **constants, **chosen.all_kwargs())
