"""The paged KV cache: keys and values in blocks of a few tokens, for any number of sequences.

Sources: Kwon et al. 2023 (PagedAttention, vLLM), sections 3 and 4.
Cost: a look-up in the block table for each block read; at most block_size - 1 empty slots a
sequence. Which blocks a sequence has is the work of `minillm.blocks`; attention through the tables
is `minillm.ragged`.

    PagedKVCache   the pages themselves
    PagedBatch     one step of several sequences: what the model gets as its cache
    PagedStep      the same from numbers that lie on the device: what a CUDA graph captures
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minillm.blocks import BlockManager, BlockTable
from minillm.cache import Cache
from minillm.kv_cache import KVStorage
from minillm.layers.attention import check_backend, default_scale
from minillm.model import Decoder
from minillm.ragged import BACKENDS, RaggedLayout
from minillm.tools.checks import check_whole


class PagedKVCache:
    """Keys and values in `n_blocks` blocks of `block_size` tokens, shared by all sequences.

    storage: how they are stored; all blocks are reserved at once.

        table = cache.manager.start(ids)                    # finds a known prefix, if there is one
        cache.reserve(table, n)                             # room for n tokens
        hidden = model.hidden(tokens, cache.batch([table], [n]))
        cache.manager.release(table)                        # when the sequence is over
    """

    def __init__(
        self,
        model: Decoder,
        n_blocks: int,
        block_size: int = 16,
        *,
        prefix_caching: bool = True,
        backend: str = "auto",
        storage: Callable[[Decoder, tuple[int, int]], KVStorage] = KVStorage,
    ):
        check_backend(backend, BACKENDS)
        self.manager = BlockManager(n_blocks, block_size, prefix_caching=prefix_caching)
        self.storage = storage(model, (n_blocks, block_size))
        self.made_for, self.config, self.device = model.kv_format, model.config, model.device
        self.backend = backend

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def reserve(self, table: BlockTable, n_new: int) -> None:
        """`BlockManager.reserve`, and the copy that it asks for."""
        self.copy(self.manager.reserve(table, n_new))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of blocks, all layers, given as (from, to)."""
        if pairs:
            self.storage.copy(*torch.tensor(pairs, device=self.device).T)

    def batch(self, tables: Sequence[BlockTable], n_new: Sequence[int]) -> "PagedBatch":
        """The view through which the next n_new[i] tokens of each sequence i go through the model.

        Their room must be reserved. Give the model tokens of shape (1, sum(n_new)), one sequence
        after another.
        """
        return PagedBatch(self, tables, n_new)


class PagedStep(Cache):
    """A step of several sequences, whose numbers lie on the device; good for one forward pass.

    positions, blocks, offsets (N,): where each new token is in its sequence and in the pages.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        positions: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        layout: RaggedLayout,
    ):
        self.cache, self.made_for = cache, cache.made_for
        self._positions, self._block, self._offset = positions, blocks, offsets
        self._layout = layout

    @staticmethod
    def of_one_token_each(cache: PagedKVCache, tables: Tensor, lens: Tensor) -> "PagedStep":
        """One new token of each of n sequences: tables (n, width) and lens (n,), the new included.

        Nothing comes from the host, so that a CUDA graph can hold it; the host counts the tokens.
        """
        size, n = cache.manager.block_size, len(lens)
        positions = lens.long() - 1
        blocks = tables.gather(1, positions[:, None] // size)[:, 0].long()
        both = torch.stack((lens, torch.ones_like(lens)))
        layout = RaggedLayout(tables, both, [1] * n, [1] * n, size, tables.shape[1] * size)
        each = torch.arange(n, dtype=torch.int32, device=lens.device)
        layout.tiles = torch.stack((each, torch.zeros_like(each), each))  # a tile a sequence
        return PagedStep(cache, positions, blocks, positions % size, layout)

    def positions(self, n_new: int) -> Tensor:
        if n_new != len(self._positions):
            raise ValueError(f"{n_new} tokens were given for a batch of {len(self._positions)}.")
        return self._positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, N, H, D), k and v (1, N, K, D) of the N new tokens; returns (1, N, H, D)."""
        self.cache.storage.write(layer, (self._block, self._offset), k[0], v[0])
        return self.attend_written(layer, q)

    def slots(self, layer: int) -> tuple[Tensor, ...] | None:
        storage = self.cache.storage
        if not storage.plain:
            return None
        return *storage.layers[layer], self._block, self._offset

    def attend_written(self, layer: int, q: Tensor) -> Tensor:
        storage, scale = self.cache.storage, default_scale(q)
        read, pages = partial(storage.read, layer), storage.layers[layer]
        return self._layout.attention(q[0], pages, read, scale, self.cache.backend)[None]

    def advance(self, n_new: int) -> None:
        pass


