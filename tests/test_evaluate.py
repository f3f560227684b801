"""Perplexity, KL divergence and agreement by their definitions."""

import math

import pytest
import torch
from models import lively

from minillm import quantize
from minillm.evaluate import difference, evaluation_text, perplexity

SIZES = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_ff": 96}


@pytest.mark.parametrize("n", [2, 7, 16, 17, 40])
def test_perplexity_by_hand(n):
    """Each window of 8 alone; a last token on its own is not predicted by anything."""
    model, ids = lively(), [(7 * i) % 97 for i in range(n)]
    losses = []
    for start in range(0, n, 8):
        piece = ids[start : start + 8]
        for i in range(1, len(piece)):
            with torch.inference_mode():
                p = model(torch.tensor([piece[:i]]))[0, -1].softmax(-1)[piece[i]]
            losses.append(-math.log(p))
    expected = math.exp(sum(losses) / len(losses))
    assert perplexity(model, ids, 8) == pytest.approx(expected, rel=1e-4)


def test_a_model_is_not_different_from_itself():
    model, ids = lively(), list(range(50))
    same = difference(model, model, ids, 20)
    assert same.kl == pytest.approx(0, abs=1e-6) and same.agreement == 1


def test_difference_by_hand():
    one, two = lively(0, size=0.1), lively(1, size=0.1)
    ids = [5, 6, 7, 8]
    with torch.inference_mode():
        p, q = (m(torch.tensor([ids]))[0].double().softmax(-1) for m in (two, one))
    found = difference(one, two, ids)
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert found.agreement == pytest.approx(float(same))


def test_fewer_bits_are_farther_away():
    model, ids = lively(size=0.05, **SIZES), [(11 * i) % 97 for i in range(60)]
    kls = [difference(quantize(model, scheme), model, ids).kl for scheme in ("int8", "int4")]
    assert 0 < kls[0] < kls[1]


def test_refusals():
    with pytest.raises(ValueError, match="ids holds 1 tokens; give at least two"):
        perplexity(lively(), [3])
    with pytest.raises(ValueError, match="window"):
        perplexity(lively(), [3, 4], 1)


def test_texts():
    assert evaluation_text("austen").startswith("Sir Walter Elliot, of Kellynch Hall")
    assert len(evaluation_text("austen")) == 59_974
    assert 'The "assert" statement' in evaluation_text("python")
    with pytest.raises(ValueError, match="name is 'shakespeare'; choose python or austen"):
        evaluation_text("shakespeare")
