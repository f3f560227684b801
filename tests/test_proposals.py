"""Speculation in the engine: the same tokens in fewer steps, and k follows what is accepted."""

import random
from array import array
from collections.abc import Callable
from functools import cache

import pytest
import torch
from models import lively, lively_heads

from minillm import Engine, EngineConfig, Sampling, generate, speculative_generate
from minillm.serving.batch_drafters import ModelBatch
from minillm.serving.proposals import FASTER, PAUSE, WITH, WITHOUT, Proposals
from minillm.serving.request import Request
from minillm.serving.timeline import Step
from minillm.speculation.drafters import Draft, Drafter, ModelDrafter, NgramDrafter
from minillm.speculation.medusa import MedusaDrafter

PROMPTS = [[5, 90, 3, 3, 41, 8, 13][: 3 + i] * (1 + i) for i in range(4)]
SAMPLINGS = [None, Sampling(seed=1), Sampling(0.7, top_p=0.9, seed=2), None]


def drafters(model) -> dict:
    return {
        "itself": ModelDrafter(model),
        "a stranger": ModelDrafter(lively(seed=5, n_layers=1)),
        "n-grams": NgramDrafter(2, 1),
        "heads": MedusaDrafter(lively_heads(4)),
    }


ENGINES = {
    "plenty": {"n_blocks": 200},
    "chunks and preemption": {"n_blocks": 16, "max_batch_tokens": 9, "max_seqs": 4},
    "static": {"n_blocks": 200, "prefix_caching": False, "policy": "static"},
    "int8": {"n_blocks": 60, "kv_dtype": "int8"},
}


