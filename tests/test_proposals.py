"""Speculation in the engine: the same tokens in fewer steps, and k follows what is accepted."""

import pytest
import torch
from models import lively, lively_heads

from minillm import Engine, EngineConfig, Sampling, generate, speculative_generate
from minillm.drafters import Draft, ModelDrafter, NgramDrafter
from minillm.medusa import MedusaDrafter
from minillm.proposals import PAUSE, Proposals
from minillm.request import Request

PROMPTS = [[5, 90, 3, 3, 41, 8, 13][: 3 + i] * (1 + i) for i in range(4)]
SAMPLINGS = [None, Sampling(seed=1), Sampling(0.7, top_p=0.9, seed=2), None]


def drafters(model) -> dict:
    return {
        "itself": ModelDrafter(model),
        "a stranger": ModelDrafter(lively(seed=5, n_layers=1)),
        "n-grams": NgramDrafter(2, 1),
        "heads": MedusaDrafter(lively_heads(4)),
    }


@pytest.mark.parametrize("name", ["itself", "a stranger", "n-grams", "heads"])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize(
    "options",
    [
        {"n_blocks": 200},
        {"n_blocks": 16, "max_batch_tokens": 9, "max_seqs": 4},  # chunks and preemption
        {"n_blocks": 200, "prefix_caching": False, "policy": "static"},
        {"n_blocks": 60, "kv_dtype": "int8"},
    ],
    ids=str,
)
def test_the_same_tokens(options, k, name):
    """Greedy and sampled, alone or beside others, with whatever happens to them."""
    model = lively(n_layers=2)
    config = EngineConfig(block_size=4, **options)
    plain = Engine(model, config)
    ids = [plain.submit(p, 14, sampling=s) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    done = plain.run()
    expected = [done[i].tokens for i in ids]
    heard: dict[int, list[int]] = {}
    drafting = EngineConfig(block_size=4, drafter=drafters(model)[name], k=k, **options)
    engine = Engine(model, drafting)
    for i, (p, s) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(p, 14, sampling=s, on_token=heard.setdefault(i, []).append)
    done = engine.run()
    assert [done[i].tokens for i in sorted(done)] == expected
    assert list(heard.values()) == expected
    if name == "itself" and options == {"n_blocks": 200}:
        assert engine.stats.steps <= plain.stats.steps - 13 + -(-13 // (k + 1)) + 2
    if "kv_dtype" not in options:
        for p, s, tokens in zip(PROMPTS, SAMPLINGS, expected, strict=True):
            assert generate(model, p, 14, sampling=s) == tokens


class Told:
    """Guesses numbers that it is told, right or wrong."""

    def __init__(self):
        self.asked: list[int] = []
        self.guess = 7

    def start(self, target, max_len, sampling):
        return self

    def propose(self, ids, k, uniforms, state=None):
        self.asked.append(k)
        return Draft([self.guess] * k)


def test_k_follows_what_is_accepted():
    drafter = Told()
    propose = Proposals(drafter, None, 4)
    request = Request(0, [1, 2], 500)
    request.ids.append(3)
    for came in ([8], [8], [8]):  # never a 7
        propose(request)
        request.ids += came
    assert drafter.asked == [4, 2, 1]
    for _ in range(PAUSE - 1):
        assert propose(request) == ()
        request.ids.append(8)
    assert drafter.asked == [4, 2, 1]
    request.ids.append(8)
    assert propose(request) == [7]
    for _ in range(4):
        request.ids += [7] * drafter.asked[-1] + [8]
        propose(request)
    assert drafter.asked == [4, 2, 1, 1, 2, 3, 4, 4]
    request.ids += [7, 9]  # one was right: k stays
    propose(request)
    assert drafter.asked[-1] == 4


def test_what_a_request_leaves_behind():
    """Nothing: its session goes when the engine forgets the request."""
    model = lively()
    engine = Engine(model, EngineConfig(n_blocks=40, drafter=ModelDrafter(model), k=2))
    for _ in range(3):
        engine.submit([1, 2, 3], 6)
        engine.run()
    assert len(engine._proposer._states) <= 1


def test_sessions_go_when_their_requests_end():
    """Also before the engine hands them out: only running requests have draft caches."""
    model = lively()
    engine = Engine(model, EngineConfig(n_blocks=40, max_seqs=2, drafter=ModelDrafter(model), k=2))
    numbers = [engine.submit([1, 2, 3 + i], 6) for i in range(9)]
    most, inner = 0, engine._proposer

    def watched(request):
        nonlocal most
        guesses = inner(request)
        most = max(most, len(inner._states))
        return guesses

    engine._proposer = watched
    assert len(engine.run()) == len(numbers) and most <= 3


def test_a_drafter_that_fails_costs_only_its_guesses(caplog):
    """Greedy and sampled requests end with the tokens they would have had."""
    model, broken = lively(), lively(seed=5)
    broken.norm.fill_(float("nan"))
    engine = Engine(model, EngineConfig(n_blocks=40, drafter=ModelDrafter(broken), k=2))
    for s in (None, Sampling(seed=1)):
        number = engine.submit(PROMPTS[3], 6, sampling=s)
        assert engine.run()[number].tokens == generate(model, PROMPTS[3], 6, sampling=s)
    assert "goes on without guesses" in caplog.text


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
