"""Where cache memory goes: a simulation of five ways to hand it out to sequences. Pure Python.

Sources: Kwon et al. 2023, section 3.1 and figure 2 (20 to 38% of the reserved memory held tokens);
Knuth, The Art of Computer Programming, volume 1, section 2.5 (first fit, the buddy system, external
fragmentation).

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minillm.blocks import BlockManager, BlockTable, OutOfBlocks
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


class FirstFit:
    """Pieces of any length from one line of slots: each from the first gap that is long enough."""

    def __init__(self, size: int):
        self.gaps = [(0, size)]  # (start, length), by start

    def allocate(self, length: int) -> int | None:
        """Start of a piece, or None if no gap is long enough."""
        for i, (start, gap) in enumerate(self.gaps):
            if gap >= length:
                self.gaps[i : i + 1] = [(start + length, gap - length)] if gap > length else []
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Give a piece back; adjacent gaps become one."""
        merged: list[tuple[int, int]] = []
        for a, n in sorted([*self.gaps, (start, length)]):
            if merged and sum(merged[-1]) == a:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((a, n))
        self.gaps = merged

    @property
    def n_free(self) -> int:
        return sum(n for _, n in self.gaps)


class Buddy:
    """Pieces whose lengths are powers of two.

    A larger piece is split into halves (buddies), and two buddies are joined when both are free.
    """

    def __init__(self, size: int):
        self._free: dict[int, set[int]] = {}  # length -> starts
        start = 0
        # A pool of any size is cut into a few powers of two.
        for power in reversed(range(size.bit_length())):
            if size >> power & 1:
                self._free.setdefault(1 << power, set()).add(start)
                start += 1 << power
        self._size = size

    @staticmethod
    def rounded(length: int) -> int:
        """Length of a piece for `length` tokens: the next power of two."""
        return 1 << (length - 1).bit_length()

    def allocate(self, length: int) -> int | None:
        """Start of a piece of the next power of two, or None."""
        wanted = self.rounded(length)
        fitting = [n for n, starts in self._free.items() if n >= wanted and starts]
        if not fitting:
            return None
        n = min(fitting)
        start = min(self._free[n])
        self._free[n].remove(start)
        while n > wanted:  # keep the first half; the second becomes free
            n //= 2
            self._free.setdefault(n, set()).add(start + n)
        return start

    def free(self, start: int, length: int) -> None:
        """Give back the piece for `length` tokens."""
        n = self.rounded(length)
        while start ^ n in self._free.get(n, ()):
            self._free[n].remove(start ^ n)
            start, n = min(start, start ^ n), 2 * n
        self._free.setdefault(n, set()).add(start)

    @property
    def n_free(self) -> int:
        return sum(n * len(starts) for n, starts in self._free.items())


@dataclass
class _Running:
    prompt: int
    final: int
    stored: int
    start: int = 0
    table: BlockTable | None = None


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
    counts the same whatever is computed in it. max_len: the most tokens of a request, prompt and
    output together. block_size: P, for "paged". n_steps: stop after that many steps, or with None
    when all requests are done. Raises ValueError for sizes that are not whole numbers, for a
    request without prompt or output or longer than max_len, and for a pool that cannot hold a
    sequence of max_len tokens.
    """
    _check(trace, policy, n_slots, max_len, block_size, n_steps)
    pool = Buddy(n_slots) if policy == "buddy" else FirstFit(n_slots)
    manager = BlockManager(n_slots // block_size, block_size, prefix_caching=False)
    queue = deque(_Running(prompt, prompt + output, 0) for prompt, output in trace)
    running: list[_Running] = []
    samples: list[Sample] = []

    longest_answer = max((output for _, output in trace), default=0)

    def length(request: _Running) -> int:
        if policy == "answer":
            return min(request.prompt + longest_answer, max_len)
        return max_len if policy == "max" else request.final

    def let_in(request: _Running) -> bool:
        """Take memory: for the prompt, or for the whole sequence where it must lie in one piece."""
        # A sequence that was sent back to the queue keeps the tokens it has produced.
        stored = max(request.prompt, request.stored)
        if policy == "paged":
            table = BlockTable()
            if manager.needed(table, stored + 1) > manager.n_available:
                return False
            manager.reserve(table, stored)
            table.n_tokens = stored
            request.table = table
        else:
            start = pool.allocate(length(request))
            if start is None:
                return False
            request.start = start
        request.stored = stored
        return True

    def leave(request: _Running) -> None:
        running.remove(request)
        if policy == "paged":
            manager.release(request.table)
        else:
            pool.free(request.start, length(request))

    while (queue or running) and (n_steps is None or len(samples) < n_steps):
        sent_back = recomputed = 0
        while queue:
            known = queue[0].stored  # more than 0 if it was sent back
            if not let_in(queue[0]):
                break
            recomputed += known
            running.append(queue.popleft())
        for request in list(running):
            while request in running:
                try:
                    if policy == "paged":
                        manager.reserve(request.table, 1)
                        request.table.n_tokens += 1
                    request.stored += 1
                    break
                except OutOfBlocks:
                    youngest = running[-1]
                    leave(youngest)
                    queue.appendleft(youngest)
                    sent_back += 1
        sample = _sample(running, queue, policy, pool, manager, n_slots, length)
        done = [r for r in running if r.stored == r.final]
        events = {"finished": len(done), "sent_back": sent_back, "recomputed": recomputed}
        samples.append(replace(sample, **events))
        for request in done:
            leave(request)
    return samples


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


def _sample(
    running: Sequence[_Running],
    queue: Sequence[_Running],
    policy: str,
    pool: FirstFit | Buddy,
    manager: BlockManager,
    n_slots: int,
    length: Callable[[_Running], int],
) -> Sample:
    used = sum(r.stored for r in running)
    if policy == "paged":
        held = sum(len(r.table.blocks) for r in running) * manager.block_size
        return Sample(used, 0, held - used, 0, n_slots - held, len(running), len(queue))
    sizes = [Buddy.rounded(r.final) if policy == "buddy" else length(r) for r in running]
    reserved = sum(r.final - r.stored for r in running)
    internal = sum(sizes) - used - reserved
    external, free = 0, pool.n_free
    if queue:
        # The first in the queue was just refused. If it would fit into all gaps together, the gaps
        # are fragments.
        wanted = length(queue[0])
        if pool.n_free >= (Buddy.rounded(wanted) if policy == "buddy" else wanted):
            external, free = pool.n_free, 0
    return Sample(used, reserved, internal, external, free, len(running), len(queue))
