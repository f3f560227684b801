"""The operations between two matrix products: one kernel where PyTorch launches two to six.

Each computes what `minillm.layers.per_token` defines in PyTorch. It pays in decode: with one token
a kernel moves a few kilobytes, and starting it takes longer than its work.

    add_rms_norm     the residual stream with its update, and its norm
    silu_mul         SwiGLU's product
    rope_and_write   q rotated; k rotated and written to its slot of the cache; v written

All sums are in float32. Where PyTorch rounds between two operations and a kernel does not, the
kernel's result is the more exact one.
Not here: gradients. `Decoder` uses these kernels only where none are recorded.
Not yet timed on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def add_rms_norm_kernel(
    X, UPDATE, WEIGHT, SUM, NORMED, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One row of C numbers: x = x + update; x / sqrt(mean(x²) + eps) * weight."""
    row, columns = tl.program_id(0).to(tl.int64) * C, tl.arange(0, BLOCK_C)
    exist = columns < C
    x = tl.load(X + row + columns, mask=exist, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(UPDATE + row + columns, mask=exist, other=0.0).to(tl.float32)
        rounded = x.to(SUM.dtype.element_ty)
        tl.store(SUM + row + columns, rounded, mask=exist)
        x = rounded.to(tl.float32)  # the norm is that of what is stored
    weight = tl.load(WEIGHT + columns, mask=exist, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps) * weight
    tl.store(NORMED + row + columns, normed.to(NORMED.dtype.element_ty), mask=exist)


def add_rms_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum x + update and its norm, both (…, C). Without an update the sum is x itself."""
    x = x.contiguous()
    update = x if update is None else update.contiguous()
    total = x if update is x else torch.empty_like(x)
    normed, C = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(C)
    add_rms_norm_kernel[(x.numel() // C,)](
        x, update, weight, total, normed, eps,
        C=C, BLOCK_C=block, ADD=total is not x, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return total, normed


@triton.jit
def silu_mul_kernel(GATE_UP, OUT, F, BLOCK: tl.constexpr):
    """One piece of a row: F.silu(gate) * up, for gate and up side by side in a row of 2F."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exist = columns < F
    # GATE_UP (rows, 2F): F numbers of the gate, then F of up
    gate = tl.load(GATE_UP + row * 2 * F + columns, mask=exist, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * F + F + columns, mask=exist, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(OUT + row * F + columns, product.to(OUT.dtype.element_ty), mask=exist)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up of (…, 2F); returns (…, F)."""
    gate_up, F = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], F)
    silu_mul_kernel[(out.numel() // F, triton.cdiv(F, BLOCK))](gate_up, out, F, BLOCK=BLOCK)
    return out


@triton.jit
def rope_and_write_kernel(
    QK, V, COS, SIN, Q_OUT, K_PAGES, V_PAGES, BLOCKS, OFFSETS,
    qk_stride_n, qk_stride_h, v_stride_n, v_stride_h, k_stride_block, k_stride_slot, k_stride_h,
    v_stride_block, v_stride_slot, v_page_stride_h,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One head of one token: x * cos + x.roll(D / 2) * sin for q and k; pages[block, slot] = k, v.

    Heads 0 … H - 1 are those of q, the next K those of k, the last K those of v.
    """
    # One program for each head of each token: the head varies fastest.
    n = (tl.program_id(0) // (H + 2 * K)).to(tl.int64)
    head, d = tl.program_id(0) % (H + 2 * K), tl.arange(0, BLOCK_D)
    exist = d < D
    block, slot = tl.load(BLOCKS + n).to(tl.int64), tl.load(OFFSETS + n).to(tl.int64)
    if head < H + K:
        row = QK + n * qk_stride_n + head * qk_stride_h
        x = tl.load(row + d, mask=exist, other=0.0).to(tl.float32)
        # The sign of the roll is in SIN, whose first half is negative.
        other = tl.load(row + (d + D // 2) % D, mask=exist, other=0.0).to(tl.float32)
        cos = tl.load(COS + n * D + d, mask=exist, other=0.0).to(tl.float32)
        sin = tl.load(SIN + n * D + d, mask=exist, other=0.0).to(tl.float32)
        rotated = (x * cos + other * sin).to(Q_OUT.dtype.element_ty)
        if head < H:
            tl.store(Q_OUT + (n * H + head) * D + d, rotated, mask=exist)
        else:
            page = K_PAGES + block * k_stride_block + slot * k_stride_slot
            tl.store(page + (head - H) * k_stride_h + d, rotated, mask=exist)
    else:
        v = tl.load(V + n * v_stride_n + (head - H - K) * v_stride_h + d, mask=exist, other=0.0)
        page = V_PAGES + block * v_stride_block + slot * v_stride_slot
        tl.store(page + (head - H - K) * v_page_stride_h + d, v, mask=exist)


def rope_and_write(
    qk: Tensor, v: Tensor, rope: tuple[Tensor, Tensor], slots: tuple[Tensor, ...]
) -> Tensor:
    """Rotate q and k, store k and v in the cache's slots; returns q (1, N, H, D).

    qk (1, N, H + K, D), v (1, N, K, D), the last dimension of both contiguous. rope: cos and sin
    (N, 1, D). slots: the pages of keys and of values (n_blocks, P, K, D), and the block of each
    token and its offset in that block, (N,) each.
    """
    k_pages, v_pages, blocks, offsets = slots
    N, K, D = v.shape[1:]
    H = qk.shape[2] - K
    q = qk.new_empty(1, N, H, D)
    rope_and_write_kernel[(N * (H + 2 * K),)](
        qk, v, *rope, q, k_pages, v_pages, blocks, offsets,
        *qk.stride()[1:3], *v.stride()[1:3], *k_pages.stride()[:3], *v_pages.stride()[:3],
        H=H, K=K, D=D, BLOCK_D=triton.next_power_of_2(D), num_warps=1,
    )  # fmt: skip
    return q
