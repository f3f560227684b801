"""Speculative decoding: the same tokens for every drafter, the same distribution when sampled."""

import itertools
import math
import random
from collections import Counter
from functools import cache, partial

import pytest
import torch
from models import lively, lively_heads

from minillm import KVCache, QuantizedKVCache, Sampling, generate, quantize, speculative_generate
from minillm.sampling import probabilities
from minillm.speculation.drafters import Draft, Drafter, ModelDrafter, NgramDrafter
from minillm.speculation.formulas import (
    acceptance,
    draw_one,
    overlap,
    residual,
    speedup,
    tokens_per_pass,
)
from minillm.speculation.medusa import MedusaDrafter
from minillm.speculation.speculative import accepted

KS = pytest.mark.parametrize("k", range(1, 9))


class Fixed(Drafter):
    """Guesses what it is told: the right tokens, none of them, or right up to a place."""

    def __init__(self, answer: list[int], n_prompt: int, *, right: int = 10**6):
        self.answer, self.n_prompt, self.right = answer, n_prompt, right

    def start(self, target, max_len, sampling):
        return self

    def propose(self, ids, k, uniforms, hidden=None):
        made = len(ids) - self.n_prompt
        guesses = self.answer[made : made + k]
        return Draft([g if i < self.right else (g + 1) % 97 for i, g in enumerate(guesses)])


# A twin, a stranger, a coarser copy of the target, and the text itself.
DRAFTERS = {
    "itself": ModelDrafter,
    "a stranger": lambda model: ModelDrafter(lively(seed=5, n_layers=1)),
    "fewer bits": lambda model: ModelDrafter(
        quantize(lively(d_model=64, d_head=16, d_ff=64), "int8")
    ),
    "n-grams": lambda model: NgramDrafter(),
    "single tokens": lambda model: NgramDrafter(longest=1, shortest=1),
    "heads": lambda model: MedusaDrafter(lively_heads(5)),
}
PROMPT = [5, 90, 3, 3, 41, 8, 5, 90, 3]


@cache
def plain(n: int) -> list[int]:
    """Without speculation, by the model that `lively` makes by default."""
    return generate(lively(), PROMPT, n)


@KS
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_tokens_are_those_of_generate(name, k):
    model, expected = lively(), plain(30)
    result = speculative_generate(model, DRAFTERS[name](model), PROMPT, 30, k=k)
    assert result.tokens == expected
    assert 0 <= result.accepted <= result.drafted
    assert result.target_calls == 30 - result.accepted
    if name == "itself":
        assert result.accepted == result.drafted and result.target_calls == 1 + -(-29 // (k + 1))


@KS
@pytest.mark.parametrize("right", [0, 1, 3, 100])
def test_all_rejected_and_all_accepted(right, k):
    model, expected = lively(), plain(20)
    drafter = Fixed(expected, len(PROMPT), right=right)
    result = speculative_generate(model, drafter, PROMPT, 20, k=k)
    assert result.tokens == expected
    if right == 0:
        assert result.accepted == 0 and result.target_calls == 20
    if right == 100:
        assert result.accepted == result.drafted == 20 - result.target_calls


@pytest.mark.parametrize("right", [0, 2, 100])
@pytest.mark.parametrize(
    "make", [KVCache, QuantizedKVCache, partial(QuantizedKVCache, keys="channel")]
)
def test_a_cache_of_the_callers(make, right):
    """Rejected guesses leave nothing behind in it, across the groups of keys per channel."""
    model = lively(max_seq_len=256)
    expected = generate(model, PROMPT, 120, cache=make(model, 1, 200))
    cache = make(model, 1, 200)
    drafter = Fixed(expected, len(PROMPT), right=right)
    result = speculative_generate(model, drafter, PROMPT, 120, k=4, cache=cache)
    assert result.tokens == expected
    assert cache.length == len(PROMPT) + 119


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
def test_guesses_beyond_the_budget_are_not_asked_for(n):
    model = lively()
    result = speculative_generate(model, ModelDrafter(model), PROMPT, n, k=20)
    assert result.tokens == generate(model, PROMPT, n)
    assert result.drafted <= max(0, n - 1)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_ends_where_plain_decoding_ends(place, k):
    """At each place of an accepted run, and as the token that comes for free."""
    model = lively()
    answer = generate(model, PROMPT, 12)
    stop = {answer[place]}
    expected = generate(model, PROMPT, 12, stop_ids=stop)
    for drafter in (Fixed(answer, len(PROMPT)), ModelDrafter(model), NgramDrafter()):
        seen: list[int] = []
        result = speculative_generate(
            model, drafter, PROMPT, 12, k=k, stop_ids=stop, on_token=seen.append
        )
        assert result.tokens == expected == seen
        assert result.accepted <= len(expected)


def test_nothing_is_left_over_between_calls():
    """A drafter serves other prompts, other targets of its vocabulary, and the same again."""
    model, other = lively(), lively(seed=3)
    for drafter in (ModelDrafter(lively(seed=5)), NgramDrafter(), MedusaDrafter(lively_heads(3))):
        first = speculative_generate(model, drafter, PROMPT, 15, k=3)
        assert speculative_generate(other, drafter, [1, 2], 9, k=5).tokens == generate(
            other, [1, 2], 9
        )
        assert speculative_generate(model, drafter, PROMPT, 15, k=3) == first


def test_a_drafter_with_a_short_memory():
    """A draft model of fewer positions stops drafting, and the answer goes on."""
    model, small = lively(), lively(seed=5, max_seq_len=16)
    result = speculative_generate(model, ModelDrafter(small), PROMPT, 30, k=4)
    assert result.tokens == generate(model, PROMPT, 30)


# The accept rule


class Numbers(random.Random):
    """Gives out the numbers it is given."""

    def __init__(self, *numbers: float):
        super().__init__()
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


P, Q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.6, 0.1, 0.1])


