"""FlashAttention, forward: O = softmax(scale · Q Kᵀ) V without the T × S matrix.

Sources: Dao et al. 2022 (FlashAttention), algorithm 1; Dao 2023 (FlashAttention-2), algorithm 1.

One program owns BLOCK_T queries of one head and walks over the keys, BLOCK_S at a time, with the
sums of the online softmax (`online_softmax.py`). One more number is stored for each row: its
log-sum-exp, log Σ exp(score) = m + log total, from which the backward pass computes any weight
again.

What moves: each query tile reads all keys and values that it may see, so about
(T / BLOCK_T) · S · 2D numbers per head, instead of the 4 · T · S of a matrix of scores written,
read, written as weights, and read. What does not move: the scores.

Decisions:
- A causal program stops at the diagonal. Only the tiles on the diagonal, and the last one, are
  masked; the others skip the comparison (`tiles.seen_keys` has a picture).
- Shared heads: query head h reads key/value head h // G in place. Programs of one group run side by
  side and find the tiles in the L2 cache.
- The longest rows start first, so that the chip does not wait for one of them at the end.
- Tensor descriptors (`DESCRIPTORS`): from Hopper on a copy engine fetches a whole tile from one
  description of the matrix. No thread computes addresses or compares rows with the end, which
  leaves registers for larger tiles; what lies outside is read as 0. The engine needs addresses and
  strides that are multiples of 16 bytes; other inputs, and older chips, load by pointers.
- Warp specialization (`SPECIALIZED`) lets some warps load and others compute. It needs a single
  loop, so all tiles are masked. Only the benchmark uses it so far (`tuning.specialized_configs`).
Not yet timed on a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.online_softmax import no_keys_yet, output_and_lse, softmax_step
from minillm.kernels.tiles import describe, load_tile, seen_keys, store_tile, which_tile
from minillm.kernels.tuning import dot_size, forward_configs, launch, takes_descriptors


@triton.jit
def _add_tile(
    acc, m, total, q_tile, k_head, v_head, k_stride_s, v_stride_s, s0, last_key, S, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Add the tile of keys and values that starts at s0 to acc, m and total.

    last_key (BLOCK_T,): the last key that each query sees.
    """
    k_tile = load_tile(k_head, k_stride_s, s0, S, D, BLOCK_S, BLOCK_D, MASKED, DESCRIPTORS)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_T, BLOCK_S)
    if MASKED:
        visible = s0 + tl.arange(0, BLOCK_S)[None, :] <= last_key[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    # Each row sees key 0, in the first tile.
    weights, rescale, m, total = softmax_step(scores, m, total, scale_log2, False)
    v_tile = load_tile(v_head, v_stride_s, s0, S, D, BLOCK_S, BLOCK_D, MASKED, DESCRIPTORS)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
    return acc, m, total


@triton.jit(do_not_specialize=["T", "S", "LENGTH"])
def flash_forward_kernel(
    Q, K, V, OUT, LSE,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h, o_stride_b, o_stride_t, o_stride_h,
    T, S, H, G, scale_log2,
    LENGTH,  # S rounded up to a power of two, unused here: each magnitude is tuned once
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """OUT and LSE of one tile of queries of one head: a walk over the keys that it sees."""
    n_tiles = tl.cdiv(T, BLOCK_T)
    tile, h, b = which_tile(n_tiles, H)
    t0 = (n_tiles - 1 - tile) * BLOCK_T  # the last tile sees the most keys and starts first
    last_key, n_full, n_keys = seen_keys(t0, T, S, BLOCK_T, BLOCK_S, CAUSAL)
    q_head = Q + b * q_stride_b + h * q_stride_h
    k_head = K + b * k_stride_b + h // G * k_stride_h
    v_head = V + b * v_stride_b + h // G * v_stride_h
    if DESCRIPTORS:
        q_head = describe(q_head, T, q_stride_t, D, BLOCK_T, BLOCK_D)
        k_head = describe(k_head, S, k_stride_s, D, BLOCK_S, BLOCK_D)
        v_head = describe(v_head, S, v_stride_s, D, BLOCK_S, BLOCK_D)
    q_tile = load_tile(q_head, q_stride_t, t0, T, D, BLOCK_T, BLOCK_D, True, DESCRIPTORS)

    acc, m, total = no_keys_yet(BLOCK_T, BLOCK_D)
    # Keys         0 … n_full   n_full … n_keys
    # usually      no mask      masked             two loops
    # SPECIALIZED  masked       masked             the compiler splits only one between its warps
    if SPECIALIZED:
        n_full = 0
    else:
        for s0 in range(0, n_full, BLOCK_S):
            acc, m, total = _add_tile(
                acc, m, total, q_tile, k_head, v_head, k_stride_s, v_stride_s, s0, last_key, S,
                scale_log2, D, BLOCK_D, BLOCK_S, False, DESCRIPTORS
            )  # fmt: skip
    for s0 in tl.range(n_full, n_keys, BLOCK_S, warp_specialize=SPECIALIZED):
        acc, m, total = _add_tile(
            acc, m, total, q_tile, k_head, v_head, k_stride_s, v_stride_s, s0, last_key, S,
            scale_log2, D, BLOCK_D, BLOCK_S, True, DESCRIPTORS
        )  # fmt: skip

    out, lse = output_and_lse(acc, m, total, False)
    store_tile(OUT + b * o_stride_b + h * o_stride_h, o_stride_t, t0, T, out, D, BLOCK_T, BLOCK_D)
    rows = t0 + tl.arange(0, BLOCK_T)
    tl.store(LSE + (b * H + h) * T + rows, lse, mask=rows < T)  # LSE (B, H, T)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    config: triton.Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, T, H, D) and the log-sum-exp of each row's scaled scores, (B, H, T) in float32.

    q (B, T, H, D), k and v (B, S, K, D), the last dimension contiguous. scale above 0. config: for
    measurements; otherwise `tuning.launch` chooses one.
    """
    B, T, H, D = q.shape
    S, K = k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    sizes = (T, S, H, H // K, scale * math.log2(math.e), triton.next_power_of_2(S))
    constants = {"CAUSAL": causal, "D": D, "BLOCK_D": dot_size(D)}
    constants["DESCRIPTORS"] = takes_descriptors(q, k, v)
    arguments = (q, k, v, out, lse, *strides, *sizes)
    launch(flash_forward_kernel, forward_configs, "BLOCK_T", q, out, arguments, constants, config)
    return out, lse
