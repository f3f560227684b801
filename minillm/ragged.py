"""Attention of ragged queries to keys in blocks: the new tokens of many sequences at once.

Source: Kwon et al. 2023 (PagedAttention, vLLM), section 4.1.
Cost: that of `minillm.attention`, and a look-up in the block table for each block read. The Triton
kernel reads through the tables; the other backends gather each sequence's keys first.

    paged_attention   the public function, which checks everything
    RaggedLayout      where a step's queries and keys lie: computed once, used by every layer
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.availability import on_device_of, rows_contiguous, why_not_triton
from minillm.layers.attention import check_backend, default_scale, unchecked_attention

BACKENDS = ("auto", "reference", "triton", "sdpa")

Pages = tuple[Tensor, ...]
"""Keys and values of one layer, (n_blocks, P, K, D) each; if quantized, with the scales of both."""


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of ragged new tokens to keys and values in blocks; returns (N, H, D).

    q (N, H, D): the new tokens of all sequences, one sequence after another.
    k_pages, v_pages (n_blocks, P, K, D).
    block_tables (n_seqs, max_blocks) int32: the blocks of each sequence, in order.
    seq_lens (n_seqs,): tokens of each, including the new ones, whose keys are in the pages already.
    query_lens (n_seqs,): new ones among them; they sum to N.
    One call serves prefill, chunked prefill, decode and verification, mixed in any way. backend:
    "reference" gathers each sequence and writes out its scores; "sdpa" gathers as well and uses
    PyTorch's kernel; "triton" reads through the tables; "auto" is "triton" on CUDA where the kernel
    takes the input, "sdpa" elsewhere. Raises ValueError or TypeError for shapes, numbers or dtypes
    that don't fit together.
    """
    check_backend(backend, BACKENDS)
    _check_tensors(q, k_pages, v_pages, block_tables)
    n_blocks, size = k_pages.shape[:2]
    seqs, queries = _checked_lengths(seq_lens, query_lens, block_tables, size)
    if sum(queries) != q.shape[0]:
        raise ValueError(f"query_lens sum to {sum(queries)}, and q holds {q.shape[0]} tokens.")
    tables = _used_tables(block_tables, seq_lens, n_blocks, size)
    lens = torch.tensor([seqs, queries], dtype=torch.int32, device=q.device)
    layout = RaggedLayout(tables, lens, seqs, queries, size)
    scale = default_scale(q) if scale is None else scale

    def read(blocks: Tensor) -> Pages:
        return k_pages[blocks], v_pages[blocks]

    return layout.attention(q, (k_pages, v_pages), read, scale, backend)


def _used_tables(block_tables: Tensor, seq_lens: Tensor, n_blocks: int, block_size: int) -> Tensor:
    """The tables (n_seqs, max_blocks), 0 where a sequence has no block; ValueError for others."""
    first_tokens = torch.arange(block_tables.shape[1], device=block_tables.device) * block_size
    used = first_tokens < seq_lens.to(block_tables.device)[:, None]  # (n_seqs, max_blocks)
    if bool((used & ((block_tables < 0) | (block_tables >= n_blocks))).any()):
        raise ValueError(
            f"block_tables names blocks that don't exist; there are {n_blocks}, numbered from 0."
        )
    return block_tables.where(used, 0)


