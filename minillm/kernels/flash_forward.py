"""FlashAttention, forward: O = softmax(scale · Q Kᵀ) V without the T × S matrix.

Sources: Dao et al. 2022 (FlashAttention), algorithm 1; Dao 2023 (FlashAttention-2), algorithm 1;
Milakov and Gimelshein 2018 (online softmax).

One program owns BLOCK_T queries of one head and walks over the keys, BLOCK_S at a time. For each of
its rows it keeps

    m      the largest score so far
    total  Σ exp(score - m) so far, called l in the papers
    acc    Σ exp(score - m) · v so far

When a new tile of keys brings a larger maximum m', everything summed so far was divided by too
small a power: exp(score - m') = exp(score - m) · exp(m - m'), so total and acc are multiplied by
exp(m - m') and the tile's own terms are added. After the last tile O = acc / total. One more number
per row is kept: log Σ exp(score) = m + log total, from which the backward pass computes any weight
again.

What moves: each query tile reads all keys and values that it may see, so about
(T / BLOCK_T) · S · 2D numbers per head, instead of the 4 · T · S of a matrix of scores written,
read, written as weights, and read. What does not move: the scores.

Decisions:
- Powers of two: the GPU has exp2, not exp, so scale · log2(e) multiplies the scores once, inside
  the subtraction (one fused multiply-add). That needs scale > 0, because the maximum is taken
  before.
- A causal program stops at the diagonal. Only the tiles on the diagonal, and the last one, are
  masked; the others skip the comparison.
- Shared heads: query head h reads key/value head h // G in place. Programs of one group run side by
  side and find the tiles in the L2 cache.
- The longest rows start first, so that the chip does not wait for one of them at the end.
- Tensor descriptors (`DESCRIPTORS`): from Hopper on a copy engine fetches a whole tile from one
  description of the matrix. No thread computes addresses or compares rows with the end, which
  leaves registers for larger tiles; what lies outside reads as 0. The engine wants addresses and
  strides that are multiples of 16 bytes; other inputs, and older chips, load by pointers.
- Warp specialization (`SPECIALIZED`) lets some warps load and others compute. It needs a single
  loop, so all tiles are masked. Nothing chooses it before a measurement does:
  `candidates` lists it for the benchmark.
Not yet timed on a GPU: `configs` lists what compiles without spilling registers for sm_80 and
sm_90, the one expected to be fastest first.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.tiles import load_tile, store_tile

LN_2 = tl.constexpr(math.log(2))
LONG = 1024
"""On a GPU, with this many queries or more, each configuration is tried once; the fastest is kept.

