"""Paged attention: ragged queries, and keys and values in blocks that a table lists.

Sources: Kwon et al. 2023 (PagedAttention), section 4.1; the split over keys is Flash-Decoding's
(`flash_decode.py`).

The queries are ragged: the new tokens of all sequences one after another, N in all. Some sequences
have one new token (decode), others hundreds (a prompt, or a chunk of one). The new tokens are the
last ones of their sequence, so new token i of T sees keys 0 … S - T + i. The host cuts the ragged
tokens into tiles that don't cross sequences, and gives each tile its sequence and its first token.
One program owns a tile for one key/value head; the G query heads that share it are rows of the
tile, so that each key is loaded once for all of them: row r is token r // G of the tile, head r % G
of the group.

Key s of a sequence lies in block table[s // P], slot s % P. That look-up is the only difference
from the other kernels: a tile of keys is a gather of rows. Each row is D numbers in one piece, so
little bandwidth is lost.

With n_parts > 1 each program takes one of n_parts equal shares of its sequence's keys, whole tiles,
and writes its part of the output with its log-sum-exp; the merge is that of `flash_decode.py`. A
short sequence has fewer tiles than parts: the parts past its end have log-sum-exp -inf and weigh
nothing. The share is worked out here from the sequence's own length, so that one launch, captured
for the longest that may come, cuts every sequence finely enough.

Pages may hold 8- or 4-bit numbers (`minillm.quantization.kv_cache`): a tile is then loaded as it is
stored and turned back in registers, so that memory gives only the small form.

The addresses of a tile's rows come from the table, one load before the other, which takes up
stages of the pipeline: five leave two tiles of keys on their way while a third is worked on.
Not yet timed on a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.flash_decode import merge, split

LN_2 = tl.constexpr(math.log(2))


def config(d_head: int, dtype: torch.dtype, n_rows: int) -> triton.Config:
    """Keys per tile, warps and stages, for tiles of that many rows.

    Four warps share 64 rows, the least that a group of them multiplies at once on Hopper: with
    eight, two groups would compute the same.
    """
    size, warps, stages = 64 if d_head <= 128 else 32, 4 if n_rows <= 64 else 8, 5
    if dtype == torch.float32:
        size, warps, stages = (16, 4, 2) if n_rows <= 16 else (size // 2, 8, 1)
    return triton.Config({"BLOCK_S": size}, num_warps=warps, num_stages=stages)


@triton.jit
def load_rows(
    PAGES, SCALES, rows, scale_rows, exist, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Rows of a page (BLOCK_S, BLOCK_D) in dtype; rows that don't exist are 0.

    With 4 bits byte j holds numbers 2j and 2j + 1, and columns beyond D are of no use to anyone.
    """
    present = exist[:, None] & (columns < D)[None, :]
    if BITS == 16:
        return tl.load(PAGES + rows[:, None] + columns[None, :], mask=present, other=0.0)
    elif BITS == 8:
        q = tl.load(PAGES + rows[:, None] + columns[None, :], mask=present, other=0)
        scale = tl.load(SCALES + scale_rows, mask=exist, other=0.0).to(tl.float32)
        return (q.to(tl.float32) * scale[:, None]).to(dtype)
    else:
        pairs = tl.arange(0, BLOCK_D // 2)
        present = exist[:, None] & (pairs < D // 2)[None, :]
        q = tl.load(PAGES + rows[:, None] + pairs[None, :], mask=present, other=0)
        scale = tl.load(SCALES + 2 * scale_rows, mask=exist, other=0.0).to(tl.float32)
        minimum = tl.load(SCALES + 2 * scale_rows + 1, mask=exist, other=0.0).to(tl.float32)
        x = tl.interleave((q & 15).to(tl.float32), (q >> 4).to(tl.float32))
        return (x * scale[:, None] + minimum[:, None]).to(dtype)


# What changes from step to step must not make another kernel necessary: Triton would compile one
# for each size that is 1 or a multiple of 16, and for each array that begins at a multiple of 16.
@triton.jit(
    do_not_specialize=["table_stride", "n_parts"],
    do_not_specialize_on_alignment=[
        "TABLES", "SEQ_LENS", "QUERY_LENS", "TILE_SEQUENCE", "TILE_TOKEN", "TILE_ROW"
    ],
)  # fmt: skip
def paged_kernel(
    Q, K, V, K_SCALES, V_SCALES, OUT, LSE, TABLES, SEQ_LENS, QUERY_LENS,
    TILE_SEQUENCE, TILE_TOKEN, TILE_ROW,
    q_stride_n, q_stride_h, k_stride_block, k_stride_slot, k_stride_h,
    v_stride_block, v_stride_slot, v_stride_h, table_stride,
    H, G, scale_log2, n_parts,
    P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one sequence and key/value head, for one tile of rows.

    A row is a pair of a new token and a query head that attends to these keys.
    """
    part, n_kv_heads = tl.program_id(0) % n_parts, H // G
    tile = tl.program_id(0) // n_parts // n_kv_heads
    kv_head = tl.program_id(0) // n_parts % n_kv_heads
    sequence, first = tl.load(TILE_SEQUENCE + tile), tl.load(TILE_TOKEN + tile)
    S, T = tl.load(SEQ_LENS + sequence), tl.load(QUERY_LENS + sequence)

    rows, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    t, h = first + rows // G, kv_head * G + rows % G  # t counts the sequence's new tokens
    n = (tl.load(TILE_ROW + tile) + rows // G).to(tl.int64)  # where the token is among all N
    rows_exist = (rows < BLOCK_R // G * G) & (t < T)
    exists = rows_exist[:, None] & (columns < D)[None, :]
    q_rows = Q + (n * q_stride_n + h * q_stride_h)[:, None]
    q_tile = tl.load(q_rows + columns[None, :], mask=exists, other=0.0)

    last_key = S - T + tl.minimum(t, T - 1)
    part_size = tl.cdiv(tl.cdiv(S, n_parts), BLOCK_S) * BLOCK_S
    begin = part * part_size
    seen = S - T + first + BLOCK_R // G  # keys that the tile's last row sees
    end = tl.minimum(tl.minimum(begin + part_size, S), seen)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for s0 in range(begin, end, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        entries = TABLES + sequence * table_stride + s // P
        block = tl.load(entries, mask=s < end, other=0).to(tl.int64)
        k_rows = block * k_stride_block + s % P * k_stride_slot + kv_head * k_stride_h
        scale_rows = (block * P + s % P) * n_kv_heads + kv_head
        k_tile = load_rows(
            K, K_SCALES, k_rows, scale_rows, s < end, columns, D, BLOCK_D, BITS, q_tile.dtype
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_R, BLOCK_S)
        visible = (s < end)[None, :] & (s[None, :] <= last_key[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
        # A row that has seen no key yet: -inf - -inf must not become NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights, rescale = tl.exp2(scores * scale_log2 - shift[:, None]), tl.exp2(m - shift)
        m, total = m_new, total * rescale + tl.sum(weights, 1)
        v_rows = block * v_stride_block + s % P * v_stride_slot + kv_head * v_stride_h
        v_tile = load_rows(
            V, V_SCALES, v_rows, scale_rows, s < end, columns, D, BLOCK_D, BITS, q_tile.dtype
        )
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")

    total = tl.where(m == float("-inf"), 1.0, total)
    row = (n * H + h) * n_parts + part  # OUT (N, H, n_parts, D), LSE (N, H, n_parts)
    out = (acc / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + row[:, None] * D + columns[None, :], out, mask=exists)
    tl.store(LSE + row, (m + tl.log2(total)) * LN_2, mask=rows_exist)


def rows_of_a_tile(longest_query: int, group: int, dtype: torch.dtype) -> int:
    """16 rows when the longest query fits into them, otherwise 64; never fewer than the group.

    In float32, which has no matrix instruction, more than 16 would not fit into the registers.
    """
    enough = longest_query * group <= 16 or dtype == torch.float32
    return max(16 if enough else 64, triton.next_power_of_2(group))


def tiles(query_lens: list[int], tokens_per_tile: int) -> tuple[list[int], list[int], list[int]]:
    """Three lists with one number per tile of queries.

    The tile's sequence, its first token within that sequence, and that token's row among all N.
    """
    sequence, token, row, start = [], [], [], 0
    for i, n in enumerate(query_lens):
        for first in range(0, n, tokens_per_tile):
            sequence.append(i)
            token.append(first)
            row.append(start + first)
        start += n
    return sequence, token, row


def paged_forward(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, seq_lens: Tensor,
    query_lens: Tensor, tile_arrays: Tensor, block_r: int, longest: int, scale: float,
    scales: tuple[Tensor, Tensor] | None = None, chosen: triton.Config | None = None,
) -> Tensor:  # fmt: skip
    """Attention (N, H, D) of ragged queries to keys and values in blocks.

    q (N, H, D), pages (n_blocks, P, K, D), tables (n_seqs, max_blocks) int32, seq_lens and
    query_lens (n_seqs,) int32, tile_arrays (3, n_tiles) int32 as `tiles` gives them for
    block_r // G tokens per tile. The last dimension of q and of the pages is contiguous. scale
    above 0.
    scales: of quantized pages, (n_blocks, P, K, 1) for int8 and (n_blocks, P, K, 2), scale and
    minimum, for two 4-bit numbers a byte; float16 and contiguous.
    longest: no sequence has more keys. The launch depends on this number and on shapes, never on
    what the tensors hold, so that a captured CUDA graph stays right. chosen: for measurements; else
    what `config` gives.
    """
    N, H, D = q.shape
    P, K = k_pages.shape[1:3]
    n_tiles = tile_arrays.shape[1]
    chosen = chosen or config(D, q.dtype, block_r)
    block_s = chosen.kwargs["BLOCK_S"]
    n_parts = split(triton.cdiv(longest, block_s), n_tiles * K, q.device)
    dtype = q.dtype if n_parts == 1 else torch.float32
    part_out = torch.empty(N, H, n_parts, D, dtype=dtype, device=q.device)
    part_lse = torch.empty(N, H, n_parts, dtype=torch.float32, device=q.device)
    bits = 16 if scales is None else 8 if k_pages.dtype == torch.int8 else 4
    paged_kernel[(n_tiles * K * n_parts,)](
        q, k_pages, v_pages, *(scales or (q, q)), part_out, part_lse,
        tables, seq_lens, query_lens, *tile_arrays,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], tables.stride(0),
        H, H // K, scale * math.log2(math.e), n_parts,
        P=P, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_R=block_r, BITS=bits,
        **chosen.all_kwargs(),
    )  # fmt: skip
    return part_out[:, :, 0] if n_parts == 1 else merge(part_out, part_lse, q.dtype)
