"""The scheduler: which requests take part in the next forward pass, with which tokens. No tensors.

Sources: Yu et al. 2022 (Orca), iteration-level scheduling; Kwon et al. 2023, section 4.5
(preemption by recomputation); Agrawal et al. 2024 (Sarathi-Serve), chunked prefill with decodes
first.

A step has room for `max_batch_tokens` tokens. They are given out in this order:

1. every running request that decodes gets its one token;
2. prompts under way get chunks of what is left;
3. waiting requests are let in, first come, first served, while their prompts fit into free blocks;
4. what is still left goes to draft tokens, which may follow a decoding request's own and are
   verified in the same pass.

When blocks run out, the youngest running request gives all of its blocks back and waits at the
head of the queue. What it has produced is kept, and computed again as part of its prompt. The
oldest request is never sent back while another one runs, and it fits when it runs alone (`check`
refuses what does not), so every request ends.
Not here: priorities, fairness between users, swapping to CPU memory, where draft tokens come from.
"""

from collections import deque
from collections.abc import Iterable

from minillm.blocks import BlockManager, BlockTable, OutOfBlocks
from minillm.serving.request import Request
from minillm.serving.step_plan import StepDraft, StepPlan
from minillm.tools.checks import check_whole


class QueueFull(RuntimeError):
    """The queue has as many requests as it may hold."""


