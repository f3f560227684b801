"""Activations in 8 bits: the product by its definition, outliers, smoothing, and the model."""

import pytest
import torch
from models import inputs_of, lively
from torch import Tensor

from minillm import Engine, EngineConfig, cpu_products, generate, model_bytes, quantize
from minillm.evaluate import difference
from minillm.quantization.calibration import collect
from minillm.quantization.grid import to_float8, to_int8
from minillm.quantization.linear import Float8Linear, Int8Linear
from minillm.quantization.w8a8 import OutlierLinear, W8A8Linear, int8_product, rounded, smoothing

SIZES = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_ff": 96}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(M: int, K: int) -> Tensor:
    """Rows in bfloat16 whose columns 3 and 40 are a hundred times as large as the others."""
    x = numbers(M, K, seed=1)
    x[:, 3] *= 100
    x[:, 40] *= 100
    return x.bfloat16()


def error(layer: torch.nn.Module, x: Tensor, w: Tensor) -> float:
    """Of the product, relative to its size."""
    exact = x.double() @ w.double().T
    return float((layer(x).double() - exact).norm() / exact.norm())


def test_rounding_by_hand():
    x = torch.tensor([[1.27, -0.5, 0.0], [12.7, 6.35, -12.7]])
    q, scale = rounded(x)
    assert q.tolist() == [[127, -50, 0], [127, 64, -127]] and scale.shape == (2, 1)
    torch.testing.assert_close(scale[:, 0], torch.tensor([0.01, 0.1]))
    q, scale = rounded(x, "tensor")
    assert q.tolist() == [[13, -5, 0], [127, 64, -127]] and scale.shape == (1, 1)
    assert rounded(torch.zeros(2, 3))[0].tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("M", [1, 2, 17, 70])
def test_whole_numbers_are_multiplied_exactly(M, vnni, monkeypatch):
    """With the chip's int8 product, and as on a CPU that has none."""
    monkeypatch.setattr(cpu_products, "has_int8", lambda: vnni)
    generator = torch.Generator().manual_seed(M)
    q, w = (torch.randint(-127, 128, (n, 2560), generator=generator) for n in (M, 40))
    q[0], w[0] = 127, -127  # the largest sum there is
    product = int8_product(q.to(torch.int8), w.to(torch.int8))
    assert product.dtype == torch.int32 and torch.equal(product.long(), q @ w.T)


@pytest.mark.parametrize("per", ["token", "tensor"])
@pytest.mark.parametrize("bias", [True, False])
def test_product(bias, per):
    """s_x · s_w · (q_x q_wᵀ), and nothing else but bfloat16's rounding of the result."""
    w, x, b = numbers(48, 128), numbers(2, 9, 128, seed=2).bfloat16(), torch.randn(48).bfloat16()
    matrix = to_int8(w)
    q, scale = rounded(x.flatten(0, 1), per)
    expected = (q.double() * scale.double()) @ matrix.dequantized().double().T
    expected = expected.view(2, 9, 48) + (b.double() if bias else 0)
    out = W8A8Linear(matrix, b if bias else None, per=per)(x)
    assert out.shape == (2, 9, 48) and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=2**-7)


@pytest.mark.parametrize("M", [1, 20])
def test_what_outliers_do_and_what_mends_it(M):
    """With one scale most of x is rounded away; LLM.int8() and SmoothQuant keep it."""
    w, x = numbers(32, 128), with_outliers(M, 128)
    matrix = to_int8(w)
    plain = error(W8A8Linear(matrix, per="tensor"), x, w)
    apart = error(OutlierLinear(matrix), x, w)
    only_small = x.clone()
    only_small[:, [3, 40]] = 0
    assert apart < plain
    small = error(W8A8Linear(matrix, per="tensor"), only_small, w)
    assert small < 0.02  # without the outliers there is nothing to mend


def test_known_outliers_are_stored_apart():
    w, x = numbers(32, 128), with_outliers(300, 128)
    layer = OutlierLinear.with_known(w, None, inputs_of(x.float() / 10), 6.0)
    assert layer.outliers.tolist() == [3, 40] and layer.outlier_weight.shape == (32, 2)
    assert not layer.weight[:, [3, 40]].any()
    torch.testing.assert_close(layer.dequantized(), w, atol=0.02, rtol=0.01)
    assert torch.equal(layer.dequantized()[:, 3], w[:, 3].bfloat16().float())
    found = OutlierLinear(to_int8(w))
    assert error(layer, x, w) < error(found, x, w) < 0.02


