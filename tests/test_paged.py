"""Blocks: none leaked, freed twice, shared or found by accident; paging changes no logits."""

import copy
from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import lively
from pool import Memory, check_pool
from tiers import INTERPRETED
from torch import Tensor

from minillm import BlockAllocator, Decoder, OutOfBlocks, PagedKVCache
from minillm.blocks import BlockManager, BlockTable
from minillm.paged import BACKENDS

interpret = pytest.mark.interpret
HERE = [pytest.param(name, marks=interpret) if name == "triton" else name for name in BACKENDS]


# The allocator


class Allocator(RuleBasedStateMachine):
    """Against a dictionary of counts."""

    @initialize(n_blocks=st.integers(1, 6))
    def make(self, n_blocks):
        self.allocator, self.counts = BlockAllocator(n_blocks), dict.fromkeys(range(n_blocks), 0)

    @rule()
    def allocate(self):
        if 0 not in self.counts.values():
            with pytest.raises(
                OutOfBlocks, match=rf"All {len(self.counts)} blocks are in use; free some"
            ):
                self.allocator.allocate()
            return
        block = self.allocator.allocate()
        assert self.counts[block] == 0
        self.counts[block] = 1

    @rule(block=st.integers(0, 5), change=st.sampled_from([1, -1]))
    def share_or_free(self, block, change):
        method = self.allocator.share if change == 1 else self.allocator.free
        if block not in self.counts:
            with pytest.raises(
                ValueError,
                match=rf"no block {block}; blocks are numbered from 0 to {len(self.counts) - 1}",
            ):
                method(block)
        elif not self.counts[block]:
            with pytest.raises(
                ValueError, match=f"Block {block} is free already; it was freed more often than"
            ):
                method(block)
        else:
            assert method(block) == (block if change == 1 else None)
            self.counts[block] += change

    @invariant()
    def counts_agree(self):
        assert {block: self.allocator.ref_count(block) for block in self.counts} == self.counts
        assert self.allocator.n_free == list(self.counts.values()).count(0)


Allocator.TestCase.settings = settings(deadline=None, max_examples=50, stateful_step_count=40)
TestAllocator = Allocator.TestCase


@pytest.mark.parametrize("block", [-1, 2, 1.0, True, None, "0"], ids=repr)
def test_foreign_ids_are_refused(block):
    allocator = BlockAllocator(2)
    allocator.allocate(), allocator.allocate()
    for method in (allocator.free, allocator.share):
        with pytest.raises(
            ValueError, match=r"There is no block .*; blocks are numbered from 0 to 1"
        ):
            method(block)
    assert [allocator.ref_count(b) for b in (0, 1)] == [1, 1]


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None, "4"], ids=repr)
def test_refused_counts(n, tiny):
    with pytest.raises(ValueError, match=r"n_blocks is .*; it must be a whole number, 1 or more"):
        BlockAllocator(n)
    with pytest.raises(ValueError, match="n_blocks is"):
        BlockManager(n)
    with pytest.raises(ValueError, match=r"block_size is .*; it must be a whole number, 1 or more"):
        BlockManager(4, n)
    with pytest.raises(ValueError, match="block_size is"):
        PagedKVCache(tiny, 4, n)


def test_constant_time():
    """No method looks at more of its lists than an end or an index: others are refused here."""

    class Ends(list):
        def refuse(self, *_):
            raise AssertionError("takes time with the number of blocks")

        __iter__ = __contains__ = insert = remove = index = sort = count = refuse

        def pop(self, *at):
            assert not at
            return super().pop()

    allocator = BlockAllocator(1000)
    allocator._free, allocator._ref_counts = Ends(allocator._free), Ends(allocator._ref_counts)
    blocks = [allocator.allocate() for _ in range(1000)]
    for block in blocks:
        allocator.free(allocator.share(block))
        allocator.free(block)
    assert allocator.n_free == 1000


# The manager


class Colliding(int):
    """A token whose hash is that of every other."""

    def __hash__(self):
        return 7