class PagedBatch(PagedStep):
    """The next n_new[i] tokens of each sequence i, from their block tables."""

    def __init__(self, cache: PagedKVCache, tables: Sequence[BlockTable], n_new: Sequence[int]):
        if not tables or len(tables) != len(n_new):
            raise ValueError(
                f"{len(tables)} block tables and {len(n_new)} token counts; give one count for "
                "each of at least one sequence."
            )
        self.tables, self.n_new = tables, list(n_new)
        for table, n in zip(tables, n_new, strict=True):
            self._check(cache, table, n)
        numbers = _numbers(tables, self.n_new, cache.manager.block_size)
        seq_lens = numbers[-1][0].tolist()
        positions, blocks, offsets, block_tables, lens = (x.to(cache.device) for x in numbers)
        size = cache.manager.block_size
        layout = RaggedLayout(block_tables, lens, seq_lens, self.n_new, size)
        super().__init__(cache, positions, blocks, offsets, layout)

    def advance(self, n_new: int) -> None:
        for table, n in zip(self.tables, self.n_new, strict=True):
            table.n_tokens += n

    @staticmethod
    def _check(cache: PagedKVCache, table: BlockTable, n: int) -> None:
        manager, config = cache.manager, cache.config
        check_whole("n_new", n)
        if table.n_tokens + n > len(table.blocks) * manager.block_size:
            raise ValueError(
                f"{n} tokens after {table.n_tokens} don't fit in {len(table.blocks)} blocks of "
                f"{manager.block_size}; reserve them first."
            )
        if manager.writes_shared(table):
            raise ValueError(
                f"Token {table.n_tokens} would go to a block that other sequences hold as well; "
                "reserve its room first: that copies the block."
            )
        if table.n_tokens + n > config.max_seq_len:
            raise ValueError(
                f"{table.n_tokens + n} positions are asked for; {config.name} was trained for at "
                f"most {config.max_seq_len}."
            )


def _numbers(
    tables: Sequence[BlockTable], n_new: list[int], size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """On the CPU: of each new token its position, block and offset in the block, (N,) each.

    Then the block tables (n_seqs, blocks of the longest), and lengths (2, n_seqs): with the new
    tokens, and the new tokens alone.
    """
    # The tables are int32 arrays: one copy of their bytes, padded, is the whole batch's table.
    blocks = [table.blocks for table in tables]
    width = max(map(len, blocks))
    joined = bytearray().join(b.tobytes() + bytes(4 * (width - len(b))) for b in blocks)
    block_tables = torch.frombuffer(joined, dtype=torch.int32).view(-1, width)
    old = torch.frombuffer(array("i", [t.n_tokens for t in tables]), dtype=torch.int32)
    new = torch.frombuffer(array("i", n_new), dtype=torch.int32)
    positions = old.long()  # (n_seqs,)
    sequence = torch.arange(len(old))
    if max(n_new) > 1:
        # Not repeat_interleave, which would wake all threads for a few numbers.
        sequence = torch.tensor([i for i, n in enumerate(n_new) for _ in range(n)])  # (N,)
        first = new.cumsum(0) - new  # row of each sequence's first new token
        positions = torch.arange(len(sequence)) + (positions - first)[sequence]  # (N,)
    block = block_tables[sequence, positions // size].long()
    return positions, block, positions % size, block_tables, torch.stack((old + new, new))
