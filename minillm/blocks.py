"""Memory in blocks of a few tokens: who holds which, and which can be shared. No tensors.

Sources: Kwon et al. 2023 (PagedAttention, vLLM), sections 3 and 4; Zheng et al. 2024 (SGLang) for
reuse across requests.
Cost: at most block_size - 1 empty slots a sequence, whatever its length.

    BlockAllocator   which blocks are free, and how many references each has
    BlockTable       where one sequence's tokens lie
    BlockManager     growing, shrinking and forking tables, copy-on-write, the prefix cache

A shared block is never written: a sequence that is about to write into one gets a copy first
(`BlockManager.reserve`). Only full blocks whose tokens are final are remembered for later
requests, so what is remembered never changes.
Not here: the keys and values themselves (`minillm.paged`); swapping blocks to the CPU's memory;
which request runs when (`minillm.serving.scheduler`).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.tools.checks import brief, check_whole


class OutOfBlocks(RuntimeError):
    """No block is free."""


class BlockAllocator:
    """`n_blocks` blocks, numbered from 0, each with a reference count.

    Every method takes constant time.
    """

    def __init__(self, n_blocks: int):
        check_whole("n_blocks", n_blocks)
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._ref_counts = [0] * n_blocks

    @property
    def n_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A free block, with one reference; raises OutOfBlocks if there is none."""
        if not self._free:
            raise OutOfBlocks(
                f"All {self.n_blocks} blocks are in use; free some, or make the cache with more."
            )
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more reference to `block`; returns the block."""
        self._check(block)
        self._ref_counts[block] += 1
        return block

    def free(self, block: int) -> None:
        """One reference fewer; after the last one the block is free."""
        self._check(block)
        self._ref_counts[block] -= 1
        if not self._ref_counts[block]:
            self._free.append(block)

    def ref_count(self, block: int) -> int:
        """References to `block`, of sequences and of the prefix cache; 0 if it is free."""
        return self._ref_counts[block]

    def _check(self, block: int) -> None:
        if type(block) is not int or not 0 <= block < self.n_blocks:
            raise ValueError(
                f"There is no block {brief(block)}; blocks are numbered from 0 to "
                f"{self.n_blocks - 1}."
            )
        if not self._ref_counts[block]:
            raise ValueError(
                f"Block {block} is free already; it was freed more often than allocated and shared."
            )


@dataclass
class BlockTable:
    """Where one sequence's tokens lie: token i in slot i % P of block blocks[i // P].

    Made by `BlockManager.start`. `blocks` holds int32 numbers, as the kernels read them, and
    lives as long as the sequence: a step changes it only where the sequence grew.
    """

    blocks: array = field(default_factory=lambda: array("i"))
    n_tokens: int = 0  # stored; the last block may have room for more
    # Prefix id of each leading full block that the prefix cache knows or was offered.
    prefixes: list[int] = field(default_factory=list)
    copied: int = 0  # leading entries that the copy on a GPU has (`serving/cuda_graphs.py`)

    @property
    def prefix(self) -> int:
        """Prefix id of the last known block; 0 is the empty prefix."""
        return self.prefixes[-1] if self.prefixes else 0


@dataclass(frozen=True)
class _Known:
    """A full block kept for later requests, and the id of the prefix that ends with it."""

    block: int
    prefix: int
    key: tuple[int, tuple[int, ...]]


class BlockManager:
    """Block tables over one allocator, and the prefix cache.

    The prefix cache finds full blocks by (id of the prefix before the block, the block's tokens): a
    chain from the first block on. A Python dict compares the keys themselves when their hashes
    agree, so a collision of hashes cannot hand out the wrong block. A prefix id is never used
    twice, so a block whose predecessors were evicted cannot be found through others that took
    their place. The cache holds one reference to every known block. Blocks to which nobody else
    holds one are idle: when blocks run out, the least recently used of them is evicted.
    """

    def __init__(self, n_blocks: int, block_size: int = 16, *, prefix_caching: bool = True):
        check_whole("block_size", block_size)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.allocator = BlockAllocator(n_blocks)
        self.reset()

    def reset(self) -> None:
        """Free every block and forget every prefix. All tables made before are void."""
        self.allocator = BlockAllocator(self.allocator.n_blocks)
        self._known: dict[tuple[int, tuple[int, ...]], _Known] = {}
        self._of_block: dict[int, _Known] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last_prefix = 0

    @property
    def n_available(self) -> int:
        """Blocks that can be handed out: free or idle."""
        return self.allocator.n_free + len(self._idle)

    def start(self, ids: Sequence[int]) -> BlockTable:
        """The table of a new sequence, with the longest known prefix of its tokens in place.

        At least one token is left to compute, since its logits are wanted.
        """
        table, size = BlockTable(), self.block_size
        # Block by block, as long as the chain of prefixes is known.
        for i in range((len(ids) - 1) // size if self.prefix_caching else 0):
            known = self._known.get((table.prefix, tuple(ids[i * size : (i + 1) * size])))
            if known is None:
                break
            table.blocks.append(self.allocator.share(known.block))
            self._idle.pop(known.block, None)
            table.prefixes.append(known.prefix)
        table.n_tokens = len(table.blocks) * size
        return table

    def needed(self, table: BlockTable, n_new: int) -> int:
        """Blocks that `reserve` would have to take."""
        new = -(-(table.n_tokens + n_new) // self.block_size) - len(table.blocks)
        return max(0, new) + (n_new > 0 and self.writes_shared(table))

    def reserve(self, table: BlockTable, n_new: int) -> list[tuple[int, int]]:
        """Make room for the sequence's next `n_new` tokens, or raise OutOfBlocks, changing nothing.

        Returns (from, to) pairs of blocks whose contents must be copied before anything is
        written: at most one, when the first new token goes to a shared block (copy-on-write).
        """
        check_whole("n_new", n_new, least=0)
        needed = self.needed(table, n_new)
        if needed > self.n_available:
            raise OutOfBlocks(
                f"{needed} blocks are needed; {self.n_available} of {self.allocator.n_blocks} "
                "are available."
            )
        copies = []
        # Copy on write: the sequence gives up the shared block and goes on in one of its own.
        if n_new > 0 and self.writes_shared(table):
            at = table.n_tokens // self.block_size
            shared, table.blocks[at] = table.blocks[at], self._take()
            copies.append((shared, table.blocks[at]))
            table.copied = min(table.copied, at)
            self._release(shared)
        # Then new blocks, as many as the tokens need beyond what the last one has room for.
        while len(table.blocks) * self.block_size < table.n_tokens + n_new:
            table.blocks.append(self._take())
        return copies

    def rewind(self, table: BlockTable, n: int) -> None:
        """Forget the sequence's last `n` tokens, and give back the blocks that are then empty.

        What the prefix cache knows of them stays known; going on in such a block makes a copy.
        """
        if type(n) is not int or not 0 <= n <= table.n_tokens:
            raise ValueError(
                f"rewind by {brief(n)} tokens; the sequence has {table.n_tokens}, so give 0 to "
                f"{table.n_tokens}."
            )
        table.n_tokens -= n
        while len(table.blocks) > -(-table.n_tokens // self.block_size):
            self._release(table.blocks.pop())
        table.copied = min(table.copied, len(table.blocks))
        del table.prefixes[table.n_tokens // self.block_size :]

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same tokens so far, in the same blocks.

        Both call `reserve` before they go on.
        """
        # Blocks reserved beyond the tokens are not shared.
        with_tokens = table.blocks[: -(-table.n_tokens // self.block_size)]
        blocks = array("i", [self.allocator.share(block) for block in with_tokens])
        return BlockTable(blocks, table.n_tokens, list(table.prefixes))

    def remember(self, table: BlockTable, ids: Sequence[int]) -> None:
        """Offer the sequence's full blocks to later requests.

        ids: the sequence's tokens as far as they are final. A block that holds others, such as
        draft tokens, is not offered.
        """
        size = self.block_size
        if not self.prefix_caching:
            return
        for i in range(len(table.prefixes), min(table.n_tokens, len(ids)) // size):
            key = (table.prefix, tuple(ids[i * size : (i + 1) * size]))
            known = self._known.get(key)
            # If another sequence was first with the same tokens, its block is the known one, and
            # this sequence's own stays private.
            if known is None:
                self._last_prefix += 1
                known = _Known(self.allocator.share(table.blocks[i]), self._last_prefix, key)
                self._known[key] = self._of_block[known.block] = known
            table.prefixes.append(known.prefix)

    def release(self, table: BlockTable) -> None:
        """Give up all blocks of a sequence; its table is empty afterwards."""
        # The last block goes first, to be evicted first: without its predecessors it is useless.
        while table.blocks:
            self._release(table.blocks.pop())
        table.n_tokens = table.copied = 0
        table.prefixes.clear()

    def writes_shared(self, table: BlockTable) -> bool:
        """Whether the next token would go to a shared block."""
        at = table.n_tokens // self.block_size
        return at < len(table.blocks) and self.allocator.ref_count(table.blocks[at]) > 1

    def _take(self) -> int:
        if not self.allocator.n_free and self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._known[self._of_block.pop(block).key]
            self.allocator.free(block)
        return self.allocator.allocate()

    def _release(self, block: int) -> None:
        self.allocator.free(block)
        if block in self._of_block and self.allocator.ref_count(block) == 1:
            self._idle[block] = None  # most recently used
