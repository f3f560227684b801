"""What must hold of a pool of blocks at all times, and a memory that shows what would be read."""

from collections import Counter
from collections.abc import Iterable, Sequence

from minillm.blocks import BlockManager, BlockTable


def check_pool(manager: BlockManager, tables: Iterable[BlockTable]) -> None:
    """Every block is free, or held exactly by the tables that name it and by the prefix cache."""
    tables, allocator, size = list(tables), manager.allocator, manager.block_size
    held = Counter(block for table in tables for block in table.blocks)
    known = [entry.block for entry in manager._known.values()]
    assert len(set(known)) == len(known) and set(known) == set(manager._of_block)
    for table in tables:
        assert len(set(table.blocks)) == len(table.blocks)
        assert table.n_tokens <= len(table.blocks) * size
        assert len(table.prefixes) <= table.n_tokens // size
        # Blocks without a token are about to be written: no other sequence may have them.
        for block in table.blocks[-(-table.n_tokens // size) :]:
            assert allocator.ref_count(block) == 1
    for block in range(allocator.n_blocks):
        assert allocator.ref_count(block) == held[block] + (block in known)
    free = [block for block in range(allocator.n_blocks) if not allocator.ref_count(block)]
    assert sorted(allocator._free) == free
    assert set(manager._idle) == set(known) - held.keys()
    assert manager.n_available == allocator.n_blocks - len(held) >= 0


class Memory:
    """Pages that hold tokens where the real ones hold keys and values.

    As there, what a slot holds depends on all the tokens before it, so that the right tokens after
    the wrong ones are wrong.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        # (block, slot) -> (token, a number for it and all before it)
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All blocks are read before one is written, as `PagedKVCache.copy` does it."""
        every = range(self.block_size)
        read = [
            {s: self.slots[source, s] for s in every if (source, s) in self.slots}
            for source, _ in pairs
        ]
        for (_, target), contents in zip(pairs, read, strict=True):
            self.slots |= {(target, s): content for s, content in contents.items()}

    def write(self, table: BlockTable, i: int, token: int) -> None:
        """Store token number `i` of a sequence."""
        before = self.slots[self._slot(table, i - 1)][1] if i else hash(())
        self.slots[self._slot(table, i)] = token, hash((before, token))

    def append(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Store tokens after those of the table, and count them."""
        for token in tokens:
            self.write(table, table.n_tokens, int(token))
            table.n_tokens += 1

    def read(self, table: BlockTable, n: int | None = None) -> list[int | None]:
        """The sequence's first `n` tokens, or all.

        None stands for those that were computed after others than these.
        """
        tokens: list[int | None] = []
        number = hash(())
        for i in range(table.n_tokens if n is None else n):
            token, stored = self.slots.get(self._slot(table, i), (None, None))
            number = None if token is None or number is None else hash((number, token))
            tokens.append(token if number is not None and number == stored else None)
        return tokens

    def _slot(self, table: BlockTable, i: int) -> tuple[int, int]:
        return table.blocks[i // self.block_size], i % self.block_size