def _check_tensors(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor) -> None:
    shapes = f"{tuple(q.shape)}, {tuple(k_pages.shape)}, {tuple(v_pages.shape)}"
    ranks = q.dim() == 3 and k_pages.dim() == 4
    if not ranks or k_pages.shape != v_pages.shape or q.shape[2] != k_pages.shape[3]:
        raise ValueError(
            f"q, k_pages, v_pages have shapes {shapes}; expected (N, H, D), (n_blocks, P, K, D), "
            "(n_blocks, P, K, D)."
        )
    if 0 in q.shape or 0 in k_pages.shape:
        raise ValueError(
            f"q, k_pages, v_pages have shapes {shapes}: one is empty; every size must be 1 or more."
        )
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {k_pages.shape[2]} key/value heads."
        )
    if not q.is_floating_point() or q.dtype != k_pages.dtype or q.dtype != v_pages.dtype:
        raise TypeError(
            f"q, k_pages, v_pages have dtypes {q.dtype}, {k_pages.dtype}, {v_pages.dtype}; all "
            "three must be the same floating-point dtype."
        )
    named = {"k_pages": k_pages, "v_pages": v_pages, "block_tables": block_tables}
    for name, x in named.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; move them to one device.")
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32:
        raise TypeError(
            f"block_tables is {block_tables.dtype} of shape {tuple(block_tables.shape)}; expected "
            "int32 (n_seqs, max_blocks)."
        )


def _checked_lengths(
    seq_lens: Tensor, query_lens: Tensor, block_tables: Tensor, block_size: int
) -> tuple[list[int], list[int]]:
    """Both as lists, if they fit the tables."""
    n_seqs, capacity = block_tables.shape[0], block_tables.shape[1] * block_size
    if seq_lens.shape != (n_seqs,) or query_lens.shape != (n_seqs,):
        raise ValueError(
            f"seq_lens has shape {tuple(seq_lens.shape)}, query_lens {tuple(query_lens.shape)}; "
            f"expected ({n_seqs},), one number for each table."
        )
    integers = (torch.int32, torch.int64)
    if seq_lens.dtype not in integers or query_lens.dtype not in integers:
        raise TypeError(
            f"seq_lens is {seq_lens.dtype}, query_lens {query_lens.dtype}; expected int32 or int64."
        )
    seqs, queries = seq_lens.tolist(), query_lens.tolist()
    for i, (n_keys, n_queries) in enumerate(zip(seqs, queries, strict=True)):
        if not 1 <= n_queries <= n_keys <= capacity:
            raise ValueError(
                f"sequence {i} has {n_queries} new of {n_keys} tokens; expected 1 <= new <= tokens "
                f"<= {capacity}, which its table can hold."
            )
    return seqs, queries


