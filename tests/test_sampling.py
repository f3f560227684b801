"""Sampling: the distribution by hand and against transformers; draws against the distribution."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.sampling import _NUCLEUS, Sampling, draw, greedy, next_tokens, probabilities

INF = float("inf")
LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.05, 0.15, 0.1]).log()
LAST = math.nextafter(1, 0)  # the largest number below 1


def sample(logits, sampling, uniforms) -> list[int]:
    """`next_tokens` with one sampling for all rows, or one for each."""
    one = sampling is None or isinstance(sampling, Sampling)
    return next_tokens(logits, [sampling] * len(logits) if one else sampling, uniforms)


def close(actual: Tensor, expected: list[float] | Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=torch.float32), atol=atol, rtol=1e-5
    )


# The distribution


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.05, 0.15, 0.1]),
        ({"temperature": 0.5}, [4 / 98, 64 / 98, 16 / 98, 1 / 98, 9 / 98, 4 / 98]),  # squares
        ({"temperature": 1}, [0.1, 0.4, 0.2, 0.05, 0.15, 0.1]),
        ({"top_k": 1}, [0, 1, 0, 0, 0, 0]),
        ({"top_k": 2}, [0, 2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_k": 6}, [0.1, 0.4, 0.2, 0.05, 0.15, 0.1]),
        ({"top_k": 100}, [0.1, 0.4, 0.2, 0.05, 0.15, 0.1]),
        # Two share the fourth place: both stay.
        ({"top_k": 4}, [2 / 19, 8 / 19, 4 / 19, 0, 3 / 19, 2 / 19]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.41}, [0, 2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 0.7}, [0, 8 / 15, 4 / 15, 0, 3 / 15, 0]),
        ({"top_p": 0.8}, [2 / 17, 8 / 17, 4 / 17, 0, 3 / 17, 0]),  # of two equals, the first
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.05, 0.15, 0.1]),
        # Top-p counts on what top-k left, its first being 0.4 / 0.75; temperature comes first.
        ({"top_k": 3, "top_p": 0.53}, [0, 1, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.54}, [0, 2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.63}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.81}, [0, 0.8, 0.2, 0, 0, 0]),
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.79}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 0, "top_k": 3, "top_p": 0.9}, [0, 1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_exact_distributions(options, expected):
    close(probabilities(LOGITS, Sampling(**options)), expected)
    # A constant changes nothing.
    close(probabilities(LOGITS + 37, Sampling(**options)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 1}, [0.5, 0, 0.5, 0]),
        ({"top_p": 0.25}, [1, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        (None, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_ties(options, expected):
    logits = torch.tensor([1.0, 0.0, 1.0, 0.0])
    close(probabilities(logits, options and Sampling(**options)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 50])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.8, 0.99])
def test_against_transformers(temperature, top_k, top_p):
    from transformers.generation import logits_process  # here, as it takes seconds

    logits = 3 * torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    expected = logits_process.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = logits_process.TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = logits_process.TopPLogitsWarper(top_p)(None, expected)
    close(probabilities(logits, Sampling(temperature, top_k, top_p)), expected.softmax(-1))


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.01, 10),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.floats(0.001, 1),
)


# Eighths, so that rounding makes no ties.
@given(st.lists(st.integers(-160, 160).map(lambda n: n / 8), min_size=1, max_size=10), samplings)
@settings(deadline=None, max_examples=200)
def test_rules_of_every_distribution(values, sampling):
    logits = torch.tensor(values)
    probs = probabilities(logits, sampling)
    assert probs.sum().item() == pytest.approx(1, abs=1e-5) and probs.min() >= 0
    assert probs[logits.argmax()] == probs.max()
    kept = probs > 0
    full = probabilities(logits, Sampling(sampling.temperature))
    if sampling.top_k is not None and sampling.top_k < len(values):
        kth = logits.sort(descending=True).values[sampling.top_k - 1]
        assert (logits[kept] >= kth).all()
        full = probabilities(logits, Sampling(sampling.temperature, sampling.top_k))
        if sampling.top_p is None:
            assert torch.equal(kept, (logits >= kth) & (full > 0))
    if sampling.top_p is not None:
        # The smallest set that reaches p: without its least likely member it would not.
        assert full[kept].sum() >= sampling.top_p - 1e-5
        assert full[kept].sum() - full[kept].min() < sampling.top_p + 1e-5
        assert (full[~kept] <= full[kept].min()).all()
    else:
        assert torch.equal(probs, full)
    # What is kept keeps its proportions.
    close(probs[kept], full[kept] / full[kept].sum())


def test_any_leading_dimensions_and_strides():
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(0.8, top_k=5, top_p=0.9, seed=1)
    rows = torch.stack([probabilities(row, sampling) for row in logits.view(12, 7)])
    close(probabilities(logits, sampling), rows.view(3, 4, 7))
    close(probabilities(logits.transpose(0, 1), sampling), rows.view(3, 4, 7).transpose(0, 1))
    assert probabilities(logits[0, 0], sampling).shape == (7,)
    # Tokens come for rows (N, V), contiguous or not.
    uniforms = sampling.uniforms(3)
    tokens = sample(logits[:, 0], sampling, uniforms)
    assert tokens == sample(logits[:, 0].contiguous(), sampling, uniforms)
    assert len(tokens) == 3 and all(type(token) is int for token in tokens)
    assert sample(logits[:, 0], None, [0.0] * 3) == logits[:, 0].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_handled_in_float32(dtype):
    logits = LOGITS.to(dtype)
    probs = probabilities(logits, Sampling(top_p=0.7))
    assert probs.dtype == torch.float32
    close(probs, probabilities(logits.float(), Sampling(top_p=0.7)))


def test_the_logits_are_not_changed():
    logits = LOGITS.clone()
    for sampling in (Sampling(0.5, top_k=2, top_p=0.5, seed=0), None):
        sample(logits[None], sampling, [0.5])
        assert torch.equal(logits, LOGITS)


# Extremes


@pytest.mark.parametrize(
    "logits",
    [
        [1e30, -1e30, 0.0],
        [3e38, -3e38, -INF],
        [-INF, 5.0, -INF],
        [-1e30, -1e30 * 1.01, -INF],
        [1e-30, 0.0, -1e-30],
        [-3e38, -3e38, -3e38],
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-45, 1e-6, 1.0, 1e6, 1e38, 1.7e308])
@pytest.mark.parametrize("top_p", [None, 1e-60, 0.5])
def test_extremes_are_never_nan(logits, temperature, top_p):
    logits = torch.tensor(logits)
    for top_k in (None, 2):
        sampling = Sampling(temperature, top_k, top_p, seed=0)
        probs = probabilities(logits, sampling)
        assert probs.isfinite().all() and probs.sum().item() == pytest.approx(1)
        assert (probs[logits == -INF] == 0).all()
        for u in (0.0, 0.5, LAST):
            (token,) = sample(logits[None], sampling, [u])
            assert probs[token] > 0


def test_tiny_and_huge_temperatures():
    for temperature in (5e-324, 1e-30, 1e-6):
        close(probabilities(LOGITS, Sampling(temperature)), [0.0, 1, 0, 0, 0, 0])
    close(probabilities(LOGITS, Sampling(1e300)), [1 / 6] * 6)


# The draws


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_frequencies(options):
    sampling, n = Sampling(**options, seed=0), 20000
    probs = probabilities(LOGITS, sampling)
    tokens = draw(probs.expand(n, -1), sampling.uniforms(n))
    expected, counts = n * probs, torch.tensor(tokens).bincount(minlength=6)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 30  # with 5 degrees of freedom, one in 60 000 seeds exceeds this
    assert tokens == sample(LOGITS.expand(n, -1), sampling, sampling.uniforms(n))


def test_exact_inversion():
    """The token is the first whose cumulated probability exceeds u: sums of halves are exact."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    before = {u: math.nextafter(u, 0) for u in (0.25, 0.75, 0.875)}
    expected = {0.0: 1, before[0.25]: 1, 0.25: 3, before[0.75]: 3, 0.75: 4, before[0.875]: 4}
    expected |= {0.875: 5, LAST: 5}
    assert draw(probs.expand(len(expected), -1), list(expected)) == list(expected.values())


