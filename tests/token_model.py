"""A model for the real engine that computes nothing: its cache holds tokens, and what it says next
depends on every token that a sequence would read.

So any mistake in blocks, copies, prefixes or order changes an answer, and a step takes
microseconds.
"""

import hashlib
from array import array
from types import SimpleNamespace

import torch
from pool import Memory, check_pool
from torch import Tensor

from minillm import Engine, EngineConfig, Sampling
from minillm.paged import PagedKVCache
from minillm.sampling import next_tokens
from minillm.serving.request import Request
from minillm.serving.step_plan import StepPlan

VOCAB = 3


def logits_after(ids: list[int]) -> list[float]:
    """What the model says after these tokens: any mistake in one of them may show."""
    digest = hashlib.blake2s(array("q", ids).tobytes(), digest_size=2 * VOCAB).digest()
    return [int.from_bytes(digest[2 * i : 2 * i + 2], "little") / 2**14 for i in range(VOCAB)]


def answer(prompt: list[int], n: int, sampling: Sampling | None = None) -> list[int]:
    """The right tokens: the definition, without an engine."""
    ids = list(prompt)
    uniforms = sampling.uniforms(n) if sampling else [0.0] * n
    for u in uniforms:
        ids += next_tokens(torch.tensor([logits_after(ids)]), [sampling], [u])
    return ids[len(prompt) :]


class TokenStorage:
    """Stands for `KVStorage`: the engine copies blocks through it."""

    nbytes = 0

    def __init__(self, model: "TokenModel", shape: tuple[int, int]):
        self.memory = model.memory = Memory(shape[1])

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.memory.copy(list(zip(source.tolist(), target.tolist(), strict=True)))


class TokenModel:
    """Stands for a `Decoder`; `hidden` gives logits already."""

    config = SimpleNamespace(vocab_size=VOCAB, max_seq_len=10_000, name="tokens", d_head=1)
    device, dtype, kv_format = torch.device("cpu"), torch.float32, "tokens"
    memory: Memory

    def hidden(self, tokens: Tensor, batch: object) -> Tensor:
        rows, new = [], iter(tokens[0].tolist())
        for table, n in zip(batch.tables, batch.n_new, strict=True):
            for i in range(table.n_tokens, table.n_tokens + n):
                self.memory.write(table, i, next(new))
                read = self.memory.read(table, i + 1)
                assert None not in read, "a sequence reads what was computed after other tokens"
                rows.append(logits_after(read))
        batch.advance(sum(batch.n_new))
        return torch.tensor([rows])

    def head(self, hidden: Tensor) -> Tensor:
        return hidden.view(-1, VOCAB)


class CheckedEngine(Engine):
    """The real engine over a `TokenModel`, with every plan checked."""

    def __init__(
        self, n_blocks: int, block_size: int, *, proposer: object = None, **options: object
    ):
        defaults = {"max_seqs": 4, "max_batch_tokens": 16}
        config = EngineConfig(n_blocks, block_size, **(defaults | options))
        super().__init__(TokenModel(), config, proposer=proposer)
        self.manager, self.memory = self.cache.manager, self.model.memory
        real = self.scheduler.schedule

        def schedule() -> StepPlan:
            before, queue = list(self.scheduler.running), list(self.scheduler.waiting)
            plan = real()
            self.check_plan(plan, before, queue)
            return plan

        self.scheduler.schedule = schedule

    def _new_cache(self) -> PagedKVCache:
        c = self.config
        return PagedKVCache(
            self.model, c.n_blocks, c.block_size, prefix_caching=c.prefix_caching,
            storage=TokenStorage,
        )  # fmt: skip

    def add(self, prompt: list[int], n: int, seeds: list[int | None] = (None,)) -> list[Request]:
        """Submit samples of one prompt, greedy without a seed; returns their requests."""
        samplings = [None if seed is None else Sampling(1.0, seed=seed) for seed in seeds]
        ids = self.submit_samples(prompt, n, samplings)
        return [self._requests[i] for i in ids]

    def work(self) -> list[tuple[int, int]]:
        """(request id, tokens) of the next step, which is then done."""
        self.step()
        return [(i, n) for i, n, _ in self.stats.timeline[-1].work]

    def check_plan(self, plan: StepPlan, before: list[Request], queue: list[Request]) -> None:
        """What must hold of every step, whatever came before."""
        s, size = self.scheduler, self.manager.block_size
        work = {w.request: w for w in plan.work}
        assert len(work) == len(plan.work) and all(w.tokens for w in plan.work)
        assert sum(len(w.tokens) for w in plan.work) <= s.max_batch_tokens
        assert len(s.running) <= s.max_seqs and set(work) <= set(s.running)
        assert work or not (s.running or s.waiting), "something can always be done"
        decodes = [w.decoding for w in plan.work]
        assert decodes == sorted(decodes, reverse=True), "decodes first"
        for request, w in work.items():
            pending = request.ids[request.table.n_tokens :]
            if w.decoding:
                n_guesses = len(w.rows) - 1
                assert w.tokens == pending + request.draft_tokens[:n_guesses]
            else:
                assert w.tokens == pending[: len(w.tokens)]
                assert len(w.rows) == (len(w.tokens) == len(pending))
                assert s.chunked_prefill or len(w.tokens) == len(pending)
        # The youngest are sent back, to the head of the queue, the oldest of them first, and no
        # request is let in then.
        stayed = [request for request in before if request in s.running]
        sent_back = before[len(stayed) :]
        assert stayed == before[: len(stayed)]
        assert list(s.waiting)[: len(sent_back)] == sent_back
        let_in = s.running[len(stayed) :]
        assert not (sent_back and let_in)
        assert all(r in work for r in stayed if r.decoding), "every decode gets its token"
        assert s.policy == "static" or all(request in work for request in let_in)
        candidates = [request for request in queue if request.parent is None]
        assert let_in == candidates[: len(let_in)], "first come, first served"
        assert not (s.policy == "static" and let_in and before)
        # No request writes where another reads or writes.
        written = set()
        for request, w in work.items():
            table = request.table
            for i in range(table.n_tokens, table.n_tokens + len(w.tokens)):
                slot = table.blocks[i // size], i % size
                assert slot not in written and self.manager.allocator.ref_count(slot[0]) == 1
                written.add(slot)
        # Each copy is for a request of the step that goes on in the middle of that block.
        middles = [
            r.table.blocks[r.table.n_tokens // size] for r in work if r.table.n_tokens % size
        ]
        assert len({target for _, target in plan.copies} & set(middles)) == len(plan.copies)

    def check(self) -> None:
        """What must hold between two steps."""
        s = self.scheduler
        check_pool(self.manager, [request.table for request in s.running])
        assert all(not r.table.blocks and r.table.n_tokens == 0 for r in s.waiting)
        for request in s.running:
            assert request.parent is None
            assert self.memory.read(request.table) == request.ids[: request.table.n_tokens]
        alive = {*s.running, *s.waiting}
        assert all(r.parent in alive for r in s.waiting if r.parent is not None)

    def finish(self) -> dict[int, list[int]]:
        """Run to the end; returns the tokens of what was still to be handed out.

        The number of steps has a bound: the oldest request gets on at every step, and is never
        sent back while there are others.
        """
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        bound = sum(r.n_prompt + r.max_new_tokens for r in alive) + 1
        answers: dict[int, list[int]] = {}
        while self.busy:
            answers |= {c.request_id: c.tokens for c in self.step()}
            self.check()
            bound -= 1
            assert bound >= 0, "a request starves"
        return answers
