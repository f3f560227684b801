"""The scheduler in the real engine, over a model that stores tokens and reads them back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from token_model import VOCAB, CheckedEngine, answer

from minillm import Sampling
from minillm.serving.request import Request


class Guesser:
    """Guesses of which some prefix is right, by chance; or none."""

    def __init__(self, choices: list[tuple[int, int]]):
        self.choices = choices  # (right guesses, wrong ones after them), taken in turn
        self.right: dict[int, list[int]] = {}  # request id -> its whole answer
        self.used = 0

    def observe(self, step: object) -> None:
        pass

    def propose(self, requests: list[Request]) -> list[list[int]]:
        return [self.guesses(request) if request.decoding else [] for request in requests]

    def guesses(self, request: Request) -> list[int]:
        n_right, n_wrong = self.choices[self.used % len(self.choices)]
        self.used += 1
        made = len(request.tokens)
        guesses = self.right[request.id][made : made + n_right]
        for i in range(n_wrong):
            position = made + len(guesses)
            answer_ = self.right[request.id]
            truth = answer_[position] if position < len(answer_) else 0
            guesses.append((truth + 1 + i % (VOCAB - 1)) % VOCAB)
        return guesses


class Serving(RuleBasedStateMachine):
    """Submissions, samples, aborts, guesses and steps in any order, with few blocks."""

    @initialize(
        n_blocks=st.integers(2, 12), block_size=st.integers(1, 4), caching=st.booleans(),
        chunked=st.booleans(), policy=st.sampled_from(["continuous", "continuous", "static"]),
        max_seqs=st.integers(1, 5), extra=st.integers(0, 20),
        guesses=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=6),
    )  # fmt: skip
    def make(self, n_blocks, block_size, caching, chunked, policy, max_seqs, extra, guesses):
        self.guesser = Guesser(guesses) if guesses else None
        self.engine = CheckedEngine(
            n_blocks, block_size, prefix_caching=caching, policy=policy, max_seqs=max_seqs,
            max_batch_tokens=max_seqs + extra, chunked_prefill=chunked, proposer=self.guesser,
        )  # fmt: skip
        self.prompts: list[list[int]] = [[]]
        self.right: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.answers: dict[int, list[int]] = {}

    @rule(
        data=st.data(),
        n=st.integers(1, 8),
        seeds=st.just([None]) | st.lists(st.integers(0, 2), min_size=2, max_size=4),
    )
    def submit(self, data, n, seeds):
        engine = self.engine
        past = data.draw(st.sampled_from(self.prompts))
        known = past[: data.draw(st.integers(0, len(past)))]
        prompt = known + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        most = len(prompt) + n - 1
        fits = -(-most // engine.manager.block_size) <= engine.manager.allocator.n_blocks
        if fits and (engine.scheduler.chunked_prefill or most <= engine.scheduler.max_batch_tokens):
            for request in engine.add(prompt, n, seeds):
                self.right[request.id] = answer(prompt, n, request.sampling)
                if self.guesser:
                    self.guesser.right = self.right
            self.prompts.append(prompt + self.right[request.id])
        else:
            queue = list(engine.scheduler.waiting)
            said = "raise max_batch_tokens or" if fits else "ask for fewer tokens or make more"
            with pytest.raises(ValueError, match=said):
                engine.add(prompt, n, seeds)
            assert list(engine.scheduler.waiting) == queue

    @rule()
    def step(self):
        self.answers |= {c.request_id: c.tokens for c in self.engine.step()}

    @precondition(lambda self: self.engine.scheduler.running or self.engine.scheduler.waiting)
    @rule(data=st.data())
    def abort(self, data):
        s = self.engine.scheduler
        alive = sorted(request.id for request in (*s.running, *s.waiting))
        victim = data.draw(st.sampled_from(alive))
        self.engine.abort(victim)
        self.aborted.add(victim)

    @rule(data=st.data())
    def interrupted(self, data):
        """The engine starts again from its requests, as after Ctrl-C."""
        self.engine._restore()

    @invariant()
    def all_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.answers |= self.engine.finish()
            assert self.answers.keys() == self.right.keys()
            for i, right in self.right.items():
                got = self.answers[i]
                assert got == (right[: len(got)] if i in self.aborted else right)
            assert self.engine.manager.n_available == self.engine.manager.allocator.n_blocks


Serving.TestCase.settings = settings(deadline=None, max_examples=200, stateful_step_count=40)
TestServing = pytest.mark.slow(Serving.TestCase)


# Guesses


@pytest.mark.parametrize("choice", [(0, 0), (3, 0), (0, 3), (2, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("seed", [None, 1])
def test_guesses_change_nothing_but_the_steps(choice, seed):
    guesser = Guesser([choice])
    engine = CheckedEngine(20, 4, proposer=guesser)
    (request,) = engine.add([0, 1, 0], 12, [seed])
    right = answer([0, 1, 0], 12, Sampling(1.0, seed=seed) if seed else None)
    guesser.right = {request.id: right}
    assert engine.finish() == {request.id: right}
    # The prompt's step gives one token, each further step one and its right guesses.
    assert engine.stats.steps == 1 + -(-11 // (choice[0] + 1))


def test_guesses_take_only_what_is_left():
    """Neither the tokens of a prompt, nor the blocks of another request."""
    guesser = Guesser([(0, 9)])
    engine = CheckedEngine(5, 4, max_seqs=2, max_batch_tokens=8, proposer=guesser)
    first, second = engine.add([0] * 3, 9) + engine.add([1] * 6, 2)
    guesser.right = {first.id: answer([0] * 3, 9), second.id: answer([1] * 6, 2)}
    assert engine.work() == [(0, 3), (1, 5)]
    # One token for the decode and one for the prompt; 6 are left, but only 9 slots of 3 blocks.
    assert engine.work() == [(0, 7), (1, 1)]
    engine.finish()
    assert engine.scheduler.preemptions == 0


def test_guesses_are_not_offered_to_the_prefix_cache():
    guesser = Guesser([(0, 3)])
    engine = CheckedEngine(20, 2, proposer=guesser)
    (request,) = engine.add([0, 1, 0], 6)
    guesser.right = {request.id: answer([0, 1, 0], 6)}
    engine.finish()
    known = [key[1] for key in engine.manager._known]
    right = [0, 1, 0, *answer([0, 1, 0], 6)]
    assert known == [tuple(right[i : i + 2]) for i in range(0, len(right) - 1, 2)]


# One at a time


def test_chunks_fill_the_step_that_decodes_leave():
    engine = CheckedEngine(20, 4, max_seqs=3, max_batch_tokens=6)
    engine.add([1, 0], 9)
    engine.add([0] * 13, 2)
    engine.add([1] * 3, 2)
    assert [engine.work() for _ in range(4)] == [
        [(0, 2), (1, 4)],
        [(0, 1), (1, 5)],
        [(0, 1), (1, 4), (2, 1)],
        [(0, 1), (1, 1), (2, 2)],
    ]


def test_a_prompt_of_one_token_and_a_last_chunk_are_no_decodes():
    engine = CheckedEngine(20, 4, max_seqs=3, max_batch_tokens=5)
    engine.add([0] * 6, 3)
    assert engine.work() == [(0, 5)]
    engine.add([1] * 3, 3)
    engine.add([1], 3)
    assert engine.work() == [(0, 1), (1, 3), (2, 1)]
    assert [decoding for _, _, decoding in engine.stats.timeline[-1].work] == [False] * 3
    assert engine.work() == [(0, 1), (1, 1), (2, 1)]
    assert [decoding for _, _, decoding in engine.stats.timeline[-1].work] == [True] * 3


def test_whole_prompts_wait_for_a_step_with_room():
    engine = CheckedEngine(20, 4, max_seqs=4, max_batch_tokens=8, chunked_prefill=False)
    engine.add([1, 0, 1], 2)
    engine.add([0] * 6, 2)
    engine.add([1] * 2, 2)  # would fit beside the first, and is not let past the second
    assert [engine.work() for _ in range(4)] == [
        [(0, 3)],
        [(0, 1), (1, 6)],
        [(1, 1), (2, 2)],
        [(2, 1)],
    ]


def test_static_batches_do_not_mix():
    engine = CheckedEngine(20, 4, policy="static", max_seqs=2)
    for n in (1, 3, 2, 1):
        engine.add([1, 0], n)
    assert [engine.work() for _ in range(5)] == [
        [(0, 2), (1, 2)],
        [(1, 1)],
        [(1, 1)],
        [(2, 2), (3, 2)],
        [(2, 1)],
    ]


def test_the_youngest_is_sent_back():
    """Four blocks of two tokens, three requests of two tokens each and up to four more."""
    engine = CheckedEngine(4, 2, prefix_caching=False, max_seqs=3)
    for i in range(3):
        engine.add([i, 1], 5)
    running, waiting, answers = [], [], {}
    while engine.scheduler.running or engine.scheduler.waiting:
        answers |= {c.request_id: c.tokens for c in engine.step()}
        running.append([request.id for request in engine.scheduler.running])
        waiting.append([request.id for request in engine.scheduler.waiting])
    assert running[:4] == [[0, 1, 2], [0, 1], [0, 1], [0]]
    assert waiting[:4] == [[], [2], [2], [1, 2]]
    assert engine.scheduler.preemptions == 2
    assert answers == {i: answer([i, 1], 5) for i in range(3)}


def test_copies_for_those_sent_back_are_dropped():
    """A prompt under way is older than two of three samples.

    Their new blocks become its own, and nothing is copied there.
    """
    engine = CheckedEngine(6, 4, prefix_caching=False, max_seqs=4, max_batch_tokens=12)
    first, second, third = engine.add([0] * 5, 4, [0, 1, 2])
    (other,) = engine.add([1] * 16, 1)
    assert engine.work() == [(0, 5), (3, 7)]
    plan = engine.scheduler.schedule()
    assert [(w.request, len(w.tokens)) for w in plan.work] == [(first, 1), (other, 9)]
    assert plan.copies == [(plan.copies[0][0], first.table.blocks[1])]
    assert list(engine.scheduler.waiting) == [second, third] and engine.scheduler.preemptions == 2


def test_admission_needs_blocks_for_the_whole_prompt():
    engine = CheckedEngine(4, 2, max_seqs=3, max_batch_tokens=3)
    engine.add([0] * 3, 4)  # two blocks at once, three in the end
    engine.add([1] * 5, 1)  # three blocks: not beside the first
    engine.add([1], 1)  # one block, but not before the second
    steps = []
    while engine.scheduler.running or engine.scheduler.waiting:
        steps.append(engine.work())
    assert steps == [[(0, 3)], [(0, 1)], [(0, 1)], [(0, 1)], [(1, 3)], [(1, 2), (2, 1)]]
    assert engine.scheduler.preemptions == 0


def test_static_batches_are_full_from_the_start():
    """Prompts beyond the step's tokens are computed in the next steps."""
    engine = CheckedEngine(20, 4, policy="static", max_seqs=3, max_batch_tokens=4)
    for prompt in ([0] * 3, [1] * 4, [1, 0], [0]):
        engine.add(prompt, 2)
    assert [engine.work() for _ in range(5)] == [
        [(0, 3), (1, 1)],
        [(0, 1), (1, 3)],
        [(1, 1), (2, 2)],
        [(2, 1)],
        [(3, 1)],
    ]