@cache
def without_drafts(kind: str) -> tuple[list[list[int]], int]:
    """The answers of an engine of ENGINES that does not speculate, and its steps."""
    model, options = lively(n_layers=2), ENGINES[kind]
    plain = Engine(model, EngineConfig(block_size=4, **options))
    ids = [plain.submit(p, 14, sampling=s) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    done = plain.run()
    answers = [done[i].tokens for i in ids]
    if "kv_dtype" not in options:
        for p, s, tokens in zip(PROMPTS, SAMPLINGS, answers, strict=True):
            assert generate(model, p, 14, sampling=s) == tokens
    return answers, plain.stats.steps


@pytest.mark.parametrize("name", ["itself", "a stranger", "n-grams", "heads"])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("kind", ENGINES)
def test_the_same_tokens(kind, k, name):
    """Greedy and sampled, alone or beside others, with whatever happens to them."""
    expected, n_steps = without_drafts(kind)
    model = lively(n_layers=2)
    heard: dict[int, list[int]] = {}
    drafting = EngineConfig(block_size=4, drafter=drafters(model)[name], k=k, **ENGINES[kind])
    engine = Engine(model, drafting)
    for i, (p, s) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(p, 14, sampling=s, on_token=heard.setdefault(i, []).append)
    done = engine.run()
    assert [done[i].tokens for i in sorted(done)] == expected
    assert list(heard.values()) == expected
    if name == "itself" and kind == "plenty":
        assert engine.stats.steps <= n_steps - 13 + -(-13 // (k + 1)) + 2


class Told(Drafter):
    """Guesses numbers that it is told, right or wrong."""

    def __init__(self):
        self.asked: list[int] = []
        self.guess = 7

    def start(self, target, max_len, sampling):
        return self

    def propose(self, ids, k, uniforms, hidden=None):
        self.asked.append(k)
        return Draft([self.guess] * k)


def proposals(drafter, k: int = 4) -> tuple[Callable, Callable]:
    """Proposals for requests all of whose tokens but the newest are computed: propose, observe."""
    found = Proposals(drafter, lively(), k, n_blocks=40, block_size=4)

    def propose(requests: list[Request]) -> list:
        for request in requests:
            request.table.n_tokens = len(request.ids) - 1
        return found.propose(requests)

    return propose, found.observe


def test_k_follows_what_is_accepted():
    drafter = Told()
    propose, _ = proposals(drafter)
    request = Request(0, [1, 2], 500)
    request.ids.append(3)
    for came in ([8], [8], [8]):  # never a 7
        propose([request])
        request.ids += came
    assert drafter.asked == [4, 2, 1]
    for _ in range(PAUSE - 1):
        assert propose([request]) == [[]]
        request.ids.append(8)
    assert drafter.asked == [4, 2, 1]
    request.ids.append(8)
    assert propose([request]) == [[7]]
    for _ in range(4):
        request.ids += [7] * drafter.asked[-1] + [8]
        propose([request])
    assert drafter.asked == [4, 2, 1, 1, 2, 3, 4, 4]
    request.ids += [7, 9]  # one was right: k stays
    propose([request])
    assert drafter.asked[-1] == 4


def step(seconds: float, prefilled: int = 0) -> Step:
    return Step(1.0, 1.0 + seconds, prefilled, 1, 1, 0, 9, (), 5)


@pytest.mark.parametrize("guessed_seconds, pays", [(3.9, True), (4.1, False)])
def test_guesses_stop_where_they_do_not_pay(guessed_seconds, pays):
    """Steps with 3 right guesses yield 4 tokens, so they may take 4 times as long."""
    propose, observe = proposals(Told(), k=3)
    request = Request(0, [1, 2], 5000)
    request.ids.append(3)
    ways = []
    for _ in range(2 * (WITH + WITHOUT + FASTER)):
        (guesses,) = propose([request])
        ways.append(bool(guesses))
        request.ids += [*guesses, 8]
        observe(step(guessed_seconds if guesses else 1.0))
    trial = [True] * WITH + [False] * WITHOUT
    assert ways == 2 * (trial + [pays] * FASTER)


def test_steps_with_prompts_have_no_guesses():
    """They use the arithmetic that guesses need, and say nothing about the pace."""
    request, prompt = Request(0, [1, 2], 500), Request(1, [4, 5, 6], 500)
    request.ids.append(3)
    found = Proposals(Told(), lively(), 3, n_blocks=40, block_size=4)
    for _ in range(3 * (WITH + WITHOUT)):
        request.table.n_tokens = len(request.ids) - 1
        assert found.propose([request, prompt]) == [[], []]
        request.ids.append(8)
        found.observe(step(100.0, prefilled=1))
    request.table.n_tokens = len(request.ids) - 1
    assert found.propose([request]) == [[7, 7, 7]]


def test_each_batch_size_decides_for_itself():
    """Here guesses pay for one request, and not for four."""
    propose, observe = proposals(Told(), k=3)
    for n, seconds, pays in ((1, 2.0, True), (4, 5.0, False), (1, 2.0, True)):
        requests = [Request(i, [1, 2, 3], 5000) for i in range(n)]
        for _ in range(WITH + WITHOUT + 10):
            drafts = propose(requests)
            for request, guesses in zip(requests, drafts, strict=True):
                request.ids += [*guesses, 8]
            observe(step(seconds if any(drafts) else 1.0))
        assert [bool(guesses) for guesses in drafts] == [pays] * n


def test_what_a_request_leaves_behind():
    """Nothing: what was remembered of it goes at the next step without it, ended or sent back."""
    model = lively()
    batch = ModelBatch(model, 12, 4)
    requests = [Request(i, [1, 2, 3, 4 + i], 9) for i in range(3)]
    batch.propose(requests, [2, 2, 2])
    manager = batch._cache.manager
    assert len(batch._known) == 3 and manager.allocator.n_free < 12
    batch.propose(requests[:1], [0])
    assert list(batch._known) == requests[:1]
    batch.propose([], [])
    assert not batch._known and manager.n_available == 12


@pytest.mark.parametrize(
    "sampling", [None, Sampling(0.8, top_k=9, seed=3)], ids=["greedy", "drawn"]
)
def test_drafts_of_a_batch_are_those_of_each_alone(sampling):
    """Tokens that a session guesses, with any number of guesses, right and wrong before."""
    model, rng = lively(seed=5, n_layers=2), random.Random(1)
    batch = ModelBatch(model, 60, 4)
    n_new = 40
    uniforms = array("d", sampling.uniforms(n_new)) if sampling else array("d")
    requests = [
        Request(i, [*p, 7], n_new, sampling=sampling, uniforms=uniforms)
        for i, p in enumerate(PROMPTS)
    ]
    for request in requests:
        request.n_prompt -= 1
    sessions = [ModelDrafter(model).start(model, 80, sampling) for _ in requests]
    for _ in range(8):
        ks = [rng.randrange(4) for _ in requests]
        drafts = batch.propose(requests, ks)
        for request, session, k, draft in zip(requests, sessions, ks, drafts, strict=True):
            numbers = [request.uniform(i) for i in range(k)]
            assert draft == session.propose(request.ids, k, numbers).tokens
            request.ids += [*draft[: rng.randrange(4)], rng.randrange(97)]


def test_a_draft_cache_that_is_too_small_gives_fewer_guesses():
    model = lively()
    batch = ModelBatch(model, 3, 4)
    requests = [Request(i, [1, 2, 3, 4, 5 + i], 9) for i in range(2)]
    drafts = batch.propose(requests, [3, 3])
    assert [len(draft) for draft in drafts] == [3, 0]
    assert [len(draft) for draft in batch.propose(requests[1:], [3])] == [3]


def test_long_prompts_are_drafted_for_later(monkeypatch):
    """At most CATCH_UP tokens a pass; whose prompt is not through gets no guesses yet."""
    monkeypatch.setattr("minillm.serving.batch_drafters.CATCH_UP", 5)
    model = lively()
    batch = ModelBatch(model, 60, 4)
    sizes, real = [], model.hidden

    def watched(tokens, cache):
        sizes.append(tokens.shape[1])
        return real(tokens, cache)

    monkeypatch.setattr(model, "hidden", watched)
    requests = [Request(i, [1, 2, 3 + i, 4][:n] * 2, 9) for i, n in enumerate((2, 4, 3))]
    found = [[len(draft) for draft in batch.propose(requests, [2, 2, 2])] for _ in range(5)]
    assert found == [[2, 0, 0]] * 2 + [[2, 2, 0]] * 2 + [[2, 2, 2]] and max(sizes) == 5
    session = ModelDrafter(lively()).start(model, 80, None)
    assert batch.propose(requests, [2, 2, 2])[1] == session.propose(requests[1].ids, 2, []).tokens


def test_near_the_end_of_the_draft_models_positions():
    model, small = lively(), lively(max_seq_len=12)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    engine = Engine(model, EngineConfig(n_blocks=40, drafter=ModelDrafter(small), k=4))
    number = engine.submit(prompt, 20)
    assert engine.run()[number].tokens == generate(model, prompt, 20)
    batch = ModelBatch(small, 40, 4)
    requests = [Request(n, list(range(n)), 9) for n in (8, 9, 11, 12, 13, 14)]
    assert [len(draft) for draft in batch.propose(requests, [4] * 6)] == [4, 4, 2, 1, 0, 0]


def test_samples_aborts_interrupts_and_a_shared_prompt(monkeypatch):
    """With few blocks, so that the draft cache runs out; the answers stay the same."""
    model = lively(n_layers=2)
    config = EngineConfig(18, 4, drafter=ModelDrafter(model), k=3)
    engine = Engine(model, config)
    samplings = [Sampling(0.9, seed=i) for i in range(5)]
    prompt = PROMPTS[3] * 2
    numbers = engine.submit_samples(prompt, 12, samplings)
    other = engine.submit(PROMPTS[0], 12)
    for i in range(6):
        if i == 3:
            engine.abort(numbers[0])
        with monkeypatch.context() as patch:
            if i == 4:

                def interrupted(*_):
                    raise KeyboardInterrupt

                patch.setattr(model, "hidden", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
                continue
            engine.step()
    done = engine.run()
    for number, sampling in zip(numbers[1:], samplings[1:], strict=True):
        assert done[number].tokens == generate(model, prompt, 12, sampling=sampling)
    assert done[other].tokens == generate(model, PROMPTS[0], 12)
    assert engine._proposer._batch._cache.manager.n_available > 0


def test_forgotten_prefixes_are_the_drafters_too():
    model = lively()
    engine = Engine(model, EngineConfig(40, 4, drafter=ModelDrafter(model), k=3))
    engine.submit(PROMPTS[3], 8)
    engine.run()
    engine.forget_prefixes()
    manager = engine._proposer._batch._cache.manager
    assert manager.start(PROMPTS[3]).n_tokens == 0 and not engine._proposer._states


def test_an_interrupted_batch_begins_again(monkeypatch):
    model = lively()
    batch, fresh = (ModelBatch(model, 12, 4) for _ in range(2))
    request = Request(0, [1, 2, 3, 4, 5], 9)
    batch.propose([request], [2])
    request.ids += [9, 9]
    real = model.hidden

    def stopped(*args):
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "hidden", stopped)
    with pytest.raises(KeyboardInterrupt):
        batch.propose([request], [2])
    monkeypatch.setattr(model, "hidden", real)
    assert batch._cache.manager.n_available == 12
    assert batch.propose([request], [2]) == fresh.propose([request], [2])


def test_a_drafter_that_fails_costs_only_its_guesses(caplog):
    """Greedy and sampled requests end with the tokens they would have had."""
    model, broken = lively(), lively(seed=5)
    broken.norm.fill_(float("nan"))
    engine = Engine(model, EngineConfig(n_blocks=40, drafter=ModelDrafter(broken), k=2))
    for s in (None, Sampling(seed=1)):
        number = engine.submit(PROMPTS[3], 6, sampling=s)
        assert engine.run()[number].tokens == generate(model, PROMPTS[3], 6, sampling=s)
    assert "this step has no draft tokens" in caplog.text


def test_a_session_after_an_interrupt():
    """Between the cache and the list of what it holds."""
    model = lively()
    session = ModelDrafter(model).start(model, 40, None)
    expected = session.propose([1, 2, 3, 4, 5], 3, []).tokens
    interrupted = ModelDrafter(model).start(model, 40, None)
    interrupted._cache.positions(3)
    with torch.inference_mode():
        model.hidden(torch.tensor([[9, 9, 9]]), interrupted._cache)
    assert interrupted.propose([1, 2, 3, 4, 5], 3, []).tokens == expected


def test_stop_tokens_in_the_middle_of_guesses():
    model = lively()
    answer = generate(model, PROMPTS[3], 14)
    for stop in answer:
        expected = generate(model, PROMPTS[3], 14, stop_ids={stop})
        engine = Engine(model, EngineConfig(n_blocks=40, drafter=ModelDrafter(model), k=5))
        number = engine.submit(PROMPTS[3], 14, stop_ids={stop})
        assert engine.run()[number].tokens == expected


def test_refusals():
    model = lively()
    with pytest.raises(ValueError, match="k is 0"):
        Engine(model, EngineConfig(n_blocks=4, drafter=NgramDrafter(), k=0))
    stranger = ModelDrafter(lively(vocab_size=5))
    with pytest.raises(ValueError, match="5 token ids and the target 97; both must have the same"):
        Engine(model, EngineConfig(n_blocks=4, drafter=stranger))
    message = r"drafter is .*; give a drafter: NgramDrafter\(\), ModelDrafter\(model\) or"
    with pytest.raises(TypeError, match=message):
        Engine(model, EngineConfig(n_blocks=4, drafter=model))
    with pytest.raises(TypeError, match=message):
        speculative_generate(model, model, [1, 2], 3, k=2)
