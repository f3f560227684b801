"""Paged attention: ragged queries, and keys and values in blocks that a table lists.

Sources: Kwon et al. 2023 (PagedAttention), section 4.1; the split over keys is Flash-Decoding's
(`flash_decode.py`).

The queries are ragged: the new tokens of all sequences one after another, N in all. Some sequences
have one new token (decode), others hundreds (a prompt, or a chunk of one). The new tokens are the
last ones of their sequence, so new token t of T sees keys 0 … S - T + t. The host cuts the ragged
tokens into tiles that don't cross sequences, and gives each tile its sequence and its first token.
One program owns a tile for one key/value head; the G query heads that share it are rows of the
tile, so that each key is loaded once for all of them (`_rows` has an example).

Key s of a sequence lies in block table[s // P], slot s % P. That look-up is the only difference
from the other kernels: a tile of keys is a gather of rows. Each row is D numbers in one piece, so
little bandwidth is lost.

With n_parts > 1 each program takes one of n_parts equal shares of its sequence's keys, in whole
tiles, and writes its part of the output with its log-sum-exp; the merge is that of
`flash_decode.py`. A short sequence has fewer tiles than parts: the parts past its end have
log-sum-exp -inf and weight 0. Each program computes its share from the sequence's own length, so a
launch captured for the longest possible sequence cuts every sequence finely enough.

Pages may hold 8- or 4-bit numbers (`minillm.quantization.kv_cache`): a tile is loaded as it is
stored and dequantized in registers, so that memory is read only in the small form.
Not yet timed on a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.flash_decode import merge, split
from minillm.kernels.online_softmax import no_keys_yet, output_and_lse, softmax_step
from minillm.kernels.tiles import which_tile
from minillm.kernels.tuning import dot_size, paged_config


@triton.jit
def _rows(first, first_row, kv_head, S, T, G, BLOCK_R: tl.constexpr):
    """(h, n, last_key, exist), each (BLOCK_R,): what the rows of a tile stand for.

    Row r is token r // G of the tile and head r % G of the group. t counts the sequence's new
    tokens, n those of all sequences; first and first_row are the tile's first token in each count.
    For example H 4, K 2, so G 2, and tiles of 4 rows (16 at least in the kernel); sequence A has 9
    tokens, 1 of them new, sequence B has 6, 3 of them new. For key/value head 1:

        sequence  tile  first  first_row  row  t  h  n  last_key
        A         0     0      0          0    0  2  0  8
                                          1    0  3  0  8
                                          2    1              t = T: does not exist; nor does row 3
        B         1     0      1          0    0  2  1  3     S - T + t = 6 - 3 + 0
                                          1    0  3  1  3
                                          2    1  2  2  4
                                          3    1  3  2  4
        B         2     2      3          0    2  2  3  5
                                          1    2  3  3  5
                                          2    3              t = T: does not exist; nor does row 3

    Tile 1 sees keys 0 … 4, tile 2 keys 0 … 5. With P 4 key 5 of B lies in block table[5 // 4], slot
    5 % 4.
    """
    rows = tl.arange(0, BLOCK_R)
    t, h = first + rows // G, kv_head * G + rows % G
    n = (first_row + rows // G).to(tl.int64)
    # A group that does not divide the tile leaves rows over at its end.
    exist = (rows < BLOCK_R // G * G) & (t < T)
    return h, n, S - T + tl.minimum(t, T - 1), exist


@triton.jit
def load_rows(
    PAGES, SCALES, rows, scale_rows, exist, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Rows of pages, dequantized: (BLOCK_S, BLOCK_D) in dtype; rows that don't exist are 0.

    8 bits: x = scale · q. 4 bits: x = scale · q + minimum, and byte j of a row holds number 2j in
    its low half and number 2j + 1 in its high half. Columns beyond D then hold the minimum, which
    does no harm: the query is 0 there, and the output is not stored there.
    """
    present = exist[:, None] & (columns < D)[None, :]
    if BITS == 16:
        return tl.load(PAGES + rows[:, None] + columns[None, :], mask=present, other=0.0)
    elif BITS == 8:
        q = tl.load(PAGES + rows[:, None] + columns[None, :], mask=present, other=0)
        scale = tl.load(SCALES + scale_rows, mask=exist, other=0.0).to(tl.float32)
        return (q.to(tl.float32) * scale[:, None]).to(dtype)
    else:
        pairs = tl.arange(0, BLOCK_D // 2)  # the bytes of a row
        present = exist[:, None] & (pairs < D // 2)[None, :]
        q = tl.load(PAGES + rows[:, None] + pairs[None, :], mask=present, other=0)
        # SCALES (n_blocks, P, K, 2): a row's scale and its minimum
        scale = tl.load(SCALES + 2 * scale_rows, mask=exist, other=0.0).to(tl.float32)
        minimum = tl.load(SCALES + 2 * scale_rows + 1, mask=exist, other=0.0).to(tl.float32)
        x = tl.interleave((q & 15).to(tl.float32), (q >> 4).to(tl.float32))
        return (x * scale[:, None] + minimum[:, None]).to(dtype)


# What changes from step to step must not need another compilation: by itself Triton compiles a
# kernel for sizes that are 1 or a multiple of 16, and for arrays at a multiple of 16 bytes.
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
    n_kv_heads = H // G
    # The part of the keys varies fastest, then the head, then the tile of queries.
    part, kv_head, tile = which_tile(n_parts, n_kv_heads)
    sequence, first = tl.load(TILE_SEQUENCE + tile), tl.load(TILE_TOKEN + tile)
    first_row = tl.load(TILE_ROW + tile)
    S, T = tl.load(SEQ_LENS + sequence), tl.load(QUERY_LENS + sequence)

    h, n, last_key, rows_exist = _rows(first, first_row, kv_head, S, T, G, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    exists = rows_exist[:, None] & (columns < D)[None, :]
    q_rows = Q + (n * q_stride_n + h * q_stride_h)[:, None]
    q_tile = tl.load(q_rows + columns[None, :], mask=exists, other=0.0)  # (BLOCK_R, BLOCK_D)

    part_size = tl.cdiv(tl.cdiv(S, n_parts), BLOCK_S) * BLOCK_S  # whole tiles of keys
    begin = part * part_size
    seen = S - T + first + BLOCK_R // G  # keys that the tile's last token sees
    end = tl.minimum(tl.minimum(begin + part_size, S), seen)
    acc, m, total = no_keys_yet(BLOCK_R, BLOCK_D)
    for s0 in range(begin, end, BLOCK_S):
        # Where the keys lie: block table[s // P], slot s % P.
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
        # All keys of this part may lie in a row's future.
        weights, rescale, m, total = softmax_step(scores, m, total, scale_log2, True)
        v_rows = block * v_stride_block + s % P * v_stride_slot + kv_head * v_stride_h
        v_tile = load_rows(
            V, V_SCALES, v_rows, scale_rows, s < end, columns, D, BLOCK_D, BITS, q_tile.dtype
        )
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")

    out, lse = output_and_lse(acc, m, total, True)
    row = (n * H + h) * n_parts + part  # OUT (N, H, n_parts, D), LSE (N, H, n_parts)
    out = out.to(OUT.dtype.element_ty)
    tl.store(OUT + row[:, None] * D + columns[None, :], out, mask=exists)
    tl.store(LSE + row, lse, mask=rows_exist)


def rows_of_a_tile(longest_query: int, group: int, dtype: torch.dtype) -> int:
    """16 rows if the longest query fits into them, otherwise 64; never fewer than the group.

    float32 has no matrix instruction, and more than 16 rows would not fit into the registers.
    """
    enough = longest_query * group <= 16 or dtype == torch.float32
    return max(16 if enough else 64, triton.next_power_of_2(group))


def tiles(query_lens: list[int], tokens_per_tile: int) -> tuple[list[int], list[int], list[int]]:
    """Three lists with one number for each tile of queries.

    The tile's sequence, its first token within that sequence, and that token's row among all N.
    The example of `_rows` is tiles([1, 3], 2) = [0, 1, 1], [0, 0, 2], [0, 1, 3].
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
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attention (N, H, D) of ragged queries to keys and values in blocks.

    q (N, H, D), pages (n_blocks, P, K, D), tables (n_seqs, max_blocks) int32, seq_lens and
    query_lens (n_seqs,) int32, tile_arrays (3, n_tiles) int32 as `tiles` gives them for
    block_r // G tokens per tile. The last dimension of q and of the pages is contiguous. scale
    above 0.
    scales: for quantized pages, float16 and contiguous: (n_blocks, P, K, 1) for int8, and
    (n_blocks, P, K, 2), scale and minimum, for two 4-bit numbers a byte.
    longest: no sequence has more keys. The launch depends on this number and on shapes, never on
    what the tensors hold, so that a captured CUDA graph stays valid.
    """
    N, H, D = q.shape
    P, K = k_pages.shape[1:3]
    n_tiles = tile_arrays.shape[1]
    chosen = paged_config(D, q.dtype, block_r)
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
        P=P, D=D, BLOCK_D=dot_size(D), BLOCK_R=block_r, BITS=bits,
        **chosen.all_kwargs(),
    )  # fmt: skip
    return part_out[:, :, 0] if n_parts == 1 else merge(part_out, part_lse, q.dtype)