def test_max_seqs():
    engine = CheckedEngine(20, 4, max_seqs=2)
    for _ in range(3):
        engine.add([1], 2)
    assert [engine.work() for _ in range(4)] == [
        [(0, 1), (1, 1)],
        [(0, 1), (1, 1)],
        [(2, 1)],
        [(2, 1)],
    ]


def test_samples_start_in_the_first_ones_blocks():
    engine = CheckedEngine(20, 4, max_seqs=3)
    first, *others = engine.add([0, 1] * 5, 3, [0, 1, 2, 0])
    assert engine.work() == [(0, 10)]
    # The last found no place.
    assert [request.id for request in engine.scheduler.running] == [0, 1, 2]
    assert others[0].table.blocks == others[1].table.blocks == first.table.blocks
    assert engine.scheduler.waiting[0] is others[2] and others[2].parent is None
    assert engine.work() == [(0, 1), (1, 1), (2, 1)]
    assert len({tuple(request.table.blocks[:2]) for request in engine.scheduler.running}) == 1
    assert len({request.table.blocks[2] for request in engine.scheduler.running}) == 3
    engine.run()
    assert engine.scheduler.hit_tokens == 8  # of the last


def test_slots():
    engine = CheckedEngine(20, 4, max_seqs=3)
    assert engine.scheduler.slots() == (0, 0)
    engine.add([0, 1] * 3, 3, [0, 1])
    engine.step()
    assert engine.scheduler.slots() == (8, 2), "shared blocks count once"
    engine.step()
    assert engine.scheduler.slots() == (12, 2)
    engine.run()
    assert engine.scheduler.slots() == (0, 0), "blocks that only the prefix cache holds can be had"


