"""Log-probabilities: those of the model itself, however the tokens came about."""

import pytest
import torch
from models import lively

from minillm import Engine, EngineConfig, NgramDrafter, Sampling, generate
from minillm.generation import prompt_logprobs
from minillm.sampling import TokenLogprobs, token_logprobs

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11], [3], [1, 2] * 10]


def close(a: list[TokenLogprobs], b: list[TokenLogprobs]) -> None:
    """The same tokens with the same numbers, up to the rounding of another order of sums."""
    assert [row.token for row in a] == [row.token for row in b]
    assert [row.logprob for row in a] == pytest.approx([row.logprob for row in b], abs=1e-4)
    for one, other in zip(a, b, strict=True):
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


def test_by_hand():
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 0.0]])
    p = logits.softmax(-1)
    first, second = token_logprobs(logits, [0, 2], 2)
    assert first.token == 0 and first.logprob == pytest.approx(p[0, 0].log().item())
    assert [t for t, _ in first.top] == [2, 1] and second.top[0][1] == second.top[1][1]
    assert token_logprobs(logits, [0, 2], 99)[0].top[-1][0] == 0  # no more than there are
    assert token_logprobs(logits, [1, 1], 0)[0].top == ()
    assert sum(torch.tensor(value).exp() for _, value in token_logprobs(logits, [0, 2], 3)[0].top)


def test_of_a_prompt():
    """One pass gives what one pass for each token gives, in pieces or not."""
    model = lively(max_seq_len=512)
    ids = [(7 * i) % 97 for i in range(300)]
    rows = prompt_logprobs(model, ids, 1)
    assert [row.token for row in rows] == ids[1:]
    with torch.inference_mode():
        logits = model(torch.tensor([ids]))[0, :-1]
    close(rows, token_logprobs(logits, ids[1:], 1))
    assert prompt_logprobs(model, ids[:1]) == []
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        prompt_logprobs(model, [])


CONFIGS = {
    "as it comes": {},
    "without shared prefixes": {"prefix_caching": False},
    "prompts in chunks": {"max_batch_tokens": 4, "max_seqs": 2},
    "sent back to the queue": {"n_blocks": 12},
    "a static batch": {"policy": "static"},
    "with drafts": {"drafter": NgramDrafter()},
}


@pytest.mark.parametrize(
    "sampling", [None, Sampling(0.7, top_k=20, seed=3)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_of_an_answer(name, sampling):
    """They are those of the same tokens as a prompt: temperature and top-k change nothing."""
    model = lively()
    engine = Engine(model, EngineConfig(**({"n_blocks": 64, "block_size": 4} | CONFIGS[name])))
    ids = [engine.submit(p, 20, sampling=sampling, top_logprobs=2) for p in PROMPTS]
    others = engine.submit([4, 4], 20, sampling=sampling)
    out = engine.run()
    for i, prompt in zip(ids, PROMPTS, strict=True):
        tokens = out[i].tokens
        assert tokens == generate(model, prompt, 20, sampling=sampling)
        close(out[i].logprobs, prompt_logprobs(model, prompt + tokens, 2)[len(prompt) - 1 :])
    assert out[others].logprobs == []
    if name == "sent back to the queue":
        assert engine.stats.preemptions


def test_of_samples_that_share_a_prompt():
    model = lively()
    engine = Engine(model, EngineConfig(n_blocks=64, block_size=4))
    samplings = [Sampling(seed=seed) for seed in range(3)]
    ids = engine.submit_samples(PROMPTS[0], 9, samplings, top_logprobs=0)
    out = engine.run()
    for i in ids:
        expected = prompt_logprobs(model, PROMPTS[0] + out[i].tokens)
        close(out[i].logprobs, expected[len(PROMPTS[0]) - 1 :])


def test_as_the_tokens_come():
    """`on_token` finds them in its request; those after the last token are dropped."""
    model, seen = lively(), []
    engine = Engine(model, EngineConfig(n_blocks=64, drafter=NgramDrafter()))

    def on_token(token: int) -> bool:
        request = engine.request(i)
        seen.append(request.logprobs[request.n_delivered - 1])
        return len(seen) == 15

    i = engine.submit([1, 2] * 10, 40, on_token=on_token, top_logprobs=1)
    out = engine.run()[i]
    assert [row.token for row in seen] == out.tokens and out.logprobs == seen and len(seen) == 15


def test_an_interrupt_takes_no_number_back(monkeypatch):
    model = lively()
    engine = Engine(model, EngineConfig(n_blocks=64))
    i = engine.submit(PROMPTS[0], 12, top_logprobs=1)
    real, calls = engine.scheduler.manager.remember, []

    def remember(*arguments: object) -> None:
        calls.append(1)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(engine.scheduler.manager, "remember", remember)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    out = engine.run()[i]
    close(out.logprobs, prompt_logprobs(model, PROMPTS[0] + out.tokens, 1)[len(PROMPTS[0]) - 1 :])


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "5"])
def test_what_is_no_number_of_tokens(wrong):
    engine = Engine(lively(), EngineConfig(n_blocks=8))
    with pytest.raises(ValueError, match="top_logprobs is"):
        engine.submit([1], 2, top_logprobs=wrong)
    assert not engine.busy


def test_random_numbers_are_drawn_when_they_are_needed():
    engine = Engine(lively(), EngineConfig(n_blocks=64))
    i = engine.submit([1], 200, sampling=Sampling(seed=1))
    engine.step()
    assert len(engine.request(i).uniforms) == 1
    engine.step()
    assert list(engine.request(i).uniforms) == list(Sampling(seed=1).uniforms(2))