def test_an_outlier_in_one_row_is_found():
    """Columns are outliers if any row holds a large number, and below the threshold none is."""
    w, x = numbers(8, 64), numbers(5, 64, seed=3).clamp(-5.5, 5.5).bfloat16()
    matrix = to_int8(w)
    assert torch.equal(OutlierLinear(matrix)(x), W8A8Linear(matrix)(x))
    x[2, 7] = 50
    assert error(OutlierLinear(matrix), x, w) < error(W8A8Linear(matrix), x, w)


def test_smoothing_by_its_formula():
    w, x = numbers(32, 64), with_outliers(200, 64)
    inputs = inputs_of(x.float())
    largest, of_w = x.float().abs().amax(0), w.abs().amax(0)
    for alpha in (0.0, 0.5, 1.0):
        s = largest**alpha / of_w ** (1 - alpha)
        torch.testing.assert_close(
            smoothing(w, inputs, alpha).float(), 1 / s, atol=0, rtol=2**-7
        )  # fmt: skip
    columns = smoothing(w, inputs, 0.5)
    smooth = W8A8Linear(to_int8(w / columns.float()), None, columns, per="tensor")
    assert error(smooth, x, w) < 0.5 * error(W8A8Linear(to_int8(w), per="tensor"), x, w)


def test_float8_by_hand():
    """e4m3 has 8 steps between 1 and 2, and 448 is its largest number."""
    matrix = to_float8(torch.tensor([[448.0, 1.0, 1.07, 1.12, -2.2, 0.0]]))
    assert matrix.scale.item() == 1
    assert matrix.dequantized().tolist() == [[448.0, 1.0, 1.125, 1.125, -2.25, 0.0]]
    w, x = numbers(40, 64), numbers(3, 64, seed=1).bfloat16()
    layer = Float8Linear(to_float8(w))
    assert layer.weight.itemsize == 1 and error(layer, x, w) < 0.05
    assert error(layer, x, layer.dequantized()) < 0.005


@pytest.mark.parametrize("scheme", ["w8a8", "llm_int8", "llm_int8 known", "smoothquant", "fp8"])
def test_model(scheme):
    """Close to the model it was made from, stored in bytes, and it generates and serves."""
    model = lively(size=0.05, qkv_bias=True, **SIZES)
    before = {name: p.clone() for name, p in model.named_parameters()}
    ids = torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(0))
    name, _, known = scheme.partition(" ")
    small = quantize(model, name, **({"calibration": ids} if known or name[0] == "s" else {}))
    assert difference(small, model, ids[0].tolist()).kl < 0.01
    kind = {"fp8": Float8Linear, "w8a8": W8A8Linear, "smoothquant": W8A8Linear}
    assert type(small.layers[1].down) is kind.get(name, OutlierLinear)
    assert type(small.head) is Int8Linear and small.layers[0].qkv.bias is not None
    assert model_bytes(small) < 0.4 * model_bytes(model)
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key])
    expected = generate(small, [1, 2, 3, 4, 5], 8)
    engine = Engine(small, EngineConfig(n_blocks=20))
    number = engine.submit([1, 2, 3, 4, 5], 8)
    assert engine.run()[number].tokens == expected


def test_bytes_count_the_outliers():
    """Two bytes for each of their weights, and eight for each column's number."""
    model = lively(size=0.5, **SIZES)
    ids = torch.arange(60).view(2, 30)
    n = {k: int((v.largest >= 1.5).sum()) for k, v in collect(model, ids).items()}
    small = quantize(model, "llm_int8", calibration=ids, threshold=1.5)
    rows = {k: small.get_submodule(k).out_features for k in n}
    more = sum(n[k] * (2 * rows[k] + 8) for k in n)
    assert more > 0 and model_bytes(small) == model_bytes(quantize(model, "int8")) + more


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("w8a8", {"per": "row"}, "per is 'row'; choose token or tensor"),
        ("smoothquant", {}, "Scheme smoothquant needs calibration"),
        ("smoothquant", {"alpha": 2, "calibration": 1}, "alpha is 2; choose a number from 0 to 1"),
        ("llm_int8", {"threshold": -1}, "threshold is -1; choose a number from 0 to inf"),
        ("fp8", {"bits": 8}, "Scheme fp8 has no option bits; it has none"),
    ],
)
def test_refusals(scheme, options, message):
    with pytest.raises(ValueError, match=message):
        quantize(lively(**SIZES), scheme, **options)