def test_finishing_a_parent_frees_its_samples():
    engine = CheckedEngine(20, 4, max_seqs=3)
    first, second, third = engine.add([0, 1], 3, [0, 1, 2])
    engine.abort(first.id)
    assert second.parent is None and third.parent is None
    engine.abort(second.id)
    assert engine.work() == [(2, 2)]


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fair"}, "policy is 'fair'; choose continuous or static"),
        ({"max_seqs": 0}, "max_seqs is 0; it must be a whole number, 1 or more"),
        ({"max_seqs": 2.0}, r"max_seqs is 2\.0"),
        ({"max_batch_tokens": -1}, "max_batch_tokens is -1"),
        ({"max_batch_tokens": True}, "max_batch_tokens is True"),
        (
            {"max_seqs": 5, "max_batch_tokens": 4},
            "max_batch_tokens is 4 with max_seqs 5; each running request needs room",
        ),
        ({"max_waiting": 0}, "max_waiting is 0; it must be a whole number, 1 or more"),
    ],
    ids=str,
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        CheckedEngine(4, 4, **options)


@pytest.mark.parametrize(
    ("n_prompt", "n", "blocks"),
    [(16, 1, 4), (16, 2, 5), (1, 16, 4), (1, 17, 5), (16, 0, 4)],
)
def test_requests_that_could_never_run_are_refused(n_prompt, n, blocks):
    engine = CheckedEngine(4, 4)
    if blocks <= 4:
        engine.add([0] * n_prompt, n)
        return
    said = rf"{n_prompt} prompt tokens and {n} new ones need {blocks} blocks of 4, and there are 4"
    with pytest.raises(ValueError, match=said):
        engine.add([0] * n_prompt, n)
    assert not engine.scheduler.waiting


@pytest.mark.parametrize(
    ("n_prompt", "n", "fits"), [(8, 1, True), (9, 1, False), (4, 5, True), (4, 6, False)]
)
def test_whole_prompts_must_fit_into_a_step(n_prompt, n, fits):
    """And so must a prompt with its answer, should it be sent back."""
    engine = CheckedEngine(20, 4, max_seqs=2, max_batch_tokens=8, chunked_prefill=False)
    if fits:
        engine.add([0] * n_prompt, n)
        return
    said = f"{n_prompt} prompt tokens and {n} new ones may have to be computed in one step of at"
    with pytest.raises(ValueError, match=said):
        engine.add([0] * n_prompt, n)
