"""What must hold of a pool of blocks at all times, and a memory of tokens that shows what a sequence would read."""

from collections import Counter
from collections.abc import Iterable, Sequence

from minillm.paged import BlockManager, BlockTable


def check_pool(manager: BlockManager, tables: Iterable[BlockTable]) -> None:
    """Every block is free, or held exactly by the tables that name it and by the prefix cache if that knows it."""
    tables, allocator = list(tables), manager.allocator
    held = Counter(block for table in tables for block in table.blocks)
    known = [entry.block for entry in manager._known.values()]
    assert len(set(known)) == len(known) and set(known) == set(manager._of_block)
    for table in tables:
        assert len(set(table.blocks)) == len(table.blocks)
        assert table.n_tokens <= len(table.blocks) * manager.block_size
        # Blocks without a token are about to be written: nobody else may have them.
        for block in table.blocks[-(-table.n_tokens // manager.block_size) :]:
            assert allocator.holders(block) == 1
    for block in range(allocator.n_blocks):
        assert allocator.holders(block) == held[block] + (block in known)
    assert sorted(allocator._free) == [block for block in range(allocator.n_blocks) if not allocator.holders(block)]
    assert set(manager._idle) == set(known) - held.keys()
    assert manager.n_available == allocator.n_blocks - len(held) >= 0


class Memory:
    """Pages that hold tokens where the real ones hold keys and values."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All blocks are read before one is written, as `PagedKVCache.copy` does it."""
        read = [{s: self.slots.get((source, s)) for s in range(self.block_size)} for source, _ in pairs]
        for (_, target), contents in zip(pairs, read, strict=True):
            self.slots |= {(target, s): token for s, token in contents.items()}

    def append(self, table: BlockTable, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.slots[self._slot(table, table.n_tokens)] = token
            table.n_tokens += 1

    def read(self, table: BlockTable) -> list[int | None]:
        return [self.slots.get(self._slot(table, i)) for i in range(table.n_tokens)]

    def _slot(self, table: BlockTable, i: int) -> tuple[int, int]:
        return table.blocks[i // self.block_size], i % self.block_size
