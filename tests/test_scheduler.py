"""The scheduler with its blocks and prefix cache, against a model that computes each token from what its memory holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool import Memory, check_pool

from minillm.paged import BlockManager
from minillm.scheduler import Plan, Request, Scheduler


def next_token(ids: list[int], salt: int) -> int:
    """What the model says after these tokens: any mistake in one of them may show. `salt` stands for a seed."""
    return (sum((i + 1) * token for i, token in enumerate(ids)) + len(ids) // 2 + salt) % 3


def answer(prompt: list[int], n: int, salt: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(next_token(ids, salt))
    return ids[len(prompt) :]


class FakeEngine:
    """What `Engine.step` does, with tokens where the real one has keys and values, and with checks at every step."""

    def __init__(self, n_blocks: int, block_size: int, *, caching: bool = True, **options: object):
        self.manager = BlockManager(n_blocks, block_size, prefix_caching=caching)
        self.scheduler = Scheduler(self.manager, **({"max_seqs": 4, "max_batch_tokens": 16} | options))
        self.memory = Memory(block_size)
        self.salts: dict[Request, int] = {}
        self.done: dict[Request, list[int]] = {}

    def submit(self, prompt: list[int], n: int, salts: list[int]) -> list[Request]:
        requests: list[Request] = []
        for salt in salts:
            requests.append(Request(len(self.salts), list(prompt), n, parent=requests[0] if requests else None))
            self.scheduler.submit(requests[-1])
            self.salts[requests[-1]] = salt
        return requests

    def schedule(self) -> Plan:
        s, before, queue = self.scheduler, list(self.scheduler.running), list(self.scheduler.waiting)
        plan = s.schedule()
        work = dict(plan.work)
        assert len(work) == len(plan.work) and all(n >= 1 for n in work.values())
        assert sum(work.values()) <= s.max_batch_tokens and len(s.running) <= s.max_seqs
        assert work or not (s.running or s.waiting), "something can always be done"
        assert set(work) <= set(s.running) and all(n <= request.n_pending for request, n in work.items())
        pending = [request.n_pending > 1 for request, _ in plan.work]
        assert pending == sorted(pending), "decodes first"
        if not s.chunked_prefill:
            assert all(n == request.n_pending for request, n in work.items())
        # The youngest are sent back, to the head of the queue, the oldest of them first, and nobody is let in then.
        stayed = [request for request in before if request in s.running]
        sent_back = before[len(stayed) :]
        assert stayed == before[: len(stayed)] and list(s.waiting)[: len(sent_back)] == sent_back
        let_in = s.running[len(stayed) :]
        assert not (sent_back and let_in)
        assert all(request in work for request in stayed if request.n_pending == 1), "whoever decodes gets its token"
        assert s.policy == "static" or all(request in work for request in let_in)
        assert let_in == [request for request in queue if request.parent is None][: len(let_in)], "first come, first served"
        if s.policy == "static":
            assert not (let_in and before)
        # Nobody writes where another reads or writes.
        size, written = self.manager.block_size, set()
        for request, n in plan.work:
            table = request.table
            assert table.n_tokens + n <= len(table.blocks) * size
            for i in range(table.n_tokens, table.n_tokens + n):
                slot = table.blocks[i // size], i % size
                assert slot not in written and self.manager.allocator.holders(slot[0]) == 1
                written.add(slot)
        # Each copy is for somebody in the step who goes on in the middle of that block.
        going_on = [r.table.blocks[r.table.n_tokens // size] for r in work if r.table.n_tokens % size]
        assert len({target for _, target in plan.copies} & set(going_on)) == len(plan.copies)
        return plan

    def step(self) -> None:
        plan = self.schedule()
        self.memory.copy(plan.copies)
        for request, n in plan.work:
            at = request.table.n_tokens
            self.memory.append(request.table, request.ids[at : at + n])
        for request, _ in plan.work:
            self.manager.remember(request.table, request.ids)
            if request.n_pending == 0:
                started = self.scheduler.fork(request) if len(request.ids) == request.n_prompt else []
                for each in (request, *started):
                    each.ids.append(next_token(self.memory.read(each.table), self.salts[each]))
                    if len(each.tokens) == each.max_new_tokens:
                        self.finish(each)

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.done[request] = request.tokens

    def check(self) -> None:
        s = self.scheduler
        check_pool(self.manager, [request.table for request in s.running])
        assert all(request.table.blocks == [] and request.table.n_tokens == 0 for request in s.waiting)
        for request in s.running:
            assert self.memory.read(request.table) == request.ids[: request.table.n_tokens]
            assert request.parent is None
        assert all(request.parent in (*s.running, *s.waiting) for request in s.waiting if request.parent is not None)

    def run(self) -> int:
        """Until all is done; returns the number of steps, which has a bound: the oldest gets on at every step, and is never
        sent back while there are others."""
        s = self.scheduler
        bound = sum(request.n_prompt + request.max_new_tokens for request in (*s.running, *s.waiting)) + 1
        steps = 0
        while s.running or s.waiting:
            self.step()
            self.check()
            steps += 1
            assert steps <= bound, "somebody starves"
        return steps


class Serving(RuleBasedStateMachine):
    """Submissions, samples, aborts and steps in any order, with few blocks."""

    @initialize(
        n_blocks=st.integers(2, 12), block_size=st.integers(1, 4), caching=st.booleans(), chunked=st.booleans(),
        policy=st.sampled_from(["continuous", "continuous", "static"]), max_seqs=st.integers(1, 5), extra=st.integers(0, 20),
    )  # fmt: skip
    def make(self, n_blocks, block_size, caching, chunked, policy, max_seqs, extra):
        self.engine = FakeEngine(
            n_blocks, block_size, caching=caching, policy=policy, max_seqs=max_seqs, max_batch_tokens=max_seqs + extra,
            chunked_prefill=chunked,
        )  # fmt: skip
        self.prompts: list[list[int]] = [[]]
        self.aborted: set[Request] = set()

    @rule(data=st.data(), n=st.integers(1, 8), salts=st.just([0]) | st.lists(st.integers(0, 2), min_size=2, max_size=4))
    def submit(self, data, n, salts):
        engine = self.engine
        past = data.draw(st.sampled_from(self.prompts))
        prompt = past[: data.draw(st.integers(0, len(past)))] + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        most = len(prompt) + n - 1
        fits = -(-most // engine.manager.block_size) <= engine.manager.allocator.n_blocks
        if fits and (engine.scheduler.chunked_prefill or most <= engine.scheduler.max_batch_tokens):
            engine.submit(prompt, n, salts)
            self.prompts.append(prompt + answer(prompt, n, salts[0]))
        else:
            queue = list(engine.scheduler.waiting)
            with pytest.raises(ValueError, match="ask for fewer tokens or make more blocks" if not fits else "raise max_batch_tokens or"):
                engine.submit(prompt, n, salts)
            assert list(engine.scheduler.waiting) == queue

    @rule()
    def step(self):
        self.engine.step()

    @precondition(lambda self: self.engine.scheduler.running or self.engine.scheduler.waiting)
    @rule(data=st.data())
    def abort(self, data):
        s = self.engine.scheduler
        request = data.draw(st.sampled_from(sorted((*s.running, *s.waiting), key=lambda request: request.id)))
        assert s.find(request.id) is request
        self.engine.finish(request)
        self.aborted.add(request)
        assert s.find(request.id) is None

    @invariant()
    def all_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            engine = self.engine
            engine.run()
            for request, salt in engine.salts.items():
                right = answer(request.ids[: request.n_prompt], request.max_new_tokens, salt)
                got = engine.done[request]
                assert got == (right[: len(got)] if request in self.aborted else right)
            assert engine.manager.n_available == engine.manager.allocator.n_blocks


Serving.TestCase.settings = settings(deadline=None, max_examples=300, stateful_step_count=40)
TestServing = Serving.TestCase


# One at a time


def work(engine: FakeEngine) -> list[tuple[int, int]]:
    """(request id, tokens) of the next step, which is then done."""
    done: list[tuple[int, int]] = []
    real = engine.schedule

    def schedule() -> Plan:
        plan = real()
        done.extend((request.id, n) for request, n in plan.work)
        return plan

    engine.schedule = schedule
    engine.step()
    engine.schedule = real
    return done


def test_chunks_fill_the_step_that_decodes_leave():
    engine = FakeEngine(20, 4, max_seqs=3, max_batch_tokens=6)
    engine.submit([1, 0], 9, [0])
    engine.submit([0] * 13, 2, [0])
    engine.submit([1] * 3, 2, [0])
    assert [work(engine) for _ in range(4)] == [
        [(0, 2), (1, 4)],
        [(0, 1), (1, 5)],
        [(0, 1), (1, 4), (2, 1)],
        [(0, 1), (1, 1), (2, 2)],
    ]


def test_a_request_of_one_token_and_a_last_chunk_count_as_decodes():
    engine = FakeEngine(20, 4, max_seqs=3, max_batch_tokens=5)
    engine.submit([0] * 6, 3, [0])
    assert work(engine) == [(0, 5)]
    engine.submit([1] * 3, 3, [0])
    engine.submit([1], 3, [0])
    assert work(engine) == [(0, 1), (2, 1), (1, 3)]


def test_whole_prompts_wait_for_a_step_with_room():
    engine = FakeEngine(20, 4, max_seqs=4, max_batch_tokens=8, chunked_prefill=False)
    engine.submit([1, 0, 1], 2, [0])
    engine.submit([0] * 6, 2, [0])
    engine.submit([1] * 2, 2, [0])  # would fit beside the first, and is not let past the second
    assert [work(engine) for _ in range(4)] == [[(0, 3)], [(0, 1), (1, 6)], [(1, 1), (2, 2)], [(2, 1)]]


def test_static_batches_do_not_mix():
    engine = FakeEngine(20, 4, policy="static", max_seqs=2)
    for n in (1, 3, 2, 1):
        engine.submit([1, 0], n, [0])
    assert [work(engine) for _ in range(5)] == [[(0, 2), (1, 2)], [(1, 1)], [(1, 1)], [(2, 2), (3, 2)], [(2, 1)]]


def test_the_youngest_is_sent_back():
    """Four blocks of two tokens, three requests of two tokens each and up to four more."""
    engine = FakeEngine(4, 2, caching=False, max_seqs=3)
    for i in range(3):
        engine.submit([i, 1], 5, [0])
    running, waiting = [], []
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
        running.append([request.id for request in engine.scheduler.running])
        waiting.append([request.id for request in engine.scheduler.waiting])
    assert running[:4] == [[0, 1, 2], [0, 1], [0, 1], [0]]
    assert waiting[:4] == [[], [2], [2], [1, 2]]
    assert engine.scheduler.preemptions == 2
    assert {r.id: tokens for r, tokens in engine.done.items()} == {i: answer([i, 1], 5, 0) for i in range(3)}


def test_copies_for_those_sent_back_are_dropped():
    """A prompt under way is older than two of three samples: their new blocks become its own, and nothing is copied there."""
    engine = FakeEngine(6, 4, caching=False, max_seqs=4, max_batch_tokens=12)
    first, second, third = engine.submit([0] * 5, 4, [0, 1, 2])
    (other,) = engine.submit([1] * 16, 1, [0])
    assert work(engine) == [(0, 5), (3, 7)]
    plan = engine.schedule()
    assert [(request, n) for request, n in plan.work] == [(first, 1), (other, 9)]
    assert plan.copies == [(plan.copies[0][0], first.table.blocks[1])]
    assert list(engine.scheduler.waiting) == [second, third] and engine.scheduler.preemptions == 2


def test_admission_needs_blocks_for_the_whole_prompt():
    engine = FakeEngine(4, 2, max_seqs=3, max_batch_tokens=3)
    engine.submit([0] * 3, 4, [0])  # two blocks at once, three in the end
    engine.submit([1] * 5, 1, [0])  # three blocks: not beside the first
    engine.submit([1], 1, [0])  # one block, but not before the second
    steps = []
    while engine.scheduler.running or engine.scheduler.waiting:
        steps.append(work(engine))
    assert steps == [[(0, 3)], [(0, 1)], [(0, 1)], [(0, 1)], [(1, 3)], [(2, 1), (1, 2)]]
    assert engine.scheduler.preemptions == 0


def test_static_batches_are_full_from_the_start():
    """Prompts beyond the step's tokens are computed in the next steps."""
    engine = FakeEngine(20, 4, policy="static", max_seqs=3, max_batch_tokens=4)
    for prompt in ([0] * 3, [1] * 4, [1, 0], [0]):
        engine.submit(prompt, 2, [0])
    assert [work(engine) for _ in range(5)] == [[(0, 3), (1, 1)], [(0, 1), (1, 3)], [(1, 1), (2, 2)], [(2, 1)], [(3, 1)]]


