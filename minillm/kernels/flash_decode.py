"""Flash-Decoding: a few queries attend to a long cache, whose keys are cut into parallel parts.

Sources: Dao, Haziza, Massa and Sizov 2023 (Flash-Decoding for long-context inference); Milakov and
Gimelshein 2018, whose online softmax also merges the parts.

In decode there is one query per sequence. The forward kernel would start B · H programs, each
walking the whole cache: with B = 1 and H = 32, three quarters of an H100's 132 processors would
idle. So the S keys are cut into n_parts, each with programs of its own. Part p returns for every
query its own output and log-sum-exp,

    O_p = Σ_{s in p} exp(score_s - LSE_p) v_s        LSE_p = log Σ_{s in p} exp(score_s)

and the second kernel adds them up: O = Σ_p exp(LSE_p - LSE) O_p with LSE = log Σ_p exp(LSE_p).

The bound is memory: each key and value is read once, for 2 · G FLOPs per number and query. To read
it only once, the G query heads that share a key/value head are rows of one tile, for each of the T
queries: row r is query r // G, head r % G of the group. A matrix instruction needs 16 rows; where
memory is the bound, padding rows cost no time.
Not yet timed on a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.online_softmax import no_keys_yet, output_and_lse, softmax_step
from minillm.kernels.tiles import load_tile, which_tile
from minillm.kernels.tuning import decode_config, dot_size

MAX_ROWS = 32
"""The most rows T * G that one tile takes."""
_MAX_PARTS = 128
_CPU_PARTS = 4  # in the interpreter, so that several parts are tested there as well

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["T", "S", "n_parts"])
def part_kernel(
    Q, K, V, PART_O, PART_LSE,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h,
    T, S, H, G, scale_log2, n_parts,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one key/value head, for all T * G rows that attend to it.

    The part is keys part * part_size … (part + 1) * part_size - 1; the last parts may be empty.
    """
    part, kv_head, b = which_tile(n_parts, H // G)  # a part of the keys stands for a tile
    k_head = K + b * k_stride_b + kv_head * k_stride_h
    v_head = V + b * v_stride_b + kv_head * v_stride_h

    # The rows of the tile: T queries of G heads, then padding.
    rows, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    t, h = rows // G, kv_head * G + rows % G
    q_rows = Q + b * q_stride_b + t.to(tl.int64) * q_stride_t + h * q_stride_h
    exists = (rows < T * G)[:, None] & (columns < D)[None, :]
    q_tile = tl.load(q_rows[:, None] + columns[None, :], mask=exists, other=0.0)

    part_size = tl.cdiv(tl.cdiv(S, n_parts), BLOCK_S) * BLOCK_S  # whole tiles of keys
    end = tl.minimum(S, (part + 1) * part_size)
    last_key = tl.zeros([BLOCK_R], tl.int32) + end - 1
    if CAUSAL:
        last_key = tl.minimum(last_key, S - T + t)
    acc, m, total = no_keys_yet(BLOCK_R, BLOCK_D)
    for s0 in range(part * part_size, end, BLOCK_S):
        k_tile = load_tile(k_head, k_stride_s, s0, end, D, BLOCK_S, BLOCK_D, True)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_R, BLOCK_S)
        visible = s0 + tl.arange(0, BLOCK_S)[None, :] <= last_key[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        # Causal: all keys of this part may lie in a row's future.
        weights, rescale, m, total = softmax_step(scores, m, total, scale_log2, True)
        v_tile = load_tile(v_head, v_stride_s, s0, end, D, BLOCK_S, BLOCK_D, True)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")

    # PART_O (B, T, H, n_parts, D), PART_LSE (B, T, H, n_parts)
    out, lse = output_and_lse(acc, m, total, True)
    row = ((b * T + t) * H + h) * n_parts + part
    tl.store(PART_O + row[:, None] * D + columns[None, :], out, mask=exists)
    tl.store(PART_LSE + row, lse, mask=rows < T * G)


@triton.jit(do_not_specialize=["n_parts"])
def merge_kernel(
    PART_O, PART_LSE, OUT, n_parts,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query of one head: O = Σ_p exp(LSE_p - LSE) O_p."""
    row = tl.program_id(0).to(tl.int64)
    parts, columns = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_D)
    lse = tl.load(PART_LSE + row * n_parts + parts, mask=parts < n_parts, other=float("-inf"))
    # exp(LSE_p - the largest), divided by its sum at the end. At least one part has seen a key.
    weights = tl.exp2((lse - tl.max(lse, 0)) * LOG2_E)
    exists = (parts < n_parts)[:, None] & (columns < D)[None, :]
    addresses = PART_O + (row * n_parts + parts)[:, None] * D + columns[None, :]
    part_o = tl.load(addresses, mask=exists, other=0.0)  # (BLOCK_PARTS, BLOCK_D)
    out = tl.sum(part_o * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(OUT + row * D + columns, out.to(OUT.dtype.element_ty), mask=columns < D)


def split(n_tiles: int, n_programs: int, device: torch.device) -> int:
    """The number of parts to cut the keys into: about two programs per multiprocessor of the GPU.

    n_tiles: tiles of keys of the longest sequence. n_programs: the number of programs with a single
    part. No part of the longest sequence is empty.
    """
    wanted = _CPU_PARTS
    if device.type == "cuda":
        wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // n_programs
    n_parts = max(1, min(wanted, _MAX_PARTS))
    # Parts have whole tiles, so fewer of them may hold all: 9 tiles in 4 parts are 3, 3, 3 and 0.
    return triton.cdiv(n_tiles, triton.cdiv(n_tiles, n_parts))


def merge(part_o: Tensor, part_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole output (…, D) in `dtype`, from the outputs and the log-sum-exps of the parts.

    part_o (…, n_parts, D), part_lse (…, n_parts), both contiguous.
    """
    *rows, n_parts, D = part_o.shape
    out = torch.empty(*rows, D, dtype=dtype, device=part_o.device)
    block_d, block_parts = dot_size(D), triton.next_power_of_2(n_parts)
    warps = 4 if block_parts * block_d <= 16384 else 8
    merge_kernel[(part_lse.numel() // n_parts,)](
        part_o, part_lse, out, n_parts,
        D=D, BLOCK_D=block_d, BLOCK_PARTS=block_parts, num_warps=warps,
    )  # fmt: skip
    return out


def flash_decode(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, n_parts: int | None = None
) -> Tensor:
    """Attention (B, T, H, D) of few queries, with the keys in parts.

    q (B, T, H, D) with T * H/K at most MAX_ROWS, k and v (B, S, K, D), the last dimension
    contiguous. scale above 0. n_parts: for measurements; otherwise what `split` gives.
    """
    B, T, H, D = q.shape
    S, K = k.shape[1:3]
    block_r = dot_size(T * H // K)
    chosen = decode_config(D, q.dtype, block_r)
    block_s = chosen.kwargs["BLOCK_S"]
    n_parts = n_parts or split(triton.cdiv(S, block_s), B * K, q.device)
    part_o = torch.empty(B, T, H, n_parts, D, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(B, T, H, n_parts, dtype=torch.float32, device=q.device)
    part_kernel[(B * K * n_parts,)](
        q, k, v, part_o, part_lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        T, S, H, H // K, scale * math.log2(math.e), n_parts,
        CAUSAL=causal, D=D, BLOCK_D=dot_size(D), BLOCK_R=block_r, **chosen.all_kwargs(),
    )  # fmt: skip
    return merge(part_o, part_lse, q.dtype)
