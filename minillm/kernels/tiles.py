"""What the kernels share: which tile a program owns, the keys it sees, loading it, storing it.

A tile is BLOCK_ROWS rows of D numbers, starting at row `first`. Rows that do not exist and the
columns that pad D to a power of two are read as 0 and not written.
"""

import triton
import triton.language as tl


@triton.jit
def which_tile(n_tiles, n_heads):
    """(tile, head, sequence) of this program: the tile varies fastest, then the head.

    The sequence is an int64, because its product with a stride may exceed 2**31.
    """
    head = tl.program_id(0) // n_tiles  # among the heads of all sequences
    return tl.program_id(0) % n_tiles, head % n_heads, (head // n_heads).to(tl.int64)


@triton.jit
def seen_keys(t0, T, S, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr):
    """(last_key, n_full, n_keys) for the queries t0 … t0 + BLOCK_T - 1.

    last_key (BLOCK_T,): the last key that each query sees. n_full: the keys of the leading tiles
    that need no mask. n_keys: where the loop over keys ends. For example, T 8, S 10, tiles of 4,
    t0 = 4, CAUSAL (x seen, . masked):

        key       0 1 2 3 | 4 5 6 7 | 8 9
        query 4   x x x x | x x x . | . .    last_key 6
        query 5   x x x x | x x x x | . .             7
        query 6   x x x x | x x x x | x .             8
        query 7   x x x x | x x x x | x x             9
                  no mask | masked  | masked
                      n_full = 4       n_keys = 10
    """
    last_key = tl.zeros([BLOCK_T], tl.int32) + S - 1
    n_full, n_keys = S // BLOCK_S * BLOCK_S, S
    if CAUSAL:  # the last query sees the last key
        last_key = tl.minimum(last_key, S - T + t0 + tl.arange(0, BLOCK_T))
        n_full = (S - T + t0 + 1) // BLOCK_S * BLOCK_S  # the first query sees the fewest keys
        n_keys = tl.minimum(S, S - T + t0 + BLOCK_T)
    return last_key, n_full, n_keys


@triton.jit
def _addresses(base, row_stride, first, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    # The tile's corner in 64 bits: row number times stride may exceed 2**31. Inside a tile, 32 bits
    # are enough.
    corner = base + tl.cast(first, tl.int64) * row_stride
    return corner + tl.arange(0, BLOCK_ROWS)[:, None] * row_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def describe(
    base, n_rows, row_stride, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The tensor descriptor of a matrix (n_rows, D), for tiles of (BLOCK_ROWS, BLOCK_D)."""
    return tl.make_tensor_descriptor(base, [n_rows, D], [row_stride, 1], [BLOCK_ROWS, BLOCK_D])


@triton.jit
def load_tile(
    base, row_stride, first, n_rows,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr,
    DESCRIPTOR: tl.constexpr = False,
):  # fmt: skip
    """(BLOCK_ROWS, BLOCK_D). CHECK_ROWS False: all rows exist, and no comparison is needed.

    DESCRIPTOR: base is not a pointer but what `describe` returned, and the copy engine compares.
    """
    if DESCRIPTOR:
        tile = base.load([first, 0])
    else:
        addresses = _addresses(base, row_stride, first, BLOCK_ROWS, BLOCK_D)
        columns_exist = tl.arange(0, BLOCK_D)[None, :] < D
        if CHECK_ROWS:
            rows_exist = tl.arange(0, BLOCK_ROWS)[:, None] < n_rows - first
            tile = tl.load(addresses, mask=rows_exist & columns_exist, other=0.0)
        elif BLOCK_D > D:
            tile = tl.load(addresses, mask=columns_exist, other=0.0)
        else:
            tile = tl.load(addresses)
    return tile


@triton.jit
def store_tile(
    base, row_stride, first, n_rows, tile,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write `tile` (BLOCK_ROWS, BLOCK_D) in the dtype of `base`."""
    rows_exist = tl.arange(0, BLOCK_ROWS)[:, None] < n_rows - first
    columns_exist = tl.arange(0, BLOCK_D)[None, :] < D
    addresses = _addresses(base, row_stride, first, BLOCK_ROWS, BLOCK_D)
    tl.store(addresses, tile.to(base.dtype.element_ty), mask=rows_exist & columns_exist)