def test_the_rule_by_hand():
    """p(1)/q(1) is a half; then only 0 and 2, where p is larger, are drawn, as 3 to 1."""
    p, draft = torch.stack((P, P)), Draft([1], Q[None])
    assert accepted(draft, p, Numbers(0.49, 0.1)) == [1, 0]
    assert accepted(draft, p, Numbers(0.51, 0.74)) == [0]
    assert accepted(draft, p, Numbers(0.51, 0.76)) == [2]
    assert accepted(Draft([0], Q[None]), p, Numbers(0.999, 0.6)) == [0, 1]
    assert accepted(Draft([3], Q[None]), p, Numbers(0.0, 0.1)) == [0]
    assert accepted(Draft([1]), p, Numbers(0.29, 0.0)) == [1, 0]  # certain: with p(1)
    assert accepted(Draft([1]), p, Numbers(0.31, 0.72)) == [2]  # 0 and 2, as 5 to 2


@pytest.mark.parametrize("certain", [False, True])
def test_what_comes_out_is_the_targets_distribution(certain):
    """Every draw on a grid: the first token is distributed as p, and 1 - TV of them are guesses."""
    grid = [(i + 0.5) / 60 for i in range(60)]
    found, kept = torch.zeros(4), 0.0
    guesses = [(1, 1.0)] if certain else list(enumerate(Q.tolist()))
    for (guess, weight), u, v in itertools.product(guesses, grid, grid):
        draft = Draft([guess], None if certain else Q[None])
        out = accepted(draft, torch.stack((P, P)), Numbers(u, v))
        found[out[0]] += weight / 3600
        kept += weight / 3600 * (len(out) == 2)
    torch.testing.assert_close(found, P, atol=0.02, rtol=0)
    q = torch.nn.functional.one_hot(torch.tensor(1), 4).float() if certain else Q
    assert kept == pytest.approx(1 - float((P - q).abs().sum()) / 2, abs=0.02)


def sequences(model, prompt: list[int], n: int, sampling: Sampling) -> dict[tuple, float]:
    """The probability of every answer of n tokens."""
    found = {(): 1.0}
    for _ in range(n):
        longer = {}
        for answer, weight in found.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer]]))[0, -1:]
            for token, p in enumerate(probabilities(logits, sampling)[0].tolist()):
                if p > 0:
                    longer[(*answer, token)] = weight * p
        found = longer
    return found


def chi_square(counts: Counter, expected: dict[tuple, float], n: int) -> float:
    """In standard deviations above its mean."""
    assert set(counts) <= set(expected), "an answer that has no probability"
    cells = [(counts[key], n * p) for key, p in expected.items()]
    value = sum((seen - e) ** 2 / e for seen, e in cells if e > 0)
    degrees = len(cells) - 1
    return (value - degrees) / math.sqrt(2 * degrees)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 3, "temperature": 1.5}], ids=str
)
@pytest.mark.parametrize(("kind", "k"), [("model", 1), ("model", 2), ("n-grams", 2), ("heads", 2)])
def test_sampled_answers_are_distributed_as_the_targets(kind, k, options):
    """Every answer of three tokens over a vocabulary of five."""
    sizes = {"vocab_size": 5, "n_layers": 1}
    model, small = lively(**sizes), lively(seed=4, **sizes)
    drafter = {
        "model": ModelDrafter(small),
        "n-grams": NgramDrafter(1, 1),
        "heads": MedusaDrafter(lively_heads(2)),
    }[kind]
    prompt, n = [1, 2, 0, 1, 3, 1], 500
    expected = sequences(model, prompt, 3, Sampling(**options))
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    counts = Counter(
        tuple(
            speculative_generate(
                model, drafter, prompt, 3, k=k, sampling=Sampling(seed=seed, **options)
            ).tokens
        )
        for seed in range(n)
    )
    assert chi_square(counts, expected, n) < 4


