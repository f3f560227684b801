"""A few rows times a matrix: y = x Wᵀ for up to 64 rows, W in 16, 8 or 4 bits.

Decode multiplies one row for each sequence by every matrix of the model. The bound is memory: W is
read once, N · K numbers, with hardly any arithmetic for each. So the time is set by the bytes that
a number of W takes, and W is dequantized in registers, on its way into the matrix instruction:

    16 bits   as stored
    8 bits    w = scale · q, one scale a row (LLM.int8(), Dettmers et al. 2022, section 3.1); q is a
              whole number or an 8-bit float, which needs compute capability 8.9
    4 bits    w = scale · (q - 8) + zero, with a scale and a zero for each group of numbers in a
              row; two numbers a byte

Scales leave the sums: Σ_k scale · q_k · x_k = scale · Σ_k q_k · x_k (for 4 bits see `_add_group`).
Whole numbers up to 127 are exact in 16-bit floats, so the instruction multiplies exactly what is
stored.

A tile of W has 64 rows, and few matrices have enough of them to occupy all processors. So the K
columns are cut into parts with programs of their own (split-K), and a second kernel adds the parts
in a fixed order: two runs give equal bits. W is the left operand of the product, because the left
one needs 64 rows and the right one only 16 columns.
Not yet timed on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.tuning import dot_size

MAX_ROWS = 64
"""The most rows of x: one tile takes them all."""
BLOCK_N = 64
_CPU_PARTS = 3  # in the interpreter, so that several parts are tested there as well


@triton.jit
def _add_columns(acc, X, W, k0, m, n, M, N, K, BLOCK_K: tl.constexpr):
    """Add the columns k0 … k0 + BLOCK_K - 1 of W, in 16 or 8 bits, to acc (BLOCK_N, BLOCK_M)."""
    k = k0 + tl.arange(0, BLOCK_K)
    w = W + n.to(tl.int64)[:, None] * K + k[None, :]  # (BLOCK_N, BLOCK_K)
    w_tile = tl.load(w, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
    x = X + m[None, :] * K + k[:, None]  # (BLOCK_K, BLOCK_M)
    x_tile = tl.load(x, mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
    return tl.dot(w_tile.to(x_tile.dtype), x_tile, acc, input_precision="ieee")


@triton.jit
def _add_group(acc, X, W, SCALE, ZERO, k0, m, n, M, N, K, BLOCK_K: tl.constexpr):
    """Add the group of columns that starts at k0, in 4 bits, to acc (BLOCK_N, BLOCK_M).

    A row of W and a row of x, over the BLOCK_K columns k of the group:

        Σ_k w_k · x_k = Σ_k (scale · (q_k - 8) + zero) · x_k
                      = scale · Σ_k (q_k - 8) · x_k + zero · Σ_k x_k
        Σ_k (q_k - 8) · x_k = Σ_j (q_2j - 8) · x_2j + Σ_j (q_2j+1 - 8) · x_2j+1

    The last line, because a byte holds two numbers side by side, while a tile has one number in
    each place: the low halves meet the even rows of x, the high halves the odd ones.

        byte j     7 6 5 4 | 3 2 1 0        for example 0xA3: q_2j = 3, q_2j+1 = 10
                    q_2j+1 | q_2j
                      high | low
    """
    pair = tl.arange(0, BLOCK_K // 2)
    w = W + n.to(tl.int64)[:, None] * (K // 2) + (k0 // 2 + pair)[None, :]
    q = tl.load(w, mask=n[:, None] < N, other=0)  # (BLOCK_N, BLOCK_K / 2) bytes
    x = X + m[None, :] * K + (k0 + 2 * pair)[:, None]
    even = tl.load(x, mask=m[None, :] < M, other=0.0)  # (BLOCK_K / 2, BLOCK_M)
    odd = tl.load(x + 1, mask=m[None, :] < M, other=0.0)  # (BLOCK_K / 2, BLOCK_M)
    low, high = (q & 15).to(even.dtype) - 8, (q >> 4).to(even.dtype) - 8
    sums = tl.dot(low, even, input_precision="ieee")  # (BLOCK_N, BLOCK_M)
    sums = tl.dot(high, odd, sums, input_precision="ieee")
    group = n.to(tl.int64) * (K // BLOCK_K) + k0 // BLOCK_K  # SCALE and ZERO (N, K / BLOCK_K)
    scale = tl.load(SCALE + group, mask=n < N, other=0.0).to(tl.float32)
    zero = tl.load(ZERO + group, mask=n < N, other=0.0).to(tl.float32)
    x_sum = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 0)  # (BLOCK_M,)
    return acc + (sums * scale[:, None] + zero[:, None] * x_sum[None, :])


@triton.jit(do_not_specialize=["M", "n_parts"])
def few_rows_kernel(
    X, W, SCALE, ZERO, PARTS, M, N, K, n_parts,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One part of the columns of BLOCK_N rows of W, for all M rows of x.

    With 4 bits a tile's columns are one group. PARTS is (n_parts, M, N).
    """
    part, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    part_size = tl.cdiv(tl.cdiv(K, n_parts), BLOCK_K) * BLOCK_K  # whole tiles of columns
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # W xᵀ: the transpose of y
    for k0 in range(part * part_size, tl.minimum(K, (part + 1) * part_size), BLOCK_K):
        if BITS == 4:
            acc = _add_group(acc, X, W, SCALE, ZERO, k0, m, n, M, N, K, BLOCK_K)
        else:
            acc = _add_columns(acc, X, W, k0, m, n, M, N, K, BLOCK_K)
    if BITS == 8:
        acc *= tl.load(SCALE + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = PARTS + (part * M + m).to(tl.int64)[None, :] * N + n[:, None]
    exist = (m[None, :] < M) & (n[:, None] < N)
    tl.store(out, acc.to(PARTS.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=["n_parts"])
def add_parts_kernel(PARTS, OUT, n, n_parts, BLOCK: tl.constexpr):
    """OUT (n numbers) = the sum of PARTS (n_parts, n), from the first part to the last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(n_parts):
        total += tl.load(PARTS + part * n + at, mask=at < n, other=0.0)
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=at < n)


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    n_parts: int | None = None,
) -> Tensor:
    """x (M, K) times Wᵀ, (M, N) in the dtype of x; M from 1 to MAX_ROWS, all inputs contiguous.

    weight: (N, K) in the dtype of x; or int8 (N, K) with scale (N,); or uint8 (N, K / 2), two
    numbers a byte, with scale and zero (N, K / group), for groups of 32, 64 or 128.
    n_parts: for measurements; otherwise enough for two programs on each multiprocessor.
    """
    (M, K), N = x.shape, weight.shape[0]
    bits = 16 if scale is None else 4 if zero is not None else 8
    block_k = 128 if scale is None or zero is None else K // scale.shape[1]
    n_tiles = triton.cdiv(N, BLOCK_N)
    n_parts = n_parts or _split(n_tiles, K // block_k, x.device)
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    parts = out if n_parts == 1 else torch.empty(n_parts, M, N, device=x.device)
    few_rows_kernel[(n_parts, n_tiles)](
        x, weight, x if scale is None else scale, x if zero is None else zero, parts,
        M, N, K, n_parts,
        BITS=bits, BLOCK_M=dot_size(M), BLOCK_N=BLOCK_N, BLOCK_K=block_k,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    if n_parts > 1:
        add_parts_kernel[(triton.cdiv(M * N, 1024),)](parts, out, M * N, n_parts, BLOCK=1024)
    return out


def _split(n_tiles: int, most: int, device: torch.device) -> int:
    """The number of parts: about two programs per multiprocessor, and at most one for each tile."""
    wanted = _CPU_PARTS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = 2 * processors // n_tiles
    return max(1, min(wanted, most))
