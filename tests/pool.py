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
    """Pages that hold tokens where the real ones hold keys and values; and like those, what a slot holds depends on all the
    tokens before it, so that the right tokens after the wrong ones are wrong."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) -> (token, a number for it and all before it)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All blocks are read before one is written, as `PagedKVCache.copy` does it."""
        read = [{s: self.slots[source, s] for s in range(self.block_size) if (source, s) in self.slots} for source, _ in pairs]
        for (_, target), contents in zip(pairs, read, strict=True):
            self.slots |= {(target, s): content for s, content in contents.items()}

    def append(self, table: BlockTable, tokens: Sequence[int]) -> None:
        number = self.slots[self._slot(table, table.n_tokens - 1)][1] if table.n_tokens else hash(())
        for token in tokens:
            number = hash((number, int(token)))
            self.slots[self._slot(table, table.n_tokens)] = token, number
            table.n_tokens += 1

    def read(self, table: BlockTable) -> list[int | None]:
        """The sequence's tokens; None from where on they were computed after others than these."""
        tokens: list[int | None] = []
        number = hash(())
        for i in range(table.n_tokens):
            token, stored = self.slots.get(self._slot(table, i), (None, None))
            number = None if token is None or number is None else hash((number, int(token)))
            tokens.append(token if number is not None and number == stored else None)
        return tokens

    def _slot(self, table: BlockTable, i: int) -> tuple[int, int]:
        return table.blocks[i // self.block_size], i % self.block_size
