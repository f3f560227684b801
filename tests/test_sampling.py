"""Sampling: the exact distribution against hand-computed ones and transformers', and the draws against the distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minillm import Sampling
from minillm.sampling import probabilities, sample

INF = float("inf")
LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.05, 0.15, 0.1]).log()


def close(actual: Tensor, expected: list[float] | Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float32), atol=atol, rtol=1e-5)


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
        ({"top_k": 4}, [2 / 19, 8 / 19, 4 / 19, 0, 3 / 19, 2 / 19]),  # two share the fourth place: both stay
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.41}, [0, 2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 0.7}, [0, 8 / 15, 4 / 15, 0, 3 / 15, 0]),
        ({"top_p": 0.8}, [2 / 17, 8 / 17, 4 / 17, 0, 3 / 17, 0]),  # of two equals, the first
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.05, 0.15, 0.1]),
        # Top-p counts on what top-k left, of which the first is 0.4 / 0.75; and temperature comes before both.
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
    close(probabilities(LOGITS + 37, Sampling(**options)), expected, atol=1e-5)  # a constant changes nothing


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


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 50])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.8, 0.99])
def test_against_transformers(temperature, top_k, top_p):
    logits = 3 * torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = TopPLogitsWarper(top_p)(None, expected)
    close(probabilities(logits, Sampling(temperature, top_k, top_p)), expected.softmax(-1))


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.01, 10),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.floats(0.001, 1),
)


@given(st.lists(st.integers(-160, 160).map(lambda n: n / 8), min_size=1, max_size=10), samplings)  # no ties by rounding
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
        # The smallest set that reaches p: it does, and without its least likely member it would not.
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
    assert sample(logits, sampling).shape == (3, 4)
    assert sample(logits.transpose(0, 1), sampling).shape == (4, 3)
    assert sample(logits[0, 0], sampling).shape == ()
    assert sample(logits[:, 0]).shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_handled_in_float32(dtype):
    logits = LOGITS.to(dtype)
    probs = probabilities(logits, Sampling(top_p=0.7))
    assert probs.dtype == torch.float32
    close(probs, probabilities(logits.float(), Sampling(top_p=0.7)))


def test_the_logits_are_not_changed():
    logits = LOGITS.clone()
    sample(logits, Sampling(0.5, top_k=2, top_p=0.5, seed=0))
    assert torch.equal(logits, LOGITS)


# Extremes


@pytest.mark.parametrize(
    "logits",
    [[1e30, -1e30, 0.0], [3e38, -3e38, -INF], [-INF, 5.0, -INF], [-1e30, -1e30 * 1.01, -INF], [1e-30, 0.0, -1e-30], [-3e38, -3e38, -3e38]],
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
        assert probs[sample(logits, sampling)] > 0


def test_tiny_and_huge_temperatures():
    for temperature in (5e-324, 1e-30, 1e-6):
        close(probabilities(LOGITS, Sampling(temperature)), [0.0, 1, 0, 0, 0, 0])
    close(probabilities(LOGITS, Sampling(1e300)), [1 / 6] * 6)


# The draws


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.7}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 2.0, "top_k": 5, "top_p": 0.9}], ids=str
)
def test_frequencies(options):
    sampling, n = Sampling(**options, seed=0), 20000
    expected = n * probabilities(LOGITS, sampling)
    counts = sample(LOGITS.expand(n, -1), sampling, sampling.generator()).bincount(minlength=6)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 30  # with 5 degrees of freedom, one in 60 000 seeds exceeds this


def draws(seed: int | None, n: int = 200) -> list[int]:
    sampling = Sampling(seed=seed)
    generator = sampling.generator()
    return [int(sample(LOGITS, sampling, generator)) for _ in range(n)]


def test_seeds():
    assert draws(0) == draws(0)
    assert draws(2**32 - 1) == draws(2**32 - 1) != draws(0)
    assert len({tuple(draws(seed)) for seed in [0, 1, 2, 2**31, None, None]}) == 6


def test_a_request_does_not_touch_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    draws(5), draws(None)
    assert torch.equal(torch.rand(1), expected)


def test_greedy():
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (
        None,
        Sampling(temperature=0),
        Sampling(temperature=0.0, top_k=3, seed=1),
        Sampling(top_k=1),
        Sampling(temperature=1e-9),
    ):
        assert torch.equal(sample(logits, sampling), logits.argmax(-1))
    close(probabilities(logits, None), torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": True}, "temperature is True"),
        ({"top_p": True}, "top_p is True"),
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be 0 \(greedy\) or a positive number"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": 0}, "top_k is 0; it must be a whole number, 1 or more, or None"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, r"top_k is 2\.0"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1, or None"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"top_p": 1.01}, r"top_p is 1\.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_p": "0.9"}, r"top_p is '0\.9'"),
        ({"seed": -1}, r"seed is -1; it must be a whole number from 0 to 2\*\*32 - 1 .*, or None"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": 1.5}, r"seed is 1\.5"),
    ],
    ids=str,
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
