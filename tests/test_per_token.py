"""Rotary positions: the model looks up what `rope_tables` computes, in any order of use."""

import pytest
import torch
from models import lively, tiny_config

from minillm import Decoder
from minillm.layers import fast
from minillm.layers.per_token import apply_rope, rms_norm, rope_tables, swiglu
from minillm.training import next_token_loss

CPU = torch.device("cpu")


@pytest.mark.parametrize("factors", [None, (1.0, 2.0, 4.0, 8.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_model_looks_up_the_tables(dtype, factors):
    model = Decoder(tiny_config(rope_factors=factors)).to(dtype)
    for positions in (range(3, 9), range(255, 256), torch.tensor([7, 0, 255, 7])):
        expected = rope_tables(model.config, positions, CPU, dtype)
        for mine, computed in zip(model._rope(positions), expected, strict=True):
            assert torch.equal(mine, computed) and mine.dtype == dtype


def test_tables_follow_the_model():
    """To another dtype and device; and a model that has generated can be trained."""
    model = lively()
    ids = torch.arange(5)[None]
    with torch.inference_mode():
        model(ids)
    model.to(torch.float64)
    assert model._rope(range(2))[0].dtype == torch.float64
    assert model.to("meta")._rope(range(2))[0].is_meta
    model = lively().requires_grad_(True)
    with torch.inference_mode():
        model(ids)
    next_token_loss(model, ids).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_pairs_turn_by_their_angle():
    """The definition: pair i of a head at position p turns by p · θ^(-2i/D)."""
    config, x = tiny_config(), torch.randn(1, 6, 3, 8)
    turned = apply_rope(x, *rope_tables(config, range(2, 8), CPU, torch.float32))
    for p, i in ((0, 0), (5, 3), (2, 1)):
        angle = torch.tensor((p + 2) * config.rope_theta ** (-2 * i / 8))
        first, second = x[0, p, 1, i], x[0, p, 1, i + 4]
        expected = (
            first * angle.cos() - second * angle.sin(),
            first * angle.sin() + second * angle.cos(),
        )
        torch.testing.assert_close(turned[0, p, 1, i], expected[0])
        torch.testing.assert_close(turned[0, p, 1, i + 4], expected[1])


def test_norm_and_gate():
    x, weight = torch.randn(2, 2, 5, 8).unbind()
    formula = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight[0, 0]
    torch.testing.assert_close(rms_norm(x, weight[0, 0], 1e-5), formula)
    gate, up = x[..., :4], x[..., 4:]
    torch.testing.assert_close(swiglu(x), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e18])
def test_norm_of_one_row_in_16_bits(size):
    """It has operations of its own on a CPU (`layers/fast.py`)."""
    x = (size * torch.randn(1, 1, 48)).bfloat16()
    weight = torch.randn(48).bfloat16()
    exact = rms_norm(x.double(), weight.double(), 1e-5)
    _, mine = fast.ONE_ROW.add_rms_norm(x, None, weight, 1e-5)
    assert mine.dtype == torch.bfloat16 and mine.shape == x.shape
    torch.testing.assert_close(mine.double(), exact, rtol=2**-8, atol=0)


def test_the_faster_layers_are_the_layers():
    """One row in bfloat16: the definition with the switch off, the same logits with it on."""
    model = lively().bfloat16()
    ids = torch.tensor([[5]])
    with torch.inference_mode():
        quick = model(ids)
        model.fast = False
        torch.testing.assert_close(quick, model(ids), atol=0.02, rtol=0.02)
    assert fast.operations(torch.zeros(1, 1, 8).bfloat16(), None) is None  # gradients are recorded
    with torch.inference_mode():
        assert fast.operations(torch.zeros(1, 1, 8).bfloat16(), None) is fast.ONE_ROW
        assert fast.operations(torch.zeros(1, 2, 8).bfloat16(), None) is None
        assert fast.operations(torch.zeros(1, 1, 8), None) is None