class Manager(RuleBasedStateMachine):
    """Sequences that start, grow, shrink, fork, are remembered and end, in a simulated memory."""

    @initialize(
        n_blocks=st.integers(1, 9),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.booleans(),
        token=st.sampled_from([int, Colliding]),
    )
    def make(self, n_blocks, block_size, caching, token):
        self.manager = BlockManager(n_blocks, block_size, prefix_caching=caching)
        self.memory, self.token, self.size = Memory(block_size), token, block_size
        self.sequences: list[
            tuple[BlockTable, list[int]]
        ] = []  # with all its tokens, those not yet stored, too
        self.past: list[list[int]] = [[]]

    def pick(self, data) -> tuple[BlockTable, list[int]]:
        return data.draw(st.sampled_from(self.sequences))

    def draw(self, data, low: int, high: int) -> list[int]:
        return [
            self.token(t)
            for t in data.draw(st.lists(st.integers(0, 1), min_size=low, max_size=high))
        ]

    @rule(data=st.data())
    def start(self, data):
        past = data.draw(st.sampled_from(self.past))
        ids = past[: data.draw(st.integers(0, len(past)))] + self.draw(data, 1, 6)
        table = self.manager.start(ids)
        assert table.n_tokens < len(ids), "at least one token is left to compute"
        assert table.n_tokens == len(table.blocks) * self.size
        assert self.memory.read(table) == ids[: table.n_tokens]
        self.sequences.append((table, ids))

    def reserved(self, table: BlockTable, n: int) -> bool:
        """Reserve and copy; or see that nothing has changed."""
        manager = self.manager
        before = copy.deepcopy(
            (vars(manager.allocator), manager._known, list(manager._idle), table)
        )
        needed, available = manager.needed(table, n), manager.n_available
        try:
            copies = manager.reserve(table, n)
        except OutOfBlocks:
            assert needed > available
            assert (vars(manager.allocator), manager._known, list(manager._idle), table) == before
            return False
        # A block that only the prefix cache holds after it was copied can be taken at once.
        idle = sum(source in manager._idle for source, _ in copies)
        assert needed == available - manager.n_available + idle
        assert len(table.blocks) == max(
            len(before[-1].blocks), -(-(table.n_tokens + n) // self.size)
        )
        assert len(copies) <= 1
        self.memory.copy(copies)
        return True

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), n=st.integers(0, 9))
    def reserve_ahead(self, data, n):
        self.reserved(self.pick(data)[0], n)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), n=st.integers(1, 7), remember=st.booleans())
    def append(self, data, n, remember):
        table, ids = self.pick(data)
        missing = table.n_tokens + n - len(ids)
        new = self.draw(data, missing, missing) if missing > 0 else []
        if self.reserved(table, n):
            ids += new
            self.memory.append(table, ids[table.n_tokens : table.n_tokens + n])
            if remember:
                self.manager.remember(table, ids)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def rewind(self, data):
        """The sequence goes on with other tokens than before."""
        table, ids = self.pick(data)
        available = self.manager.n_available
        self.manager.rewind(table, data.draw(st.integers(0, table.n_tokens)))
        assert len(table.blocks) == -(-table.n_tokens // self.size)
        assert self.manager.n_available >= available
        del ids[table.n_tokens :]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        table, ids = self.pick(data)
        self.sequences.append((self.manager.fork(table), ids[: table.n_tokens]))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def remember(self, data):
        table, ids = self.pick(data)
        self.manager.remember(table, ids)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data):
        table, ids = self.pick(data)
        self.manager.release(table)
        assert table == BlockTable()
        self.sequences = [item for item in self.sequences if item[0] is not table]
        self.past.append(ids)

    @invariant()
    def accounted(self):
        check_pool(self.manager, [table for table, _ in self.sequences])
        if not self.manager.prefix_caching:
            assert not self.manager._known

    @invariant()
    def everybody_reads_their_own(self):
        for table, ids in self.sequences:
            assert self.memory.read(table) == ids[: table.n_tokens]
        for (_, tokens), known in self.manager._known.items():
            assert tuple(self.memory.slots[known.block, s][0] for s in range(self.size)) == tokens

    def teardown(self):
        for table, _ in getattr(self, "sequences", []):
            self.manager.release(table)
        if hasattr(self, "manager"):
            assert self.manager.n_available == self.manager.allocator.n_blocks