@pytest.mark.parametrize("n_vocab", [1, 2, 1000])
def test_inversion_by_hand(n_vocab):
    g = random.Random(0)
    probs = torch.randn(50, n_vocab, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    probs *= torch.rand(probs.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    probs[:, n_vocab // 2] += 1e-3  # not all 0
    uniforms = [g.random() for _ in probs]
    expected = []
    for row, u in zip(probs.tolist(), uniforms, strict=True):
        cumulated = list(itertools.accumulate(row))
        reached = u * cumulated[-1]  # probabilities rounded to float32 do not sum to 1
        expected.append(next(i for i, total in enumerate(cumulated) if total > reached))
    assert draw(probs, uniforms) == expected


def draws(seed: int | None, n: int = 200) -> list[int]:
    return sample(LOGITS.expand(n, -1), Sampling(seed=seed), Sampling(seed=seed).uniforms(n))


def test_seeds():
    assert draws(0) == draws(0)
    assert draws(2**32 - 1) == draws(2**32 - 1) != draws(0)
    assert draws(10**30) == draws(10**30) != draws(10**30 + 1)
    assert len({tuple(draws(seed)) for seed in [0, 1, 2, 2**31, 2**32, None, None]}) == 7


def test_uniforms():
    """The t-th number belongs to the t-th token, however many are asked for."""
    sampling = Sampling(seed=7)
    numbers = sampling.uniforms(1000)
    assert sampling.uniforms(3) == numbers[:3] and len(sampling.uniforms(0)) == 0
    assert all(0 <= u < 1 for u in numbers) and len(set(numbers)) == 1000
    assert sum(numbers) / 1000 == pytest.approx(0.5, abs=0.05)
    assert Sampling().uniforms(3) != Sampling().uniforms(3)


def test_a_request_does_not_touch_the_global_generator():
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    draws(5), draws(None)
    assert (torch.rand(1), random.random()) == expected


def test_greedy():
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (
        None,
        Sampling(temperature=0),
        Sampling(temperature=0.0, top_k=3, seed=1),
        Sampling(top_k=1),
        Sampling(temperature=1e-9),
    ):
        assert sample(logits, sampling, [LAST] * 9) == logits.argmax(-1).tolist()
    close(probabilities(logits, None), torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


# Batches of different requests

MIXED = [
    None,
    Sampling(),
    Sampling(0.0, top_k=3, top_p=0.2),
    Sampling(0.7),
    Sampling(1.3, top_k=1),
    Sampling(2.0, top_k=40),
    Sampling(0.9, top_k=7, top_p=0.6),
    Sampling(top_p=0.3),
    Sampling(top_p=0.95),
    Sampling(30.0, top_p=0.9999),  # nearly uniform: far more than the candidates of top-p
    Sampling(1.0, top_k=10**9, top_p=1.0),
    Sampling(5e-324),
    Sampling(1e300, top_k=300, top_p=0.5),
]


@pytest.fixture
def two_threads():
    """Some sums are cut in parts for the threads, which changes their last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("n_vocab", [2, 97, 49152])
def test_rows_of_a_batch_equal_each_row_alone(two_threads, n_vocab):
    """Bit for bit: whose neighbour a request is must not change its tokens."""
    logits = 3 * torch.randn(len(MIXED), n_vocab, generator=torch.Generator().manual_seed(0))
    probs = probabilities(logits, MIXED)
    uniforms = random.Random(0).choices([0.0, 0.3, 0.77, LAST], k=len(MIXED))
    tokens = sample(logits, MIXED, uniforms)
    for i, sampling in enumerate(MIXED):
        alone = probabilities(logits[i], sampling)
        assert torch.equal(probs[i], alone), sampling
        assert torch.equal(probabilities(logits[i : i + 1], [sampling])[0], alone), sampling
        assert [tokens[i]] == sample(logits[i : i + 1], sampling, uniforms[i : i + 1])
        assert probs[i].sum().item() == pytest.approx(1, abs=1e-5)


def test_draw_takes_the_greedy_ones_from_the_best():
    logits = 3 * torch.randn(4, 97, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(seed=1)
    uniforms = [0.9, 0.8, 0.7, 0.1]
    best = [11, 22, 33, 44]  # not the largest: to be seen to be taken from here
    samplings = [None, sampling, Sampling(0), sampling]
    tokens = next_tokens(logits, samplings, uniforms, best)
    assert tokens == [11, *sample(logits[1:2], sampling, uniforms[1:2]), 33,
                      *sample(logits[3:], sampling, uniforms[3:])]  # fmt: skip
    assert next_tokens(logits[:0], [], [], []) == []


def test_of_equals_the_first_stay_under_top_p():
    """As many as p needs, the first ones, whether p is reached at once or among all tokens."""
    for n_equal, n_vocab in ((5, 8), (300, 1000)):
        logits = torch.full((n_vocab,), -INF)
        at = torch.arange(n_vocab - n_equal, n_vocab)
        logits[at] = 1.0
        for n_kept in (1, 2, n_equal // 2, n_equal - 1, n_equal):
            probs = probabilities(logits, Sampling(top_p=(n_kept - 0.5) / n_equal))
            assert probs.nonzero()[:, 0].tolist() == at[:n_kept].tolist()
            close(probs[at[:n_kept]], [1 / n_kept] * n_kept)
    # One above the equals, one below: 0.4, then 0.15 four times with one between.
    probs = torch.tensor([0.15, 0.15, 0.4, 0.05, 0.15, 0.1])
    for top_p, kept in ((0.5, [0, 2]), (0.6, [0, 1, 2]), (0.75, [0, 1, 2, 4])):
        assert probabilities(probs.log(), Sampling(top_p=top_p)).nonzero()[:, 0].tolist() == kept


@pytest.mark.slow
def test_a_nucleus_larger_than_the_candidates():
    """Top-p looks at the likeliest few first; here they do not reach p."""
    from transformers.generation.logits_process import TopPLogitsWarper

    n_vocab = 4 * _NUCLEUS
    logits = torch.linspace(0, -1, n_vocab)[torch.randperm(n_vocab)]
    for top_p in (0.1, 0.5, 0.9, 0.999):
        ours = probabilities(logits, Sampling(top_p=top_p))
        theirs = TopPLogitsWarper(top_p)(None, logits[None])[0].softmax(-1)
        close(ours, theirs)
        assert torch.equal(ours > 0, theirs > 0)
    assert (probabilities(logits, Sampling(top_p=0.1)) > 0).sum() < _NUCLEUS
    assert (probabilities(logits, Sampling(top_p=0.9)) > 0).sum() > 2 * _NUCLEUS


@pytest.mark.parametrize("sampling", MIXED, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_rows_that_are_not_numbers_give_minus_one(sampling, bad):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    whole = sample(logits, sampling, [0.1, 0.5, 0.9])
    logits[1, 77] = bad
    for samplings in (sampling, [sampling] * 3, [sampling, Sampling(top_p=0.5), sampling]):
        tokens = sample(logits, samplings, [0.1, 0.5, 0.9])
        assert tokens == [whole[0], -1, whole[2]]
    assert probabilities(logits, sampling)[1].isnan().all()


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": True}, "temperature is True"),
        ({"top_p": True}, "top_p is True"),
        (
            {"temperature": -0.1},
            r"temperature is -0\.1; it must be 0 \(greedy\) or a positive number",
        ),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": 0}, "top_k is 0; it must be a whole number, 1 or more"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, r"top_k is 2\.0"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1, or None"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"top_p": 1.01}, r"top_p is 1\.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_p": "0.9"}, r"top_p is '0\.9'"),
        ({"seed": -1}, "seed is -1; it must be a whole number, 0 or more"),
        ({"seed": -(2**32)}, "seed is -4294967296"),
        ({"seed": 1.5}, r"seed is 1\.5"),
        ({"seed": True}, "seed is True"),
    ],
    ids=str,
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_first_among_equals(dtype):
    logits = torch.tensor([[0, 3, 1, 3], [-torch.inf, -2, -2, -5], [7, 7, 7, 7]], dtype=dtype)
    assert greedy(logits).tolist() == [1, 1, 0]
    assert greedy(logits[0]).item() == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_greedy_gives_minus_one_for_what_is_not_a_number(bad):
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, bad, 1.0], [-torch.inf] * 3, [-torch.inf, 1, 2]])
    assert greedy(logits).tolist() == [1, -1, -1, 2]
    assert next_tokens(logits, [None] * 4, [0.0] * 4) == [1, -1, -1, 2]
