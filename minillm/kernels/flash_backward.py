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
forward pass stored: reading it would take longer than computing it. That makes 5 products where the
forward pass has 2. Here there are 7, because the scores and dP are computed twice: in the kernel
for dK and dV and in the one for dQ.

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
- The dQ kernel loads by tensor descriptors where it can (`flash_forward.py`): the registers saved
  make room for 128 queries, so that each tile of keys is loaded half as often as with 64. The dK/dV
  kernel does not: it would need new ones for each head.
Not yet timed on a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.tiles import describe, load_tile, seen_keys, store_tile, which_tile
from minillm.kernels.tuning import (
    Choose,
    dkv_configs,
    dot_size,
    dq_configs,
    launch,
    takes_descriptors,
)

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def delta_kernel(
    OUT, GRAD, DELTA,
    o_stride_b, o_stride_t, o_stride_h, grad_stride_b, grad_stride_t, grad_stride_h,
    T, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """delta = Σ_d dO · O, one number for each row, in float32."""
    tile, h, b = which_tile(tl.cdiv(T, BLOCK_T), H)
    t0 = tile * BLOCK_T
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
    """Add the contribution of the tile of queries that starts at t0 to dK and dV.

    first_query (BLOCK_S,): the first query that sees each key.
    """
    rows = t0 + tl.arange(0, BLOCK_T)
    q_tile = load_tile(q_head, q_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    grad_tile = load_tile(grad_head, grad_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True)
    lse = tl.load(lse_head + rows, mask=rows < T, other=float("inf"))
    delta = tl.load(delta_head + rows, mask=rows < T, other=0.0)
    # Scores and weights transposed, (BLOCK_S, BLOCK_T): P = exp(scores - LSE), by powers of two
    scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
    weights = tl.exp2(scores * scale_log2 - (lse * LOG2_E)[None, :])
    if MASKED:
        weights = tl.where(rows[None, :] >= first_query[:, None], weights, 0.0)
    dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv, input_precision="ieee")  # dV += Pᵀ dO
    dweights = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")
    dscores = weights * (dweights - delta[None, :])  # P ∘ (dP - delta)
    # dK += dscoresᵀ Q; the scale comes at the end
    dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def seeing_queries(s0, T, S, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr):
    """(first_query, begin, n_masked) for the keys s0 … s0 + BLOCK_S - 1.

    first_query (BLOCK_S,): the first query that sees each key. The walk over the queries masks
    those from begin to n_masked; the ones after that see all keys of the tile. For example, T 12,
    S 14, tiles of 4, CAUSAL; the keys are the rows, as in the kernel (x seen, . not):

        query     0 1 2 3 | 4 5 6 7 | 8 9 10 11                  s0 = 4
        key 4     . . x x | x x x x | x x x  x    first_query 2
        key 5     . . . x | x x x x | x x x  x                3
        key 6     . . . . | x x x x | x x x  x                4
        key 7     . . . . | . x x x | x x x  x                5
                  masked  | masked  | no mask     begin = 0, n_masked = 8

        query     0 1 2 3 | 4 5 6 7 | 8 9 10 11                  s0 = 8
        key 8     . . . . | . . x x | x x x  x    first_query 6
        key 9     . . . . | . . . x | x x x  x                7
        key 10    . . . . | . . . . | x x x  x                8
        key 11    . . . . | . . . . | . x x  x                9
                  skipped | masked  | masked      begin = 4, n_masked = 12

    Tiles of queries start at multiples of BLOCK_T, so begin is rounded down and may lie left of
    the diagonal: with s0 = 4 queries 0 and 1 see no key of the tile, and the mask gives them
    weight 0.
    """
    first_query = s0 + tl.arange(0, BLOCK_S) - (S - T)
    begin, n_masked = 0, 0
    if CAUSAL:
        begin = tl.maximum(0, s0 - (S - T)) // BLOCK_T * BLOCK_T
        # From the query that sees the tile's last key on, nothing is masked.
        all_visible = tl.cdiv(s0 + BLOCK_S - 1 - (S - T), BLOCK_T) * BLOCK_T
        n_masked = tl.minimum(T, tl.maximum(begin, all_visible))
    return first_query, begin, n_masked


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

    A walk over the queries that see these keys, one head of the group after another.
    """
    tile, kv_head, b = which_tile(tl.cdiv(S, BLOCK_S), H // G)
    # Causal: the first keys are seen by the most queries, so their tiles take longest. They start
    # first.
    s0 = tile * BLOCK_S
    first_query, begin, n_masked = seeing_queries(s0, T, S, BLOCK_T, BLOCK_S, CAUSAL)
    k_head = K + b * k_stride_b + kv_head * k_stride_h
    k_tile = load_tile(k_head, k_stride_s, s0, S, D, BLOCK_S, BLOCK_D, True)
    v_head = V + b * v_stride_b + kv_head * v_stride_h
    v_tile = load_tile(v_head, v_stride_s, s0, S, D, BLOCK_S, BLOCK_D, True)

    dk = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for h in range(kv_head * G, kv_head * G + G):  # the query heads that share these keys
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
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the tile of keys that starts at s0 to dQ."""
    k_tile = load_tile(k_head, k_stride_s, s0, S, D, BLOCK_S, BLOCK_D, MASKED, DESCRIPTORS)
    v_tile = load_tile(v_head, v_stride_s, s0, S, D, BLOCK_S, BLOCK_D, MASKED, DESCRIPTORS)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
    if MASKED:
        visible = s0 + tl.arange(0, BLOCK_S)[None, :] <= last_key[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    weights = tl.exp2(scores - (lse * LOG2_E)[:, None])  # (BLOCK_T, BLOCK_S)
    dweights = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
    dscores = weights * (dweights - delta[:, None])  # P ∘ (dP - delta)
    return tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["LENGTH"])
def dq_kernel(
    Q, K, V, GRAD, LSE, DELTA, DQ,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h, grad_stride_b, grad_stride_t, grad_stride_h,
    dq_stride_b, dq_stride_t, dq_stride_h,
    T, S, H, G, scale, LENGTH,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """DQ of one tile of queries of one head: a walk over the keys that it sees."""
    n_tiles = tl.cdiv(T, BLOCK_T)
    tile, h, b = which_tile(n_tiles, H)
    t0 = (n_tiles - 1 - tile) * BLOCK_T  # the last tile sees the most keys and starts first
    last_key, n_full, n_keys = seen_keys(t0, T, S, BLOCK_T, BLOCK_S, CAUSAL)
    k_head = K + b * k_stride_b + h // G * k_stride_h
    v_head = V + b * v_stride_b + h // G * v_stride_h
    q_head = Q + b * q_stride_b + h * q_stride_h
    grad_head = GRAD + b * grad_stride_b + h * grad_stride_h
    if DESCRIPTORS:
        q_head = describe(q_head, T, q_stride_t, D, BLOCK_T, BLOCK_D)
        grad_head = describe(grad_head, T, grad_stride_t, D, BLOCK_T, BLOCK_D)
        k_head = describe(k_head, S, k_stride_s, D, BLOCK_S, BLOCK_D)
        v_head = describe(v_head, S, v_stride_s, D, BLOCK_S, BLOCK_D)
    q_tile = load_tile(q_head, q_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True, DESCRIPTORS)
    grad_tile = load_tile(grad_head, grad_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True, DESCRIPTORS)
    rows = t0 + tl.arange(0, BLOCK_T)
    lse = tl.load(LSE + (b * H + h) * T + rows, mask=rows < T, other=float("inf"))
    delta = tl.load(DELTA + (b * H + h) * T + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for s0 in range(0, n_full, BLOCK_S):
        dq = _add_keys(
            dq, q_tile, grad_tile, lse, delta, k_head, v_head, k_stride_s, v_stride_s, s0, last_key,
            S, scale * LOG2_E, D, BLOCK_D, BLOCK_S, False, DESCRIPTORS
        )  # fmt: skip
    for s0 in range(n_full, n_keys, BLOCK_S):
        dq = _add_keys(
            dq, q_tile, grad_tile, lse, delta, k_head, v_head, k_stride_s, v_stride_s, s0, last_key,
            S, scale * LOG2_E, D, BLOCK_D, BLOCK_S, True, DESCRIPTORS
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
    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(T, 64) * B * H,)](
        out, grad, delta, *out.stride()[:3], *grad.stride()[:3], T, H,
        D=D, BLOCK_D=dot_size(D), BLOCK_T=64,
    )  # fmt: skip
    return delta


def grad_kv(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    causal: bool, scale: float, config: triton.Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dK and dV (B, S, K, D). config: as in `flash_forward`."""
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    tensors = (q, k, v, grad, lse, delta, dk, dv)
    _launch(dkv_kernel, dkv_configs, "BLOCK_S", tensors, dk, causal, scale, config)
    return dk, dv


def grad_q(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    causal: bool, scale: float, config: triton.Config | None = None,
) -> Tensor:  # fmt: skip
    """dQ (B, T, H, D). config: as in `flash_forward`."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    tensors = (q, k, v, grad, lse, delta, dq)
    by_engine = takes_descriptors(q, k, v, grad)
    _launch(
        dq_kernel, dq_configs, "BLOCK_T", tensors, dq, causal, scale, config, DESCRIPTORS=by_engine
    )
    return dq


def _launch(
    kernel: triton.JITFunction, choose: Choose, tile: str, tensors: tuple[Tensor, ...],
    written: Tensor, causal: bool, scale: float, config: triton.Config | None, **constants: bool,
) -> None:  # fmt: skip
    """Start either kernel. written: what it writes; if there are two, both have these strides."""
    q, k, v, grad = tensors[:4]
    (T, H, D), S = q.shape[1:], k.shape[1]
    strides = tuple(s for x in (q, k, v, grad, written) for s in x.stride()[:3])
    sizes = (T, S, H, H // k.shape[2], scale, triton.next_power_of_2(S))
    common = {"CAUSAL": causal, "D": D, "BLOCK_D": dot_size(D)}
    arguments = (*tensors, *strides, *sizes)
    launch(kernel, choose, tile, q, written, arguments, common | constants, config)