def test_max_seqs():
    engine = FakeEngine(20, 4, max_seqs=2)
    for _ in range(3):
        engine.submit([1], 2, [0])
    assert [work(engine) for _ in range(4)] == [[(0, 1), (1, 1)], [(0, 1), (1, 1)], [(2, 1)], [(2, 1)]]


def test_samples_start_in_the_first_ones_blocks():
    engine = FakeEngine(20, 4, max_seqs=3)
    first, *others = engine.submit([0, 1] * 5, 3, [0, 1, 2, 0])
    assert work(engine) == [(0, 10)]
    assert [request.id for request in engine.scheduler.running] == [0, 1, 2]  # the last found no place
    assert others[0].table.blocks == first.table.blocks and len({request.table.blocks[-1] for request in others[:2]}) == 1
    assert engine.scheduler.waiting[0] is others[2] and others[2].parent is None
    assert work(engine) == [(0, 1), (1, 1), (2, 1)]
    assert len({tuple(request.table.blocks[:2]) for request in engine.scheduler.running}) == 1
    assert len({request.table.blocks[2] for request in engine.scheduler.running}) == 3
    engine.run()
    assert engine.scheduler.hit_tokens == 8  # of the last


def test_slots():
    engine = FakeEngine(20, 4, max_seqs=3)
    assert engine.scheduler.slots() == (0, 0)
    engine.submit([0, 1] * 3, 3, [0, 1])
    engine.step()
    assert engine.scheduler.slots() == (8, 2), "shared blocks count once"
    engine.step()
    assert engine.scheduler.slots() == (12, 2)
    engine.run()
    assert engine.scheduler.slots() == (0, 0), "blocks that only the prefix cache holds can be had"