With fewer, the first configuration is used.
"""


def configs(d_head: int, dtype: torch.dtype) -> list[triton.Config]:
    """What to try, the default first.

    float32 has no exact matrix instruction, so its tiles are small.
    """
    if dtype == torch.float32 and d_head <= 64:
        sizes = [(32, 32, 4, 2)]
    elif dtype == torch.float32:
        sizes = [(32, 16, 8, 2)] if d_head <= 128 else [(16, 16, 4, 1)]
    elif d_head <= 64:
        sizes = [(128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3)]
    elif d_head <= 128:
        sizes = [(128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)]
    else:
        sizes = [(128, 64, 8, 2), (64, 32, 4, 2)]
    return [
        triton.Config({"BLOCK_T": t, "BLOCK_S": s, "SPECIALIZED": False}, num_warps=w, num_stages=n)
        for t, s, w, n in sizes
    ]


def candidates(d_head: int) -> list[triton.Config]:
    """For 16-bit numbers and tensor descriptors: what a measurement may move into `configs`."""
    return [
        triton.Config(
            {"BLOCK_T": 128, "BLOCK_S": s, "SPECIALIZED": True}, num_warps=4, num_stages=n
        )
        for s, n in ((64, 2), (64, 3), (128, 2))
        if d_head <= 128
    ]


@triton.jit
def _load(
    head, stride_s, s0, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """(BLOCK_S, BLOCK_D) from row s0 on; `head` is a tensor descriptor or a pointer."""
    if DESCRIPTORS:
        tile = head.load([s0, 0])
    else:
        tile = load_tile(head, stride_s, s0, S, D, BLOCK_S, BLOCK_D, MASKED)
    return tile


@triton.jit
def _add_tile(
    acc, m, total, q_tile, k_head, v_head, k_stride_s, v_stride_s, s0, last_key, S, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Add the tile of keys and values that starts at s0 to acc, m and total.

    last_key (BLOCK_T,): the last key that each query sees.
    """
    k_tile = _load(k_head, k_stride_s, s0, S, D, BLOCK_D, BLOCK_S, MASKED, DESCRIPTORS)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_T, BLOCK_S)
    if MASKED:
        visible = s0 + tl.arange(0, BLOCK_S)[None, :] <= last_key[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    total = total * rescale + tl.sum(weights, 1)
    v_tile = _load(v_head, v_stride_s, s0, S, D, BLOCK_D, BLOCK_S, MASKED, DESCRIPTORS)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
    return acc, m_new, total


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
    # What this program owns: the tile of queries varies fastest, then the query head, then the
    # sequence.
    n_tiles = tl.cdiv(T, BLOCK_T)
    t0 = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_T
    b = (tl.program_id(0) // n_tiles // H).to(tl.int64)
    h = tl.program_id(0) // n_tiles % H
    q_head = Q + b * q_stride_b + h * q_stride_h
    k_head = K + b * k_stride_b + h // G * k_stride_h
    v_head = V + b * v_stride_b + h // G * v_stride_h

    rows = t0 + tl.arange(0, BLOCK_T)
    last_key = tl.zeros([BLOCK_T], tl.int32) + S - 1
    n_full, n_keys = S // BLOCK_S * BLOCK_S, S
    if CAUSAL:  # the last query sees the last key
        last_key = tl.minimum(last_key, S - T + rows)
        n_full = (S - T + t0 + 1) // BLOCK_S * BLOCK_S  # keys in tiles that all rows see whole
        n_keys = tl.minimum(S, S - T + t0 + BLOCK_T)

    if DESCRIPTORS:
        q_head = tl.make_tensor_descriptor(q_head, [T, D], [q_stride_t, 1], [BLOCK_T, BLOCK_D])
        k_head = tl.make_tensor_descriptor(k_head, [S, D], [k_stride_s, 1], [BLOCK_S, BLOCK_D])
        v_head = tl.make_tensor_descriptor(v_head, [S, D], [v_stride_s, 1], [BLOCK_S, BLOCK_D])
    q_tile = _load(q_head, q_stride_t, t0, T, D, BLOCK_D, BLOCK_T, True, DESCRIPTORS)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    if SPECIALIZED:  # the compiler splits one loop between its warps, not two
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

    o_head = OUT + b * o_stride_b + h * o_stride_h
    store_tile(o_head, o_stride_t, t0, T, acc / total[:, None], D, BLOCK_T, BLOCK_D)
    tl.store(LSE + (b * H + h) * T + rows, (m + tl.log2(total)) * LN_2, mask=rows < T)


@functools.cache
def _tuned(d_head: int, dtype: torch.dtype) -> triton.runtime.Autotuner:
    tune = triton.autotune(
        configs(d_head, dtype), key=["LENGTH", "CAUSAL", "DESCRIPTORS"], cache_results=True
    )
    return tune(flash_forward_kernel)


def takes_descriptors(*tensors: Tensor) -> bool:
    """Whether the copy engine can read q, k and v (B, T or S, heads, D) as they lie.

    From compute capability 9.0 on; addresses and strides must be multiples of 16 bytes. Only in 16
    bits, where the matrix instruction takes the tile from the shared memory that it arrives in.
    """
    q = tensors[0]
    if q.itemsize != 2 or (q.is_cuda and torch.cuda.get_device_capability(q.device) < (9, 0)):
        return False
    return all(
        x.data_ptr() % 16 == 0 and all(s * x.itemsize % 16 == 0 for s in x.stride()[:3])
        for x in tensors
    )


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    config: triton.Config | None = None, descriptors: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, T, H, D) and the log-sum-exp of each row's scaled scores, (B, H, T) in float32.

    q (B, T, H, D), k and v (B, S, K, D), the last dimension contiguous. scale above 0. For
    measurements, config: else the first of `configs`, or the best one for LONG queries and more;
    descriptors: else where `takes_descriptors` allows it.
    """
    B, T, H, D = q.shape
    S, K = k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    sizes = (T, S, H, H // K, scale * math.log2(math.e), triton.next_power_of_2(S))
    arguments = (q, k, v, out, lse, *strides, *sizes)
    constants = dict(CAUSAL=causal, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)))
    constants["DESCRIPTORS"] = takes_descriptors(q, k, v) and descriptors is not False
    if constants["DESCRIPTORS"]:  # each program keeps its descriptors in memory from here
        triton.set_allocator(functools.partial(_scratch, q.device))

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(T, meta["BLOCK_T"]) * B * H,)

    if q.is_cuda and T >= LONG and config is None:
        _tuned(D, q.dtype)[grid](*arguments, **constants)
    else:
        chosen = config or configs(D, q.dtype)[0]
        flash_forward_kernel[grid](*arguments, **constants, **chosen.all_kwargs())
    return out, lse


def _scratch(device: torch.device, size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device=device)