class RaggedLayout:
    """Where the queries and keys of one step lie: computed once, used by every layer.

    tables (n_seqs, max_blocks) and lens (2, n_seqs), int32, are on the device; seq_lens and
    query_lens are the same lengths as lists. longest: an upper bound of the keys of a sequence; the
    largest of seq_lens if not given.
    """

    def __init__(
        self,
        tables: Tensor,
        lens: Tensor,
        seq_lens: list[int],
        query_lens: list[int],
        block_size: int,
        longest: int | None = None,
    ):
        self.tables, self.lens = tables, lens
        self.seq_lens, self.query_lens, self.block_size = seq_lens, query_lens, block_size
        self.longest = longest or max(seq_lens)
        self.starts = list(accumulate(query_lens, initial=0))
        self.together: _Together | None = None  # for the backend "sdpa"
        self.tiles: Tensor | None = None  # (3, n_tiles) for the Triton kernel

    def attention(
        self,
        q: Tensor,
        pages: Pages,
        read: Callable[[Tensor], Pages],
        scale: float,
        backend: str,
    ) -> Tensor:
        """q (N, H, D) to (N, H, D).

        pages: one layer as it is stored. read: keys and values (…, P, K, D) of given blocks, in
        the dtype of q. The Triton kernel reads the pages themselves, if they have that dtype or
        come with scales.
        """
        if backend == "triton" or (backend == "auto" and q.is_cuda):
            why_not = self._why_not_triton(q, pages, scale)
            if why_not is None:
                return self._triton(q, pages, scale)
            if backend == "triton":
                raise ValueError(why_not)
        out = torch.empty_like(q)
        # Sequences with one new token go together, all others one by one.
        alone: Iterable[int] = range(len(self.seq_lens))
        if backend != "reference":
            if self.together is None:
                self.together = _Together(self)
            self.together.fill(out, q, read, scale)
            alone = self.together.others
        for i in alone:
            n_keys, start, end = self.seq_lens[i], self.starts[i], self.starts[i + 1]
            blocks = self.tables[i, : -(-n_keys // self.block_size)]
            # (blocks, P, K, D) to (1, S, K, D): the last block may not be full.
            k, v = (x.flatten(0, 1)[None, :n_keys] for x in read(blocks))
            one, kind = q[None, start:end], "reference" if backend == "reference" else "sdpa"
            out[start:end] = unchecked_attention(one, k, v, True, scale, kind)[0]
        return out

    @staticmethod
    def _why_not_triton(q: Tensor, pages: Pages, scale: float) -> str | None:
        why_not = why_not_triton(q, scale)
        if why_not is None and len(pages) == 2 and pages[0].dtype != q.dtype:
            why_not = f"backend 'triton' reads pages of {q.dtype}, not {pages[0].dtype}."
        return why_not

    def _triton(self, q: Tensor, pages: Pages, scale: float) -> Tensor:
        from minillm.kernels.paged_attention import paged_forward, rows_of_a_tile, tiles

        group = q.shape[1] // pages[0].shape[2]
        block_r = rows_of_a_tile(max(self.query_lens), group, q.dtype)
        if self.tiles is None:
            numbers = tiles(self.query_lens, block_r // group)
            self.tiles = torch.tensor(numbers, dtype=torch.int32, device=q.device)
        q, k_pages, v_pages = (rows_contiguous(x) for x in (q, *pages[:2]))
        scales = pages[2:] or None
        where = (self.tables, *self.lens, self.tiles)
        with on_device_of(q):
            return paged_forward(q, k_pages, v_pages, *where, block_r, self.longest, scale, scales)


class _Together:
    """The sequences with one new token each, as one batch: gathered, padded, attended at once.

    For a CPU, where a call for every sequence would cost more than the padding. If one sequence is
    so long that padding would double the work, each goes alone. `others` are those that do.
    """

    def __init__(self, layout: RaggedLayout):
        chosen = [i for i, n in enumerate(layout.query_lens) if n == 1]
        lens = [layout.seq_lens[i] for i in chosen]
        if len(chosen) < 2 or max(lens) * len(lens) > 2 * sum(lens):
            chosen = []
        every = range(len(layout.seq_lens))
        self.others = [i for i in every if not chosen or layout.query_lens[i] > 1]
        device = layout.tables.device
        rows = [layout.starts[i] for i in chosen]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        if chosen:
            self.longest = max(lens)
            self.blocks = layout.tables[chosen, : -(-self.longest // layout.block_size)]
            slots = torch.arange(self.blocks.shape[1] * layout.block_size, device=device)
            exists = slots < torch.tensor(lens, device=device)[:, None]  # (n_seqs, slots)
            self.visible = exists[:, None, None, : self.longest]
            self.missing = (~exists).flatten().nonzero()[:, 0]

    def fill(self, out: Tensor, q: Tensor, read: Callable[[Tensor], Pages], scale: float) -> None:
        """Compute the rows of `out` (N, H, D) that belong to these sequences."""
        if len(self.rows):
            k, v = (self._padded(x) for x in read(self.blocks))  # (n_seqs, K, S, D)
            # The G query heads of a key/value head are rows of one small matrix, as in
            # `minillm.attention`: (n_seqs, K, G, D).
            heads = q[self.rows].unflatten(1, (k.shape[1], -1))
            result = F.scaled_dot_product_attention(
                heads, k, v, attn_mask=self.visible, scale=scale
            )
            out[self.rows] = result.flatten(1, 2)

    def _padded(self, gathered: Tensor) -> Tensor:
        x = gathered.flatten(0, 2)  # (all slots, K, D)
        # Sequences that held these blocks before may have left NaN, and 0 times NaN is NaN.
        x.index_fill_(0, self.missing, 0)
        return x.unflatten(0, (len(self.blocks), -1))[:, : self.longest].transpose(1, 2)
