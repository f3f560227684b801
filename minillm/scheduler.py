"""The scheduler: which requests take part in the next forward pass, and with how many tokens each. Pure Python.

Sources: Yu et al. 2022 (Orca), iteration-level scheduling; Kwon et al. 2023, section 4.5 (preemption by recomputation);
Agrawal et al. 2024 (Sarathi-Serve), chunked prefill with decodes first.

A step has room for `max_batch_tokens` tokens. First every running request that decodes gets its one token; then prompts
under way get chunks of what is left; then waiting requests are let in, first come, first served, while their prompts fit
into the blocks at hand. When blocks run out, the youngest running request gives back all of its own and waits at the
head of the queue; what it has produced is kept, and computed again as part of its prompt. The oldest is never the
youngest while there is another, and alone it fits (`submit` refuses what doesn't), so every request ends.
Not here: priorities, fairness between users, swapping to CPU memory.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from minillm.paged import BlockManager, BlockTable, OutOfBlocks


@dataclass(eq=False)
class Request:
    """One prompt on its way. `ids` holds the prompt and what has been produced; `table.n_tokens` of them are computed."""

    id: int
    ids: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Any = None
    parent: "Request | None" = None  # compute this one's prompt, then take it over: parallel samples of one prompt
    table: BlockTable = field(default_factory=BlockTable)
    n_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.ids)

    @property
    def tokens(self) -> list[int]:
        """What has been produced so far."""
        return self.ids[self.n_prompt :]

    @property
    def n_pending(self) -> int:
        """Tokens still to be computed before the next one can be produced: 1 while decoding."""
        return len(self.ids) - self.table.n_tokens


@dataclass
class Plan:
    """One step: requests with the number of tokens each computes, decodes first; and blocks to be copied before."""

    work: list[tuple[Request, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Admission, chunked prefill and preemption over a `BlockManager`.

    policy "continuous" fills free places at every step; "static" lets requests in only when none is running.
    """

    def __init__(
        self, manager: BlockManager, *, max_seqs: int, max_batch_tokens: int, policy: str = "continuous", chunked_prefill: bool = True
    ):
        if policy not in ("continuous", "static"):
            raise ValueError(f"policy is {policy!r}; choose continuous or static.")
        for name, value in (("max_seqs", max_seqs), ("max_batch_tokens", max_batch_tokens)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more.")
        if max_batch_tokens < max_seqs:
            raise ValueError(
                f"max_batch_tokens is {max_batch_tokens} with max_seqs {max_seqs}; each running request needs room for a token a step."
            )
        self.manager, self.max_seqs, self.max_batch_tokens = manager, max_seqs, max_batch_tokens
        self.policy, self.chunked_prefill = policy, chunked_prefill
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.capacity = manager.n_available  # blocks that one request can have at most
        self.preemptions = 0
        self.hit_tokens = 0  # tokens that were found in the prefix cache instead of computed

    def submit(self, request: Request) -> None:
        """Queue a request; ValueError if it could never run."""
        most = request.n_prompt + max(0, request.max_new_tokens - 1)  # the last token is never computed
        blocks = -(-most // self.manager.block_size)
        if blocks > self.capacity:
            raise ValueError(
                f"{request.n_prompt} prompt tokens and {request.max_new_tokens} new ones need {blocks} blocks of "
                f"{self.manager.block_size}, and there are {self.capacity}; ask for fewer tokens or make more blocks."
            )
        if not self.chunked_prefill and most > self.max_batch_tokens:
            raise ValueError(
                f"{request.n_prompt} prompt tokens and {request.max_new_tokens} new ones may have to be computed in one step of at most "
                f"{self.max_batch_tokens}; raise max_batch_tokens or allow chunked_prefill."
            )
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Reserve the blocks of the next step and say who computes how much in it."""
        plan: dict[Request, int] = {}
        copies: list[tuple[int, int]] = []
        budget = self.max_batch_tokens
        may_admit = self.policy == "continuous" or not self.running
        decoding = [r for r in self.running if r.n_pending == 1]
        prefilling = [r for r in self.running if r.n_pending > 1]
        for request in decoding + prefilling:
            n = self._share(request, budget)
            while n and request in self.running:  # until it has its blocks, or was sent back itself
                try:
                    copies += self.manager.reserve(request.table, n)
                except OutOfBlocks:
                    victim = self.running[-1]
                    gone = set(victim.table.blocks)
                    copies = [pair for pair in copies if pair[1] not in gone]
                    plan.pop(victim, None)
                    self._preempt(victim)
                else:
                    plan[request] = n
                    budget -= n
                    break
        # Whoever was just sent back is first in the queue and does not come in again: more is needed than was left of its blocks.
        while may_admit and (budget or self.policy == "static") and len(self.running) < self.max_seqs:
            request = next((r for r in self.waiting if r.parent is None), None)
            n = self._admit(request, budget) if request else None
            if n is None:
                break
            if n:
                plan[request] = n
                budget -= n
        return Plan(sorted(plan.items(), key=lambda item: item[0].n_pending > 1), copies)

    def _share(self, request: Request, budget: int) -> int:
        """Tokens that the request may compute now; 0 if it has to wait for a step with more room."""
        n = min(request.n_pending, budget)
        return n if self.chunked_prefill or n == request.n_pending else 0

    def _admit(self, request: Request, budget: int) -> int | None:
        """Let a waiting request in, if the blocks for all that it has to compute are there: its tokens for this step, or None
        if it has to wait. A static batch is full from the start; those beyond the budget begin in the next step, with 0 now."""
        request.table = self.manager.start(request.ids)
        n = self._share(request, budget)
        if (not n and self.policy == "continuous") or self.manager.needed(request.table, request.n_pending) > self.manager.n_available:
            self.manager.release(request.table)
            return None
        self.hit_tokens += request.table.n_tokens
        self.manager.reserve(request.table, n)  # nothing to copy: a prefix from the cache ends with a full block
        self.waiting.remove(request)
        self.running.append(request)
        return n

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.release(request.table)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def fork(self, parent: Request) -> list[Request]:
        """Once `parent` has computed its prompt, and before it goes on: start those of its samples that find a place, in the
        parent's blocks. The others wait in the queue like any request. Returns the started ones."""
        started = []
        for request in [r for r in self.waiting if r.parent is parent]:
            request.parent = None
            if len(self.running) < self.max_seqs:
                request.table = self.manager.fork(parent.table)
                self.waiting.remove(request)
                self.running.append(request)
                started.append(request)
        return started

    def finish(self, request: Request) -> None:
        """The request is over, for whatever reason: take it out and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.manager.release(request.table)
        for sample in self.waiting:
            if sample.parent is request:
                sample.parent = None  # nobody else will compute its prompt now

    def find(self, request_id: int) -> Request | None:
        """The running or waiting request of that number."""
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def slots(self) -> tuple[int, int]:
        """(slots of the blocks that requests hold, those of them without a token); a shared block counts once."""
        size = self.manager.block_size
        empty: dict[int, int] = {}  # of blocks that are not full
        for request in self.running:
            table = request.table
            for i in range(table.n_tokens // size, len(table.blocks)):
                room = size - max(0, table.n_tokens - i * size)
                empty[table.blocks[i]] = min(room, empty.get(table.blocks[i], size))
        return (self.capacity - self.manager.n_available) * size, sum(empty.values())