Manager.TestCase.settings = settings(deadline=None, max_examples=200, stateful_step_count=40)
TestManager = pytest.mark.slow(Manager.TestCase)


def test_rewinding_into_a_known_block_copies_it():
    manager = BlockManager(9, 4)
    table = stored(manager, list(range(10)), release=False)
    first, second, _ = table.blocks
    manager.rewind(table, 4)
    assert (table.n_tokens, list(table.blocks), len(table.prefixes)) == (6, [first, second], 1)
    assert manager.writes_shared(table) and manager.needed(table, 1) == 1
    ((source, target),) = manager.reserve(table, 1)
    assert source == second and list(table.blocks) == [first, target]
    assert list(manager.start(list(range(10))).blocks) == [first, second], "still known"


@pytest.mark.parametrize("n", [-1, 11, 1.0, True, None])
def test_refused_rewinds(n):
    manager = BlockManager(9, 4)
    table = stored(manager, list(range(10)), release=False)
    with pytest.raises(ValueError, match=r"rewind by .* tokens; the sequence has 10, so give 0 to"):
        manager.rewind(table, n)


@pytest.mark.parametrize("n", [-5, 1.5, "2"])
def test_refused_reservations(n):
    manager = BlockManager(9, 4)
    with pytest.raises(ValueError, match=r"n_new is .*; it must be a whole number, 0 or more"):
        manager.reserve(manager.start([1, 2]), n)
    assert manager.n_available == 9


def stored(manager: BlockManager, ids: list[int], *, release: bool = True) -> BlockTable:
    """A sequence that was computed and remembered."""
    table = manager.start(ids)
    manager.reserve(table, len(ids) - table.n_tokens)
    table.n_tokens = len(ids)
    manager.remember(table, ids)
    if release:
        manager.release(table)
    return table


