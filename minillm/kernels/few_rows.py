"""A few rows times a matrix: y = x Wᵀ for up to 64 rows, W in 16, 8 or 4 bits.

Decode multiplies one row for each sequence by every matrix of the model. The bound is memory: W is
read once, N · K numbers, with hardly any arithmetic for each. So the time is set by the bytes that
a number of W takes, and W is dequantized in registers, on its way into the matrix instruction:

    16 bits   as stored
    8 bits    w = scale · q, one scale a row (LLM.int8(), Dettmers et al. 2022, section 3.1); q is a
              whole number or an 8-bit float, which needs compute capability 8.9
    4 bits    w = scale · (q - 8) + zero, with a scale and a zero for each group of numbers in a
              row; two numbers a byte

In 8 bits the scale leaves the sum: Σ_k scale · q_k · x_k = scale · Σ_k q_k · x_k, and whole numbers
up to 127 are exact in 16-bit floats, so the instruction multiplies exactly what is stored. In 4
bits each w is rounded to the dtype of x first: then one accumulator takes all groups.

Cost in 4 bits, for groups of 32: a step of 64 rows and 256 columns reads 10,240 bytes of q, scale
and zero and takes each of four warps 628 instructions, counted in the code that Triton 3.7.1
compiles for compute capability 9.0. A multiprocessor has four schedulers, one instruction a cycle
each: 16.3 bytes a cycle. The memory of an H100 gives it 3.35 TB/s / 132 / 1.98 GHz = 12.8, that of
an H200 (4.8 TB/s) 18.4.

A tile of W has 64 rows, and few matrices have enough of them to occupy all processors. So the K
columns are cut into parts with programs of their own (split-K), and a second kernel adds the parts
in a fixed order: two runs give equal bits. W is the left operand of the product, because the left
one needs 64 rows and the right one only 16 columns.
Not yet timed on a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.tuning import dot_size

MAX_ROWS = 64
"""The most rows of x: one tile takes them all."""
BLOCK_N = 64
BITS_OF_128 = tl.constexpr(0x4300)  # in bfloat16
BITS_OF_1024 = tl.constexpr(0x6400)  # in float16
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
def _minus_8(q, dtype: tl.constexpr):
    """q - 8 in dtype, for q from 0 to 15 in 8 bits.

    A GPU converts whole numbers slowly. But the last bit of 128 counts 1 in bfloat16, so the bits
    of 128 with q in place of their zeros are the number 128 + q; likewise 1024 in float16.
    """
    if dtype == tl.bfloat16:
        return (q.to(tl.int16) | BITS_OF_128).to(dtype, bitcast=True) - (128 + 8)
    elif dtype == tl.float16:
        return (q.to(tl.int16) | BITS_OF_1024).to(dtype, bitcast=True) - (1024 + 8)
    else:
        return q.to(dtype) - 8


@triton.jit
def _add_blocks(
    acc, X, W, SCALE, ZERO, step, m, n, M, N, K, n_groups,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add the BLOCK_K columns of W of one step, in 4 bits, to acc (BLOCK_N, BLOCK_M).

    A row of W lies in blocks of 32 numbers, 16 bytes each, in the order of GGUF's Q4_0 and Q4_1:

        byte j of a block   7 6 5 4 | 3 2 1 0      for example 0xA3: q_j = 3, q_j+16 = 10
                             q_j+16 | q_j

        bytes               0 …  15 | 16 … 31 | …
        low halves          0 …  15 | 32 … 47 | …  the columns of W that they hold, and so the rows
        high halves        16 …  31 | 48 … 63 | …  of x that they meet: 16 side by side, one copy

    A tile of bytes is two tiles of W. In registers each number becomes scale · (q - 8) + zero,
    rounded to the dtype of x, and all steps add to one acc.
    """
    byte = tl.arange(0, BLOCK_K // 2)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]  # past the end the last row, without a mask
    w = W + row * (K // 32 * 16) + (step * (BLOCK_K // 2) + byte)[None, :]
    q = tl.load(w)  # (BLOCK_N, BLOCK_K / 2) bytes
    group = row * n_groups + (step * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP))[None, :]
    scale = _for_each_byte(tl.load(SCALE + group), GROUP)  # (BLOCK_N, BLOCK_K / 2)
    zero = _for_each_byte(tl.load(ZERO + group), GROUP)
    k = step * BLOCK_K + byte // 16 * 32 + byte % 16  # the column in the byte's low half
    x = X + m[None, :] * K + k[:, None]
    x_low = tl.load(x, mask=m[None, :] < M, other=0.0)  # (BLOCK_K / 2, BLOCK_M)
    x_high = tl.load(x + 16, mask=m[None, :] < M, other=0.0)
    w_low = _minus_8(q & 15, x_low.dtype) * scale + zero  # (BLOCK_N, BLOCK_K / 2)
    w_high = _minus_8(q >> 4, x_low.dtype) * scale + zero
    acc = tl.dot(w_low, x_low, acc, input_precision="ieee")
    return tl.dot(w_high, x_high, acc, input_precision="ieee")


@triton.jit
def _for_each_byte(of_groups, GROUP: tl.constexpr):
    """One number for each group (rows, groups) to one for each of its bytes."""
    repeated = tl.broadcast_to(
        of_groups[:, :, None], [of_groups.shape[0], of_groups.shape[1], GROUP // 2]
    )
    return repeated.reshape(of_groups.shape[0], of_groups.shape[1] * (GROUP // 2))


@triton.jit(do_not_specialize=["M", "n_parts"])
def few_rows_kernel(
    X, W, SCALE, ZERO, PARTS, M, N, K, n_groups, n_parts,
    BITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One part of the columns of BLOCK_N rows of W, for all M rows of x.

    PARTS is (n_parts, M, N). In 4 bits SCALE and ZERO are (N, n_groups), and BLOCK_K divides K.
    """
    part, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    n_steps = tl.cdiv(K, BLOCK_K)
    part_size = tl.cdiv(n_steps, n_parts)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # W xᵀ: the transpose of y
    for step in range(part * part_size, tl.minimum(n_steps, (part + 1) * part_size)):
        if BITS == 4:
            acc = _add_blocks(
                acc, X, W, SCALE, ZERO, step, m, n, M, N, K, n_groups, BLOCK_N, BLOCK_K, GROUP
            )
        else:
            acc = _add_columns(acc, X, W, step * BLOCK_K, m, n, M, N, K, BLOCK_K)
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
    numbers a byte as `grid.pack_blocks` orders them, with scale and zero (N, K / group) in the
    dtype of x, for groups of 32, 64 or 128.
    n_parts: for measurements; otherwise enough for two programs on each multiprocessor.
    """
    (M, K), N = x.shape, weight.shape[0]
    bits = 16 if scale is None else 4 if zero is not None else 8
    n_groups = scale.shape[1] if bits == 4 else 1
    block_k = _columns(M, K) if bits == 4 else 128
    n_tiles = triton.cdiv(N, BLOCK_N)
    n_parts = n_parts or _split(n_tiles, K // block_k, x.device)
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    parts = out if n_parts == 1 else torch.empty(n_parts, M, N, device=x.device)
    few_rows_kernel[(n_parts, n_tiles)](
        x, weight, x if scale is None else scale, x if zero is None else zero, parts,
        M, N, K, n_groups, n_parts,
        BITS=bits, GROUP=K // n_groups, BLOCK_M=dot_size(M), BLOCK_N=BLOCK_N, BLOCK_K=block_k,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    if n_parts > 1:
        add_parts_kernel[(triton.cdiv(M * N, 1024),)](parts, out, M * N, n_parts, BLOCK=1024)
    return out


def _columns(M: int, K: int) -> int:
    """The columns of a step in 4 bits: whole groups that divide K, so that none needs a mask.

    256, or the largest power of two below; for more than 32 rows x leaves room for 128. A copy
    ahead has 4 bytes a thread at least, so scale and zero take part from four groups a step on.
    """
    return math.gcd(K, 256 if M <= 32 else 128)


def _split(n_tiles: int, most: int, device: torch.device) -> int:
    """The number of parts: about two programs per multiprocessor, and at most one for each tile."""
    wanted = _CPU_PARTS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = 2 * processors // n_tiles
    return max(1, min(wanted, most))