def test_finishing_a_parent_frees_its_samples():
    engine = FakeEngine(20, 4, max_seqs=3)
    first, second, third = engine.submit([0, 1], 3, [0, 1, 2])
    engine.scheduler.finish(first)
    assert second.parent is None and third.parent is None
    engine.scheduler.finish(second)
    assert work(engine) == [(2, 2)]


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fair"}, "policy is 'fair'; choose continuous or static"),
        ({"max_seqs": 0}, "max_seqs is 0; it must be a whole number, 1 or more"),
        ({"max_seqs": 2.0}, r"max_seqs is 2\.0"),
        ({"max_batch_tokens": -1}, "max_batch_tokens is -1"),
        ({"max_batch_tokens": True}, "max_batch_tokens is True"),
        ({"max_seqs": 5, "max_batch_tokens": 4}, "max_batch_tokens is 4 with max_seqs 5; each running request needs room"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        FakeEngine(4, 4, **options)


@pytest.mark.parametrize(("n_prompt", "n", "blocks"), [(16, 1, 4), (16, 2, 5), (1, 16, 4), (1, 17, 5), (17, 0, 5), (16, 0, 4)])
def test_requests_that_could_never_run_are_refused(n_prompt, n, blocks):
    engine = FakeEngine(4, 4)
    if blocks <= 4:
        engine.submit([0] * n_prompt, n, [0])
        return
    with pytest.raises(ValueError, match=rf"{n_prompt} prompt tokens and {n} new ones need {blocks} blocks of 4, and there are 4; ask for"):
        engine.submit([0] * n_prompt, n, [0])
    assert not engine.scheduler.waiting


@pytest.mark.parametrize(("n_prompt", "n", "fits"), [(8, 1, True), (9, 1, False), (4, 5, True), (4, 6, False)])
def test_whole_prompts_must_fit_into_a_step(n_prompt, n, fits):
    """And so must a prompt with its answer, should it be sent back."""
    engine = FakeEngine(20, 4, max_seqs=2, max_batch_tokens=8, chunked_prefill=False)
    if fits:
        engine.submit([0] * n_prompt, n, [0])
        return
    with pytest.raises(
        ValueError, match=f"{n_prompt} prompt tokens and {n} new ones may have to be computed in one step of at most 8; raise"
    ):
        engine.submit([0] * n_prompt, n, [0])