@pytest.mark.parametrize(
    ("n", "hit"),
    [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12), (40, 12)],
)
def test_a_known_prefix_is_found(n, hit):
    """Whole blocks of 4, never the last token, no more than was stored: 14 tokens, 3 full."""
    manager = BlockManager(20, 4)
    first = stored(manager, list(range(14)), release=False)
    for _ in range(2):
        table = manager.start(list(range(n)))
        assert (table.n_tokens, table.blocks) == (hit, first.blocks[: hit // 4])
        manager.release(table)
    assert not manager.start([0, 1, 2, 99, 4, 5, 6, 7, 8]).blocks
    assert manager.start([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12]).blocks == first.blocks[:1]
    assert not manager.start(list(range(4, 14))).blocks  # the same block of tokens, after others


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(20, 4, prefix_caching=False)
    stored(manager, list(range(14)))
    assert not manager.start(list(range(14))).blocks and manager.allocator.n_free == 20


def test_equal_blocks_are_remembered_once():
    """Two sequences compute the same at once: the second's blocks stay its own."""
    manager = BlockManager(20, 2)
    tables = [manager.start([1, 2, 3, 4, 5]) for _ in range(2)]
    for table in tables:
        manager.reserve(table, 5)
        table.n_tokens = 5
    for table in tables:
        manager.remember(table, [1, 2, 3, 4, 5])
    assert manager.start([1, 2, 3, 4, 5]).blocks == tables[0].blocks[:2]
    manager.reserve(tables[1], 1)
    tables[1].n_tokens = 6
    manager.remember(tables[1], [1, 2, 3, 4, 5, 6])
    assert list(manager.start([1, 2, 3, 4, 5, 6, 7]).blocks) == [
        *tables[0].blocks[:2],
        tables[1].blocks[2],
    ]


def test_least_recently_used_goes_first():
    manager = BlockManager(6, 2)
    for i in (10, 20, 30):
        stored(manager, [i, i + 1, i + 2, i + 3])
    assert manager.allocator.n_free == 0 and manager.n_available == 6
    manager.release(manager.start([10, 11, 12, 13, 14]))  # used again: now 20 is the oldest

    def found() -> dict[int, int]:
        """Blocks that a request would find, without using them."""
        chains = {i: ((i, i + 1), (i + 2, i + 3)) for i in (10, 20, 30)}
        counts = {}
        for i, blocks in chains.items():
            prefix, counts[i] = 0, 0
            for tokens in blocks:
                known = manager._known.get((prefix, tokens))
                if known is None:
                    break
                prefix, counts[i] = known.prefix, counts[i] + 1
        return counts

    gone, holder = [], manager.start([1])
    for _ in range(6):
        manager.reserve(holder, 2)
        holder.n_tokens += 2
        gone.append(found())
    assert gone == [
        {10: 2, 20: 1, 30: 2},  # the last block first: without the ones before it is of no use
        {10: 2, 20: 0, 30: 2},
        {10: 2, 20: 0, 30: 1},
        {10: 2, 20: 0, 30: 0},
        {10: 1, 20: 0, 30: 0},
        {10: 0, 20: 0, 30: 0},
    ]
    with pytest.raises(OutOfBlocks, match="1 blocks are needed; 0 of 6 are available"):
        manager.reserve(holder, 1)


def test_free_blocks_are_taken_before_known_ones():
    manager = BlockManager(4, 2)
    stored(manager, [1, 2, 3, 4])
    manager.reserve(manager.start([9, 9, 9]), 4)
    assert manager.start([1, 2, 3, 4, 5]).n_tokens == 4


def test_a_block_whose_predecessor_was_evicted_is_not_found():
    """Its key names a prefix that no sequence can have again, even with the same tokens."""
    manager = BlockManager(4, 2)
    a = stored(manager, [1, 2, 3, 4], release=False)
    first, second = a.blocks
    manager.release(a)
    manager._idle.move_to_end(second)  # as if the second had been used later
    manager.reserve(b := manager.start([7, 7, 7]), 6)  # 3 blocks: two free, then the first
    assert first in b.blocks and second not in b.blocks
    manager.release(b)
    c = stored(manager, [1, 2, 5], release=False)
    assert manager.start([1, 2, 3, 4, 5]).blocks == c.blocks[:1]


def test_a_number_of_a_prefix_is_never_used_again():
    """Of three blocks the last is left; what is stored next is not taken for its predecessor."""
    manager = BlockManager(6, 2)
    table = stored(manager, [1, 2, 3, 4, 5, 6], release=False)
    third = table.blocks[2]
    manager.release(table)
    manager._idle.move_to_end(third)  # as if it had been used later
    manager.reserve(table := manager.start([9] * 10), 10)
    manager.release(table)
    assert list(manager._of_block) == [third]
    for i in range(10, 14):
        stored(manager, [i, i, 0])
        table = manager.start([i, i, 5, 6, 0])
        assert len(table.blocks) == 1
        manager.release(table)
    assert third in manager._of_block


def test_copy_on_write():
    manager = BlockManager(8, 4)
    a = manager.start([1] * 6)
    manager.reserve(a, 6)
    a.n_tokens = 6
    b, c = manager.fork(a), manager.fork(a)
    first, last = a.blocks
    assert (
        list(b.blocks) == list(c.blocks) == [first, last] and manager.allocator.ref_count(last) == 3
    )
    assert manager.needed(b, 1) == 1 and manager.needed(b, 3) == 2 and manager.needed(b, 0) == 0
    ((source, target),) = manager.reserve(b, 1)
    assert (
        source == last
        and list(b.blocks) == [first, target]
        and list(a.blocks) == list(c.blocks) == [first, last]
    )
    assert manager.reserve(b, 1) == []  # its own now
    ((source, target),) = manager.reserve(a, 4)
    assert source == last and list(a.blocks[:2]) == [first, target] and len(a.blocks) == 3
    assert manager.reserve(c, 2) == [] and list(c.blocks) == [
        first,
        last,
    ]  # the last one needs no copy
    check_pool(manager, [a, b, c])


def test_a_fork_at_a_blocks_end_copies_nothing():
    manager = BlockManager(8, 4)
    a = manager.start([1] * 8)
    manager.reserve(a, 8)
    a.n_tokens = 8
    b = manager.fork(a)
    assert manager.reserve(a, 1) == manager.reserve(b, 1) == []
    assert a.blocks[:2] == b.blocks[:2] and a.blocks[2] != b.blocks[2]


# The cache


SMALL = partial(lively, size=0.1)
MODEL = SMALL()


def ids_of(n: int, seed: int = 0) -> list[int]:
    return torch.randint(97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def full(ids: list[int], model: Decoder = MODEL) -> Tensor:
    """Logits (T, V) without any cache."""
    return model(torch.tensor([ids]))[0]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def forward(
    cache: PagedKVCache, tables: list[BlockTable], news: list[list[int]], model: Decoder = MODEL
) -> list[Tensor]:
    """Reserve, then one forward pass; logits (n, V) of each sequence's new tokens."""
    for table, new in zip(tables, news, strict=True):
        cache.reserve(table, len(new))
    logits = model(
        torch.tensor([list(chain(*news))]), cache.batch(tables, [len(new) for new in news])
    )[0]
    return list(logits.split([len(new) for new in news]))


CHUNKS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
@given(sequences=CHUNKS, late=st.integers(0, 3), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=12)
def test_ragged_batches_give_the_full_forward(backend, block_size, sequences, late, seed):
    """Prompts, chunks and single tokens of several sequences in one pass.

    Each sequence begins `late` passes after the last.
    """
    check_ragged(backend, block_size, sequences, late, seed)


def check_ragged(
    backend: str, block_size: int, sequences: list[list[int]], late: int, seed: int
) -> None:
    cache = PagedKVCache(MODEL, 250, block_size, prefix_caching=False, backend=backend)
    ids = [ids_of(sum(chunks), seed + i) for i, chunks in enumerate(sequences)]
    tables = [cache.manager.start(i) for i in ids]
    got: list[list[Tensor]] = [[] for _ in ids]
    for step in range(late * len(ids) + 6):
        turn = [
            (i, step - late * i)
            for i, chunks in enumerate(sequences)
            if 0 <= step - late * i < len(chunks)
        ]
        if turn:
            news = [ids[i][(n := tables[i].n_tokens) : n + sequences[i][k]] for i, k in turn]
            for (i, _), logits in zip(
                turn, forward(cache, [tables[i] for i, _ in turn], news), strict=True
            ):
                got[i].append(logits)
    for i, parts in enumerate(got):
        close(torch.cat(parts), full(ids[i]))
        assert tables[i].n_tokens == len(ids[i])


@interpret
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_ragged_batches_through_the_triton_kernel(block_size):
    check_ragged("triton", block_size, [[1, 1], [9, 1], [2, 7], [33, 8, 1]], 0, 0)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("n_shared", [1, 4, 6])
def test_forks_diverge(backend, block_size, n_shared):
    cache = PagedKVCache(MODEL, 60, block_size, backend=backend)
    prompt, tails = ids_of(n_shared), [ids_of(6, seed) for seed in (1, 2, 3)]
    parent = cache.manager.start(prompt)
    forward(cache, [parent], [prompt])
    tables = [parent, cache.manager.fork(parent), cache.manager.fork(parent)]
    got: list[list[Tensor]] = [[], [], []]
    for chunk in (slice(0, 1), slice(1, 2), slice(2, 6)):
        for mine, logits in zip(
            got, forward(cache, tables, [tail[chunk] for tail in tails]), strict=True
        ):
            mine.append(logits)
    for tail, parts in zip(tails, got, strict=True):
        close(torch.cat(parts), full(prompt + tail)[n_shared:])
    assert len({table.blocks[n_shared // block_size] for table in tables}) == 3
    assert len({tuple(table.blocks[: n_shared // block_size]) for table in tables}) == 1


@pytest.mark.parametrize("backend", HERE)
def test_a_found_prefix_gives_the_same_logits(backend):
    cache = PagedKVCache(MODEL, 40, 4, backend=backend)
    ids, other = ids_of(15), ids_of(30, 1)
    for _ in range(2):
        for sequence in (ids, other, ids[:9] + other[:9]):
            table = cache.manager.start(sequence)
            hit = table.n_tokens
            (logits,) = forward(cache, [table], [sequence[hit:]])
            close(logits, full(sequence)[hit:])
            cache.manager.remember(table, sequence)
            cache.manager.release(table)
    assert hit == 16  # the second time all but the last two of 18 tokens were there


@torch.no_grad()
def test_what_is_past_a_sequences_end_does_not_matter():
    """Blocks are used again: NaNs that another sequence left in them do no harm."""
    for backend in BACKENDS if INTERPRETED else ("auto", "reference", "sdpa"):
        cache = PagedKVCache(MODEL, 12, 4, backend=backend)
        cache.storage.k.fill_(torch.nan)
        cache.storage.v.fill_(torch.inf)
        ids = [ids_of(7, seed) for seed in range(3)]
        tables = [cache.manager.start(i) for i in ids]
        for chunk in (slice(0, 5), slice(5, 6), slice(6, 7)):
            logits = forward(cache, tables, [i[chunk] for i in ids])
        for mine, i in zip(logits, ids, strict=True):
            close(mine, full(i)[-1:])
        a, b = tables[0], cache.manager.start([5])  # of very different lengths in one decode step
        both = forward(cache, [a, b], [[8], [5]])
        close(both[0], full([*ids[0], 8])[-1:])
        close(both[1], full([5]))


def test_bytes_and_shapes():
    model = SMALL(n_layers=3, n_kv_heads=1)
    cache = PagedKVCache(model, 7, 5)
    assert (
        cache.storage.k.shape == cache.storage.v.shape == (3, 7, 5, 1, 8)
        and cache.nbytes == 2 * 4 * 3 * 7 * 5 * 8
    )
    assert PagedKVCache(model.to(torch.float16), 7, 5).nbytes == 2 * 2 * 3 * 7 * 5 * 8


def test_copies_are_read_before_any_is_written(tiny):
    cache = PagedKVCache(tiny, 4, 2)
    for x in (cache.storage.k, cache.storage.v):
        x.copy_(torch.arange(4.0)[None, :, None, None, None].expand_as(x))
    cache.copy([(0, 1), (1, 2), (0, 3)])
    for x in (cache.storage.k, cache.storage.v):
        assert (x == torch.tensor([0.0, 0, 1, 0])[None, :, None, None, None]).all()
    cache.copy([])


def test_refused_batches():
    cache = PagedKVCache(MODEL, 80, 4)
    a, b = (cache.manager.start([1, 2, 3]) for _ in range(2))
    with pytest.raises(
        ValueError, match=r"3 tokens after 0 don't fit in 0 blocks of 4; reserve them first"
    ):
        cache.batch([a], [3])
    cache.reserve(a, 4)
    cache.reserve(b, 4)
    with pytest.raises(
        ValueError, match=r"5 tokens after 0 don't fit in 1 blocks of 4; reserve them first"
    ):
        cache.batch([b, a], [4, 5])
    for tables, n_new in (([], []), ([a], []), ([a, b], [1])):
        with pytest.raises(
            ValueError,
            match=f"{len(tables)} block tables and {len(n_new)} token counts; give one",
        ):
            cache.batch(tables, n_new)
    for n in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="n_new is"):
            cache.batch([a], [n])
    with pytest.raises(ValueError, match="3 tokens were given for a batch of 4"):
        MODEL(torch.tensor([[1, 2, 3]]), cache.batch([a, b], [3, 1]))
    assert a.n_tokens == b.n_tokens == 0
    cache.reserve(a, 257)
    with pytest.raises(
        ValueError, match="257 positions are asked for; custom was trained for at most 256"
    ):
        cache.batch([a], [257])
    MODEL(torch.tensor([[1] * 256]), cache.batch([a], [256]))
    with pytest.raises(ValueError, match="257 positions"):
        cache.batch([a], [1])


def test_writing_into_a_shared_block_is_refused():
    cache = PagedKVCache(MODEL, 8, 4)
    a = cache.manager.start([1, 2])
    forward(cache, [a], [[1, 2]])
    b = cache.manager.fork(a)
    for table in (a, b):
        with pytest.raises(
            ValueError,
            match="Token 2 would go to a block that other sequences hold as well; reserve",
        ):
            cache.batch([table], [1])
    cache.reserve(a, 1)
    cache.batch([a, b], [1, 1])  # the other is now the only holder of its block


@pytest.mark.parametrize("backend", ["tiled", "fast", None])
def test_refused_backends(backend, tiny):
    with pytest.raises(
        ValueError, match=r"backend is .*; choose one of auto, reference, triton, sdpa"
    ):
        PagedKVCache(tiny, 4, backend=backend)
