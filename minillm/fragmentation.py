"""Where cache memory goes: a simulation of five ways to hand it out to sequences. Pure Python.

Source: Kwon et al. 2023, section 3.1 and figure 2 (20 to 38% of the reserved memory held tokens).

Five policies. With the first four, every sequence lies in one piece:

    max      a piece as long as any sequence may become
    answer   a piece for the sequence's prompt and the longest answer of the trace
    oracle   a piece of the sequence's final length, known in advance
    buddy    a piece of that length, rounded up to a power of two
    paged    blocks, one by one, as tokens come

Each slot of the pool has room for one token and is in one of five states:

    used       it holds a token
    reserved   handed out, and its sequence will put a token there
    internal   handed out, and will never hold a token
    external   free, and the first sequence in the queue would fit if all free slots were adjacent
    free       any other free slot
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minillm.blocks import BlockManager, BlockTable, OutOfBlocks
from minillm.pieces import Buddy, FirstFit
from minillm.tools.checks import check_whole

POLICIES = ("max", "answer", "oracle", "buddy", "paged")


@dataclass(frozen=True)
class Sample:
    """The pool after one step: slots by state, which sum to its size, and sequences by state.

    Then what happened in the step: sequences that got their last token, sequences that were sent
    back to the queue, and tokens computed again for some that had been sent back and were let in.
    """

    used: int
    reserved: int
    internal: int
    external: int
    free: int
    running: int
    waiting: int
    finished: int = 0
    sent_back: int = 0
    recomputed: int = 0


@dataclass(eq=False)
class _Sequence:
    prompt: int
    final: int  # tokens at its end, prompt included
    stored: int = 0
    start: int = 0  # of its piece
    table: BlockTable = field(default_factory=BlockTable)

    @property
    def on_admission(self) -> int:
        """Tokens to be stored at once; one that was sent back keeps what it has produced."""
        return max(self.prompt, self.stored)


class _Pieces:
    """Each sequence in one piece of the pool, reserved when it is let in."""

    def __init__(self, policy: str, n_slots: int, max_len: int, longest_answer: int):
        self._policy, self._max_len, self._longest_answer = policy, max_len, longest_answer
        self._pool = Buddy(n_slots) if policy == "buddy" else FirstFit(n_slots)

    def admit(self, sequence: _Sequence) -> bool:
        """Take its memory, if there is enough in one piece."""
        start = self._pool.allocate(self._length(sequence))
        if start is None:
            return False
        sequence.start, sequence.stored = start, sequence.on_admission
        return True

    def grow(self, sequence: _Sequence) -> None:
        """One token more; its slot is reserved already."""
        sequence.stored += 1

    def leave(self, sequence: _Sequence) -> None:
        """Give its memory back."""
        self._pool.free(sequence.start, self._length(sequence))

    def sample(self, running: Sequence[_Sequence], waiting: Sequence[_Sequence]) -> Sample:
        """The pool by state."""
        used = sum(s.stored for s in running)
        reserved = sum(s.final - s.stored for s in running)
        internal = sum(self._taken(s) for s in running) - used - reserved
        external, free = 0, self._pool.n_free
        # The first in the queue was just refused. If it would fit into all gaps together, the gaps
        # are fragments.
        if waiting and free >= self._taken(waiting[0]):
            external, free = free, 0
        return Sample(used, reserved, internal, external, free, len(running), len(waiting))

    def _length(self, sequence: _Sequence) -> int:
        """Slots that are asked for."""
        if self._policy == "max":
            return self._max_len
        if self._policy == "answer":
            return min(sequence.prompt + self._longest_answer, self._max_len)
        return sequence.final

    def _taken(self, sequence: _Sequence) -> int:
        """Slots that the piece has."""
        length = self._length(sequence)
        return Buddy.rounded(length) if self._policy == "buddy" else length


class _Blocks:
    """Blocks one by one, as tokens come."""

    def __init__(self, n_slots: int, block_size: int):
        self._n_slots = n_slots
        self._manager = BlockManager(n_slots // block_size, block_size, prefix_caching=False)

    def admit(self, sequence: _Sequence) -> bool:
        """Take blocks for the tokens that it has, if it can also grow by one."""
        n = sequence.on_admission
        table = BlockTable()
        if self._manager.needed(table, n + 1) > self._manager.n_available:
            return False
        self._manager.reserve(table, n)
        table.n_tokens = sequence.stored = n
        sequence.table = table
        return True

    def grow(self, sequence: _Sequence) -> None:
        """One token more; OutOfBlocks if it needs a block and none is free."""
        self._manager.reserve(sequence.table, 1)
        sequence.table.n_tokens += 1
        sequence.stored += 1

    def leave(self, sequence: _Sequence) -> None:
        """Give its blocks back."""
        self._manager.release(sequence.table)

    def sample(self, running: Sequence[_Sequence], waiting: Sequence[_Sequence]) -> Sample:
        """The pool by state; no slot is reserved, and none is lost between pieces."""
        used = sum(s.stored for s in running)
        held = sum(len(s.table.blocks) for s in running) * self._manager.block_size
        free = self._n_slots - held
        return Sample(used, 0, held - used, 0, free, len(running), len(waiting))


def simulate(
    trace: Sequence[tuple[int, int]],
    policy: str,
    *,
    n_slots: int,
    max_len: int,
    block_size: int = 16,
    n_steps: int | None = None,
) -> list[Sample]:
    """Run requests, given as (prompt tokens, output tokens), through a pool of `n_slots` tokens.

    Returns one sample per step. All requests are in the queue from the start, first come, first
    served. In each step, requests are let in from the front of the queue until one does not fit;
    then every running sequence grows by a token, and leaves when it has its final length. When
    "paged" runs out of blocks, it sends the youngest sequence back to the queue, as
    `minillm.serving.scheduler` does; all its tokens are computed again when it is let in. A step
    counts the same whatever is computed in it.
    max_len: the most tokens of a request, prompt and output together. block_size: P, for "paged".
    n_steps: stop after that many steps, or with None when all requests are done.
    Raises ValueError for sizes that are not whole numbers, for a request without prompt or output
    or longer than max_len, and for a pool that cannot hold a sequence of max_len tokens.
    """
    _check(trace, policy, n_slots, max_len, block_size, n_steps)
    longest_answer = max((output for _, output in trace), default=0)
    memory = (
        _Blocks(n_slots, block_size)
        if policy == "paged"
        else _Pieces(policy, n_slots, max_len, longest_answer)
    )
    waiting = deque(_Sequence(prompt, prompt + output) for prompt, output in trace)
    running: list[_Sequence] = []  # oldest first
    samples: list[Sample] = []
    while (waiting or running) and (n_steps is None or len(samples) < n_steps):
        recomputed = _admit_all(memory, waiting, running)
        sent_back = _grow_all(memory, waiting, running)
        done = [s for s in running if s.stored == s.final]
        sample = memory.sample(running, waiting)
        samples.append(
            replace(sample, finished=len(done), sent_back=sent_back, recomputed=recomputed)
        )
        for sequence in done:
            running.remove(sequence)
            memory.leave(sequence)
    return samples


def _admit_all(
    memory: _Pieces | _Blocks, waiting: deque[_Sequence], running: list[_Sequence]
) -> int:
    """Let sequences in until one does not fit; returns the tokens that are computed again."""
    recomputed = 0
    while waiting:
        known = waiting[0].stored  # more than 0 if it was sent back
        if not memory.admit(waiting[0]):
            break
        recomputed += known
        running.append(waiting.popleft())
    return recomputed


def _grow_all(
    memory: _Pieces | _Blocks, waiting: deque[_Sequence], running: list[_Sequence]
) -> int:
    """A token more for each; where blocks run out, the youngest is sent back. Returns how many."""
    sent_back = 0
    for sequence in list(running):
        while sequence in running:
            try:
                memory.grow(sequence)
                break
            except OutOfBlocks:
                youngest = running.pop()
                memory.leave(youngest)
                waiting.appendleft(youngest)
                sent_back += 1
    return sent_back


def _check(
    trace: Sequence[tuple[int, int]],
    policy: str,
    n_slots: int,
    max_len: int,
    block_size: int,
    n_steps: int | None,
) -> None:
    """Raise ValueError for arguments that `simulate` could only loop or fail with."""
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; choose one of {', '.join(POLICIES)}.")
    check_whole("n_slots", n_slots)
    check_whole("max_len", max_len)
    check_whole("block_size", block_size)
    if n_steps is not None:
        check_whole("n_steps", n_steps, least=0)
    for prompt, output in trace:
        if prompt < 1 or output < 1 or prompt + output > max_len:
            raise ValueError(
                f"A request of {prompt} + {output} tokens; both must be 1 or more, and their sum "
                f"at most max_len, {max_len}."
            )
    largest = -(-max_len // block_size) * block_size
    if policy == "buddy":
        largest = Buddy.rounded(max_len)
    if n_slots < largest:
        raise ValueError(
            f"A pool of {n_slots} slots can't hold a sequence of {max_len} tokens; policy {policy} "
            f"needs {largest}."
        )
