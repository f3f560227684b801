"""The paged KV cache: memory in blocks of a few tokens, handed out as sequences grow, shared where tokens are the same.

Sources: Kwon et al. 2023 (PagedAttention, vLLM), sections 3 and 4; Zheng et al. 2024 (SGLang) for reuse across requests.
Cost: at most block_size - 1 empty slots a sequence, whatever its length; a look-up in the block table for each block read.

Three layers, the upper two in pure Python, without tensors:

    BlockAllocator   which blocks are free, and how many hold on to each
    BlockManager     block tables of sequences: growing, forking, copy-on-write, finding known prefixes, evicting them
    PagedKVCache     the pages themselves, (L, n_blocks, P, K, D), and the view of a batch that the model attends through

A shared block is never written: whoever wants to write into it gets a copy first (`BlockManager.reserve`). Only full
blocks are remembered for later requests, so what is remembered never changes.
Not here: swapping blocks to the CPU's memory; which request runs when (`minillm.scheduler`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention import attend, check_backend
from minillm.flash import rows_contiguous, why_not_triton

if TYPE_CHECKING:
    from minillm.model import Decoder

BACKENDS = ("auto", "reference", "triton", "sdpa")


class OutOfBlocks(RuntimeError):
    """No block is free."""


def _check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more.")


class BlockAllocator:
    """`n_blocks` blocks, numbered from 0, each with a count of its holders. Every method takes constant time."""

    def __init__(self, n_blocks: int):
        _check_count("n_blocks", n_blocks)
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._holders = [0] * n_blocks

    @property
    def n_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A free block, held once; raises OutOfBlocks if there is none."""
        if not self._free:
            raise OutOfBlocks(f"All {self.n_blocks} blocks are in use; free some, or make the cache with more.")
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more holder of `block`; returns the block."""
        self._check(block)
        self._holders[block] += 1
        return block

    def free(self, block: int) -> None:
        """One holder fewer; after the last one the block is free."""
        self._check(block)
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def holders(self, block: int) -> int:
        """How many hold on to `block`; 0 if it is free."""
        return self._holders[block]

    def _check(self, block: int) -> None:
        if type(block) is not int or not 0 <= block < self.n_blocks:
            raise ValueError(f"There is no block {block!r}; blocks are numbered from 0 to {self.n_blocks - 1}.")
        if not self._holders[block]:
            raise ValueError(f"Block {block} is free already; it was freed more often than allocated and shared.")


@dataclass
class BlockTable:
    """Where one sequence's tokens lie: token i in slot i % P of block blocks[i // P]. Made by `BlockManager.start`."""

    blocks: list[int] = field(default_factory=list)
    n_tokens: int = 0  # stored; the last block may have room for more
    n_known: int = 0  # leading full blocks that have been offered to the prefix cache
    prefix: int = 0  # the number of the prefix that those n_known blocks hold


@dataclass(frozen=True)
class _Known:
    """A full block kept for later requests. `prefix` is the number of everything up to and including it."""

    block: int
    prefix: int
    key: tuple[int, tuple[int, ...]]


