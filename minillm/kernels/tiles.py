"""Loading and storing one tile: BLOCK_ROWS rows of D numbers, from row `first` on.

Rows that do not exist, and the columns that pad D to a power of two, are read as 0 and not written.
"""

import triton
import triton.language as tl


@triton.jit
def _addresses(base, row_stride, first, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    # The tile's corner in 64 bits: row number times stride may pass 2**31. Inside a tile, 32 bits
    # are enough.
    corner = base + tl.cast(first, tl.int64) * row_stride
    return corner + tl.arange(0, BLOCK_ROWS)[:, None] * row_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(
    base, row_stride, first, n_rows,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """(BLOCK_ROWS, BLOCK_D). CHECK_ROWS False promises that all rows exist; saves a comparison."""
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