class Scheduler:
    """Admission, chunked prefill and preemption over a `BlockManager`.

    policy "continuous" fills free places at every step; "static" lets requests in only when none
    is running. max_waiting: the most requests that may wait while all places are taken; None is no
    limit.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_seqs: int,
        max_batch_tokens: int,
        policy: str = "continuous",
        chunked_prefill: bool = True,
        max_waiting: int | None = None,
    ):
        if policy not in ("continuous", "static"):
            raise ValueError(f"policy is {policy!r}; choose continuous or static.")
        check_whole("max_seqs", max_seqs)
        check_whole("max_batch_tokens", max_batch_tokens)
        if max_waiting is not None:
            check_whole("max_waiting", max_waiting)
        if max_batch_tokens < max_seqs:
            raise ValueError(
                f"max_batch_tokens is {max_batch_tokens} with max_seqs {max_seqs}; each running "
                "request needs room for a token a step."
            )
        self.manager, self.max_seqs, self.max_batch_tokens = manager, max_seqs, max_batch_tokens
        self.policy, self.chunked_prefill, self.max_waiting = policy, chunked_prefill, max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.capacity = manager.n_available  # blocks that one request can have at most
        self.preemptions = 0
        # Tokens looked up in the prefix cache when requests first came in, and those found there.
        self.query_tokens = 0
        self.hit_tokens = 0

    def check(self, request: Request, copies: int = 1) -> None:
        """Raise ValueError if the request could never run, QueueFull if it may not wait.

        copies: how many requests like this one are about to be submitted.
        """
        most = request.n_prompt + max(0, request.max_new_tokens - 1)  # the last is never computed
        blocks = -(-most // self.manager.block_size)
        asked = f"{request.n_prompt} prompt tokens and {request.max_new_tokens} new ones"
        if blocks > self.capacity:
            raise ValueError(
                f"{asked} need {blocks} blocks of {self.manager.block_size}, and there are "
                f"{self.capacity}; ask for fewer tokens or make more blocks."
            )
        if not self.chunked_prefill and most > self.max_batch_tokens:
            raise ValueError(
                f"{asked} may have to be computed in one step of at most {self.max_batch_tokens}; "
                "raise max_batch_tokens or allow chunked_prefill."
            )
        here = len(self.running) + len(self.waiting)
        if self.max_waiting is not None and here + copies > self.max_seqs + self.max_waiting:
            raise QueueFull(
                f"{here} requests are here, and {self.max_seqs} may run (max_seqs) and "
                f"{self.max_waiting} wait (max_waiting), so {copies} more cannot be taken; try "
                "again later."
            )

    def submit(self, request: Request) -> None:
        """Queue a request that `check` has let pass."""
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Reserve the blocks of the next step and say who computes what in it."""
        step = StepDraft(self.max_batch_tokens)
        may_admit = self.policy == "continuous" or not self.running
        decoding = [r for r in self.running if r.decoding]
        # 1, 2: decodes, then chunks of the prompts under way.
        for request in decoding + [r for r in self.running if not r.decoding]:
            self._continue(request, step)
        # 3: newcomers.
        if may_admit:
            self._admit_all(step)
        # 4: draft tokens.
        for request in decoding:
            # It may have been sent back and let in again since.
            if request in step.chosen and request.decoding:
                self._add_draft(request, step)
        return step.plan()

    def _continue(self, request: Request, step: StepDraft) -> None:
        """Give a running request its tokens; where blocks run out, send the youngest back."""
        n = self._chunk(request, step.budget)
        while n and request in self.running:  # until it has blocks, or is sent back itself
            try:
                step.copies += self.manager.reserve(request.table, n)
            except OutOfBlocks:
                victim = self.running[-1]
                step.remove(victim)
                self._preempt(victim)
            else:
                step.add(request, n)
                return

    def _admit_all(self, step: StepDraft) -> None:
        """Let requests in while there are places, tokens and blocks.

        A request that was just sent back is first in the queue. It needs at least as many blocks
        as it gave back, and one of those is taken, so it is let in again only if a sample that
        shared them was sent back as well.
        """
        while (step.budget or self.policy == "static") and len(self.running) < self.max_seqs:
            request = next((r for r in self.waiting if r.parent is None), None)
            n = None if request is None else self._admit(request, step.budget)
            if n is None:
                return
            if n:
                step.add(request, n)

    def _add_draft(self, request: Request, step: StepDraft) -> None:
        n = min(len(request.draft_tokens), step.budget)
        if not n:
            return
        try:
            step.copies += self.manager.reserve(request.table, 1 + n)
        except OutOfBlocks:
            return  # draft tokens are not worth sending anyone back
        step.add(request, n)

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of `ids` that it may compute now; 0 if it waits for a step with more room."""
        n = min(request.n_pending, budget)
        return n if self.chunked_prefill or n == request.n_pending else 0

    def _admit(self, request: Request, budget: int) -> int | None:
        """Let a waiting request in, if there are blocks for all that it has to compute.

        Returns its tokens for this step, or None if it has to wait. A static batch is full from
        its first step on: requests beyond the budget begin in the next step, with 0 tokens now.
        """
        request.table = table = self.manager.start(request.ids)
        n = self._chunk(request, budget)
        no_room = self.manager.needed(table, request.n_pending) > self.manager.n_available
        if no_room or (not n and self.policy == "continuous"):
            self.manager.release(table)
            return None
        if not request.admitted:
            self.query_tokens += len(request.ids)
            self.hit_tokens += table.n_tokens
        request.admitted = True
        # Nothing has to be copied: a prefix from the cache ends with a full block.
        self.manager.reserve(table, n)
        self.waiting.remove(request)
        self.running.append(request)
        return n

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.release(request.table)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def fork(self, parent: Request) -> list[Request]:
        """Start the samples of `parent` that find a place, in its blocks; returns them.

        To be called when `parent` has computed its prompt, and before it goes on. The samples
        that find no place wait in the queue like any request.
        """
        started = []
        for request in [r for r in self.waiting if r.parent is parent]:
            request.parent = None
            if len(self.running) < self.max_seqs:
                request.table = self.manager.fork(parent.table)
                request.admitted, request.admitted_at = True, parent.admitted_at
                self.waiting.remove(request)
                self.running.append(request)
                started.append(request)
        return started

    def finish(self, request: Request) -> None:
        """Take a request out that is over, for whatever reason, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.manager.release(request.table)
        for sample in self.waiting:
            if sample.parent is request:
                sample.parent = None  # no other request will compute its prompt now

    def restart(self, requests: Iterable[Request]) -> None:
        """Start again with these unfinished requests, oldest first, after an interrupted step.

        Every block is freed and every request waits. What they produced is kept.
        """
        self.manager.reset()
        self.running.clear()
        self.waiting = deque(requests)
        for request in self.waiting:
            request.table = BlockTable()
            # A parent that is over, or beyond its prompt, will not compute the prompt for others.
            parent = request.parent
            if parent is not None and (parent.n_produced or parent.finish_reason):
                request.parent = None

    def slots(self) -> tuple[int, int]:
        """(slots of the blocks that requests hold, slots of those without a token).

        A block that several requests share counts once.
        """
        size = self.manager.block_size
        empty: dict[int, int] = {}  # of blocks that are not full
        for request in self.running:
            table = request.table
            for i in range(table.n_tokens // size, len(table.blocks)):
                room = size - max(0, table.n_tokens - i * size)
                empty[table.blocks[i]] = min(room, empty.get(table.blocks[i], size))
        return (self.capacity - self.manager.n_available) * size, sum(empty.values())