class BlockManager:
    """Block tables over one allocator, and the prefix cache. Pure Python.

    The prefix cache finds full blocks by (number of the prefix before the block, the block's tokens): a chain from the
    first block on. A Python dict compares the keys themselves when their hashes agree, so no collision of hashes can
    hand out the wrong block; and a prefix number is never used twice, so a block whose predecessors were evicted can't
    be found through others that took their place. The cache holds every known block once itself. Blocks that nobody
    else holds are idle: they are evicted, least recently used first, when blocks run out.
    """

    def __init__(self, n_blocks: int, block_size: int = 16, *, prefix_caching: bool = True):
        _check_count("block_size", block_size)
        self.allocator = BlockAllocator(n_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._known: dict[tuple[int, tuple[int, ...]], _Known] = {}
        self._of_block: dict[int, _Known] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last_prefix = 0  # 0 itself is the empty prefix

    @property
    def n_available(self) -> int:
        """Blocks that can be had: free ones and idle ones."""
        return self.allocator.n_free + len(self._idle)

    def start(self, ids: Sequence[int]) -> BlockTable:
        """The table of a new sequence, with the longest known prefix of its tokens in place.

        At least one token is left to compute, since its logits are wanted.
        """
        table, size = BlockTable(), self.block_size
        for i in range((len(ids) - 1) // size if self.prefix_caching else 0):
            known = self._known.get((table.prefix, tuple(ids[i * size : (i + 1) * size])))
            if known is None:
                break
            table.blocks.append(self.allocator.share(known.block))
            self._idle.pop(known.block, None)
            table.prefix = known.prefix
        table.n_known = len(table.blocks)
        table.n_tokens = table.n_known * size
        return table

    def needed(self, table: BlockTable, n_new: int) -> int:
        """Blocks that `reserve` would have to take."""
        new = -(-(table.n_tokens + n_new) // self.block_size) - len(table.blocks)
        return max(0, new) + (n_new > 0 and self.writes_shared(table))

    def reserve(self, table: BlockTable, n_new: int) -> list[tuple[int, int]]:
        """Make room for the sequence's next `n_new` tokens, or raise OutOfBlocks and change nothing.

        Returns (from, to) pairs of blocks whose contents must be copied before anything is written: at most one, when
        the tokens begin in a block that others hold, too (copy-on-write).
        """
        needed = self.needed(table, n_new)
        if needed > self.n_available:
            raise OutOfBlocks(f"{needed} blocks are needed, and {self.n_available} of {self.allocator.n_blocks} can be had.")
        copies = []
        if n_new > 0 and self.writes_shared(table):
            at = table.n_tokens // self.block_size
            shared, table.blocks[at] = table.blocks[at], self._take()
            copies.append((shared, table.blocks[at]))
            self._release(shared)
        while len(table.blocks) * self.block_size < table.n_tokens + n_new:
            table.blocks.append(self._take())
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same tokens so far, in the same blocks. Both reserve before they go on."""
        with_tokens = -(-table.n_tokens // self.block_size)  # blocks reserved beyond them are not shared
        blocks = [self.allocator.share(block) for block in table.blocks[:with_tokens]]
        return BlockTable(blocks, table.n_tokens, table.n_known, table.prefix)

    def remember(self, table: BlockTable, ids: Sequence[int]) -> None:
        """Offer the sequence's full blocks, which hold the leading tokens of `ids`, to later requests."""
        size = self.block_size
        if not self.prefix_caching:
            return
        for i in range(table.n_known, table.n_tokens // size):
            key = (table.prefix, tuple(ids[i * size : (i + 1) * size]))
            known = self._known.get(key)
            # If another sequence was first with the same tokens, its block is the known one, and this stays private.
            if known is None:
                self._last_prefix += 1
                known = _Known(self.allocator.share(table.blocks[i]), self._last_prefix, key)
                self._known[key] = self._of_block[known.block] = known
            table.n_known, table.prefix = i + 1, known.prefix

    def release(self, table: BlockTable) -> None:
        """The sequence is over, or gives up its blocks for others: free them all. The table is empty afterwards."""
        for block in reversed(table.blocks):  # the last is the first to be evicted: it is of no use without the others
            self._release(block)
        table.blocks, table.n_tokens, table.n_known, table.prefix = [], 0, 0, 0

    def writes_shared(self, table: BlockTable) -> bool:
        """Whether the next token would go to a block that others hold, too."""
        at = table.n_tokens // self.block_size
        return at < len(table.blocks) and self.allocator.holders(table.blocks[at]) > 1

    def _take(self) -> int:
        if not self.allocator.n_free and self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._known[self._of_block.pop(block).key]
            self.allocator.free(block)
        return self.allocator.allocate()

    def _release(self, block: int) -> None:
        self.allocator.free(block)
        if block in self._of_block and self.allocator.holders(block) == 1:
            self._idle[block] = None  # most recently used


class PagedKVCache:
    """Keys and values in `n_blocks` blocks of `block_size` tokens, for any number of sequences.

    k, v: (L, n_blocks, P, K, D). nbytes: bytes of both, all reserved at once; that is the pool that sequences share.

        table = cache.manager.start(ids)                    # finds a known prefix, if there is one
        cache.reserve(table, n)                             # room for n tokens
        hidden = model.hidden(tokens, cache.batch([table], [n]))
        cache.manager.release(table)                        # when the sequence is over
    """

    def __init__(self, model: "Decoder", n_blocks: int, block_size: int = 16, *, prefix_caching: bool = True, backend: str = "auto"):
        check_backend(backend, BACKENDS)
        self.manager = BlockManager(n_blocks, block_size, prefix_caching=prefix_caching)
        c = self.config = model.config
        shape = (c.n_layers, n_blocks, block_size, c.n_kv_heads, c.d_head)
        self.k = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.v = torch.zeros_like(self.k)
        self.layers = [(self.k[i], self.v[i]) for i in range(c.n_layers)]  # views, (n_blocks, P, K, D) each
        self.backend = backend

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def reserve(self, table: BlockTable, n_new: int) -> None:
        """`BlockManager.reserve`, and the copy that it asks for."""
        self.copy(self.manager.reserve(table, n_new))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of blocks, all layers, given as (from, to)."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.k.device).T
            self.k[:, target], self.v[:, target] = self.k[:, source], self.v[:, source]

    def batch(self, tables: Sequence[BlockTable], n_new: Sequence[int]) -> "PagedBatch":
        """The view through which the next n_new[i] tokens of sequence i, for all i, go through the model together.

        Their room must be reserved. Give the model tokens of shape (1, sum(n_new)), one sequence after another.
        """
        return PagedBatch(self, tables, n_new)


class PagedBatch:
    """One step of several sequences in a `PagedKVCache`: what the model gets as its cache. Good for one forward pass.

    width: blocks that every row of the block tables holds; the longest table's if not given. With a fixed width, `refill`
    puts the next step's numbers into the same tensors, as a captured CUDA graph needs it.
    """

    def __init__(self, cache: PagedKVCache, tables: Sequence[BlockTable], n_new: Sequence[int], *, width: int | None = None):
        if not tables or len(tables) != len(n_new):
            raise ValueError(f"{len(tables)} block tables and {len(n_new)} token counts; give one count for each of at least one table.")
        self.cache, self.tables, self.n_new = cache, tables, list(n_new)
        self._width = width
        self._positions, self._slots, block_tables, lens = (x.to(cache.k.device) for x in self._arrays())
        longest = width * cache.manager.block_size if width else None
        seq_lens = [t.n_tokens + n for t, n in zip(tables, n_new, strict=True)]
        self._plan = AttentionPlan(block_tables, lens, seq_lens, self.n_new, cache.manager.block_size, longest)

    def refill(self, tables: Sequence[BlockTable]) -> None:
        """The next step of as many sequences, with the same numbers of new tokens. Only for the kernel "triton", which
        reads everything from the tensors."""
        self.tables = tables
        plan = self._plan
        for target, source in zip((self._positions, self._slots, plan.tables, plan.lens), self._arrays(), strict=True):
            target.copy_(source, non_blocking=True)

    def _arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions (N,) and slots (N,) of the new tokens, block tables (n_seqs, width), lengths (2, n_seqs): all and new."""
        size, config = self.cache.manager.block_size, self.cache.config
        for table, n in zip(self.tables, self.n_new, strict=True):
            _check_count("n_new", n)
            if table.n_tokens + n > len(table.blocks) * size:
                raise ValueError(
                    f"{n} tokens after {table.n_tokens} don't fit in {len(table.blocks)} blocks of {size}; reserve them first."
                )
            if self.cache.manager.writes_shared(table):
                raise ValueError(
                    f"Token {table.n_tokens} would go to a block that others hold, too; reserve its room first: that copies it."
                )
            if table.n_tokens + n > config.max_seq_len:
                raise ValueError(
                    f"{table.n_tokens + n} positions are asked for; {config.name} was trained for at most {config.max_seq_len}."
                )
        old, new = torch.tensor([t.n_tokens for t in self.tables]), torch.tensor(self.n_new)
        width = self._width or max(len(t.blocks) for t in self.tables)
        block_tables = torch.tensor([t.blocks + [0] * (width - len(t.blocks)) for t in self.tables], dtype=torch.int32)
        sequence = torch.tensor([i for i, n in enumerate(self.n_new) for _ in range(n)])  # of each new token
        positions = torch.arange(len(sequence)) - (new.cumsum(0) - new - old)[sequence]
        slots = block_tables[sequence, positions // size].long() * size + positions % size
        return positions, slots, block_tables, torch.stack((old + new, new)).int()

    def positions(self, n_new: int) -> Tensor:
        if n_new != sum(self.n_new):
            raise ValueError(f"{n_new} tokens were given for a batch of {sum(self.n_new)}.")
        return self._positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, N, H, D), k and v (1, N, K, D) of the N new tokens; returns (1, N, H, D)."""
        k_pages, v_pages = self.cache.layers[layer]
        k_pages.flatten(0, 1)[self._slots] = k[0]  # (n_blocks * P, K, D), a view
        v_pages.flatten(0, 1)[self._slots] = v[0]
        return self._plan.attend(q[0], k_pages, v_pages, q.shape[-1] ** -0.5, self.cache.backend)[None]

    def advance(self, n_new: int) -> None:
        for table, n in zip(self.tables, self.n_new, strict=True):
            table.n_tokens += n


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, query_lens: Tensor, *,
    scale: float | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Causal attention of ragged new tokens to keys and values in blocks; returns (N, H, D).

    q (N, H, D): the new tokens of all sequences, one sequence after another. k_pages, v_pages (n_blocks, P, K, D).
    block_tables (n_seqs, max_blocks) int32: the blocks of each sequence, in order. seq_lens (n_seqs,): tokens of each, the
    new ones, whose keys are in the pages already, included. query_lens (n_seqs,): new ones among them; they sum to N.
    One call serves prefill, chunks of it, decode and verification: sequences may differ in all of that.
    backend: "reference" gathers each sequence and writes out its scores; "sdpa" gathers, too, and uses PyTorch's kernel;
    "triton" reads through the tables; "auto" is "triton" on CUDA where the kernel takes the input, "sdpa" elsewhere.
    Raises ValueError or TypeError for shapes, numbers or dtypes that don't fit together.
    """
    check_backend(backend, BACKENDS)
    if q.dim() != 3 or k_pages.dim() != 4 or k_pages.shape != v_pages.shape or q.shape[2] != k_pages.shape[3]:
        raise ValueError(
            f"q, k_pages, v_pages have shapes {tuple(q.shape)}, {tuple(k_pages.shape)}, {tuple(v_pages.shape)}; "
            "expected (N, H, D), (n_blocks, P, K, D), (n_blocks, P, K, D)."
        )
    if 0 in q.shape or 0 in k_pages.shape:
        raise ValueError(f"q {tuple(q.shape)} or k_pages {tuple(k_pages.shape)} is empty; every size must be 1 or more.")
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k_pages.shape[2]} key/value heads.")
    if not q.is_floating_point() or q.dtype != k_pages.dtype or q.dtype != v_pages.dtype:
        raise TypeError(
            f"q, k_pages, v_pages have dtypes {q.dtype}, {k_pages.dtype}, {v_pages.dtype}; all three must be the same floating-point dtype."
        )
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages), ("block_tables", block_tables)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; move them to one device.")
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32:
        raise TypeError(f"block_tables is {block_tables.dtype} of shape {tuple(block_tables.shape)}; expected int32 (n_seqs, max_blocks).")
    seqs, queries = seq_lens.tolist(), query_lens.tolist()
    n_seqs, capacity = block_tables.shape[0], block_tables.shape[1] * k_pages.shape[1]
    if seq_lens.shape != (n_seqs,) or query_lens.shape != (n_seqs,):
        raise ValueError(
            f"seq_lens has shape {tuple(seq_lens.shape)}, query_lens {tuple(query_lens.shape)}; expected ({n_seqs},), one a table."
        )
    if seq_lens.dtype not in (torch.int32, torch.int64) or query_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"seq_lens is {seq_lens.dtype}, query_lens {query_lens.dtype}; expected int32 or int64.")
    for i, (n_keys, n_queries) in enumerate(zip(seqs, queries, strict=True)):
        if not 1 <= n_queries <= n_keys <= capacity:
            raise ValueError(
                f"sequence {i} has {n_queries} new of {n_keys} tokens; expected 1 <= new <= tokens <= {capacity}, which its table can hold."
            )
    if sum(queries) != q.shape[0]:
        raise ValueError(f"query_lens sum to {sum(queries)}, and q holds {q.shape[0]} tokens.")
    used = torch.arange(capacity // k_pages.shape[1], device=q.device) * k_pages.shape[1] < seq_lens.to(q.device)[:, None]
    if bool((used & ((block_tables < 0) | (block_tables >= k_pages.shape[0]))).any()):
        raise ValueError(f"block_tables names blocks that don't exist; there are {k_pages.shape[0]}, numbered from 0.")
    lens = torch.tensor([seqs, queries], dtype=torch.int32, device=q.device)
    plan = AttentionPlan(block_tables.where(used, 0), lens, seqs, queries, k_pages.shape[1])
    return plan.attend(q, k_pages, v_pages, q.shape[-1] ** -0.5 if scale is None else scale, backend)


class AttentionPlan:
    """What paged attention needs to know besides the numbers: worked out once a step, used by every layer."""

    def __init__(
        self, tables: Tensor, lens: Tensor, seq_lens: list[int], query_lens: list[int], block_size: int, longest: int | None = None
    ):
        self.tables, self.lens, self.seq_lens, self.query_lens = tables, lens, seq_lens, query_lens
        self.block_size = block_size
        self.longest = longest or max(seq_lens)
        self.starts = list(accumulate(query_lens, initial=0))
        self.together: _Together | None = None  # for the backend "sdpa"
        self.tiles: Tensor | None = None  # (3, n_tiles) for the Triton kernel

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, backend: str) -> Tensor:
        """q (N, H, D) to (N, H, D)."""
        if backend == "auto":
            backend = "triton" if q.is_cuda and why_not_triton(q, scale) is None else "sdpa"
        if backend == "triton":
            return self._triton(q, k_pages, v_pages, scale)
        out = torch.empty_like(q)
        alone: Iterable[int] = range(len(self.seq_lens))
        if backend == "sdpa":
            if self.together is None:
                self.together = _Together(self)
            self.together.attend(out, q, k_pages, v_pages, scale)
            alone = self.together.others
        for i in alone:
            n_keys, start, end = self.seq_lens[i], self.starts[i], self.starts[i + 1]
            blocks = self.tables[i, : -(-n_keys // self.block_size)]
            k, v = (pages[blocks].flatten(0, 1)[None, :n_keys] for pages in (k_pages, v_pages))  # (1, S, K, D)
            out[start:end] = attend(q[None, start:end], k, v, True, scale, backend)[0]
        return out

    def _triton(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> Tensor:
        if reason := why_not_triton(q, scale):
            raise ValueError(reason)
        from minillm.kernels.paged_attention import paged_forward, rows_of_a_tile, tiles

        group = q.shape[1] // k_pages.shape[2]
        block_r = rows_of_a_tile(max(self.query_lens), group, q.dtype)
        if self.tiles is None:
            self.tiles = torch.tensor(tiles(self.query_lens, block_r // group), dtype=torch.int32, device=q.device)
        q, k_pages, v_pages = (rows_contiguous(x) for x in (q, k_pages, v_pages))
        return paged_forward(q, k_pages, v_pages, self.tables, *self.lens, self.tiles, block_r, self.longest, scale)


class _Together:
    """The sequences with one new token each, as one batch: gathered, padded to the longest of them, and attended at once.

    For a CPU, where a call for every sequence would cost more than the padding. If one is far longer than the rest, so
    that padding would double the work, each goes alone; `others` are the sequences that do.
    """

    def __init__(self, plan: AttentionPlan):
        chosen = [i for i, n in enumerate(plan.query_lens) if n == 1]
        lens = [plan.seq_lens[i] for i in chosen]
        if len(chosen) < 2 or max(lens) * len(lens) > 2 * sum(lens):
            chosen = []
        self.others = [i for i in range(len(plan.seq_lens)) if not chosen or plan.query_lens[i] > 1]
        device = plan.tables.device
        self.rows = torch.tensor([plan.starts[i] for i in chosen], dtype=torch.int64, device=device)
        if chosen:
            self.longest = max(lens)
            self.blocks = plan.tables[chosen, : -(-self.longest // plan.block_size)]
            slots = torch.arange(self.blocks.shape[1] * plan.block_size, device=device)
            exists = slots < torch.tensor(lens, device=device)[:, None]  # (n_seqs, slots)
            self.visible, self.missing = exists[:, None, None, : self.longest], (~exists).flatten().nonzero()[:, 0]

    def attend(self, out: Tensor, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> None:
        """Fill the rows of `out` (N, H, D) that belong here."""
        if len(self.rows):
            k, v = (self._gather(pages) for pages in (k_pages, v_pages))  # (n_seqs, K, S, D)
            # The G query heads of a key/value head are rows of one small matrix, as in `minillm.attention`.
            heads = q[self.rows].unflatten(1, (k.shape[1], -1))  # (n_seqs, K, G, D)
            result = F.scaled_dot_product_attention(heads, k, v, attn_mask=self.visible, scale=scale)
            out[self.rows] = result.flatten(1, 2)

    def _gather(self, pages: Tensor) -> Tensor:
        x = pages[self.blocks].flatten(0, 2)  # (all slots, K, D), a copy
        x.index_fill_(0, self.missing, 0)  # others may have left NaN there, and 0 times NaN is NaN
        return x.unflatten(0, (len(self.blocks), -1))[:, : self.longest].transpose(1, 2)