def test_a_seed_gives_the_same_draws_and_the_global_state_is_left_alone():
    model, drafter = lively(), ModelDrafter(lively(seed=5))
    random.seed(1)
    torch.manual_seed(1)
    state, numbers = torch.get_rng_state(), random.getstate()
    runs = [
        speculative_generate(model, drafter, PROMPT, 12, k=3, sampling=Sampling(seed=s)).tokens
        for s in (7, 7, 8, None, None)
    ]
    assert runs[0] == runs[1] != runs[2] and runs[3] != runs[4]
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == numbers


def test_speedup():
    """Leviathan et al. 2023, table 1: with drafts that cost nothing, α 0.8 and γ 5 give 3.69."""
    assert speedup(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.01)
    assert speedup(0.9, 10, 0.0) == pytest.approx(6.86, abs=0.01)
    assert speedup(1.0, 4, 0.25) == 2.5 and speedup(0.0, 4, 0.25) == 0.5
    assert speedup(1.0, 4, 0.25, v=1.5) == 2.0
    for alpha in (0.0, 0.3, 0.99, 1.0):
        assert acceptance(tokens_per_pass(alpha, 3), 3) == pytest.approx(alpha, abs=1e-6)


def test_one_guess_in_plain_numbers():
    """What comes out is distributed as p, and as many guesses stand as p and q overlap."""
    p, q, stream, n = [0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], random.Random(3), 20_000
    draws = [draw_one(p, q, stream) for _ in range(n)]
    assert residual(p, q) == pytest.approx([0.4, 0.1, 0.0, 0.0])
    assert overlap(p, q) == pytest.approx(0.5)
    assert sum(stood for _, _, stood in draws) / n == pytest.approx(0.5, abs=0.02)
    for token in range(4):
        share = sum(out == token for _, out, _ in draws) / n
        assert share == pytest.approx(p[token], abs=0.02)
    assert all(out == guess or not stood for guess, out, stood in draws)
    assert all(draw_one(q, q, stream)[2] for _ in range(100)) and residual(q, q) == q


# N-grams


def proposals(ids: list[int], k: int = 3, **options: int) -> list[int]:
    return NgramDrafter(**options).start(None, 99, None).propose(ids, k, []).tokens


def test_what_followed_before():
    assert proposals([1, 2, 3, 4, 9, 1, 2]) == [3, 4, 9]
    assert proposals([1, 2, 3, 7, 1, 2, 4, 1, 2]) == [4, 1, 2]  # the latest place
    assert proposals([1, 2, 3, 7, 5, 2, 4, 1, 2]) == [3, 7, 5]  # the longest match first
    assert proposals([1, 2, 3]) == [] == proposals([7]) == proposals([])
    assert proposals([5, 5, 5, 5]) == [5]  # only what is known to follow
    assert proposals([1, 2, 3, 1], longest=1, shortest=1) == [2, 3, 1]


def test_growing_is_as_good_as_starting_again():
    """A session that saw the text piece by piece knows what a fresh one knows."""
    generator = random.Random(0)
    ids: list[int] = []
    session = NgramDrafter(3, 1).start(None, 99, None)
    for _ in range(60):
        ids += [generator.randrange(4) for _ in range(generator.randrange(1, 4))]
        fresh = NgramDrafter(3, 1).start(None, 99, None)
        assert session.propose(ids, 4, []) == fresh.propose(ids, 4, [])


# What is refused


def test_refusals():
    model = lively()
    with pytest.raises(ValueError, match="k is 0"):
        speculative_generate(model, NgramDrafter(), PROMPT, 4, k=0)
    with pytest.raises(ValueError, match="drafting model has 5 token ids and the target 97; both"):
        speculative_generate(model, ModelDrafter(lively(vocab_size=5)), PROMPT, 4, k=2)
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        speculative_generate(model, NgramDrafter(), [], 4, k=2)
    with pytest.raises(ValueError, match="longest"):
        NgramDrafter(1, 2)
    with torch.no_grad():
        model.norm.fill_(math.nan)
    with pytest.raises(ValueError, match="logits are not numbers"):
        speculative_generate(model, NgramDrafter(), PROMPT, 4, k=2, sampling=Sampling(seed=0))
