"""PyTorch's private functions: each still computes what the package needs, or a sentence says so.

What the package uses although its makers may change it any day; a new version shows here.
"""

import pytest
import torch
from torch import Tensor

from minillm import cpu_products

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="needs a build of PyTorch with oneDNN"
)


def whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("has_bfloat16", "torch.ops.mkldnn._is_mkldnn_bf16_supported"),
        ("has_int8", "torch.cpu._is_vnni_supported"),
        ("has_amx", "torch.cpu._is_amx_tile_supported"),
        ("has_avx2_only", "torch.cpu._is_avx2_supported or _is_avx512_supported"),
    ],
)
def test_what_the_cpu_has(name, private):
    found = getattr(cpu_products, name)()
    assert type(found) is bool, f"{private} no longer says True or False; {name} rests on it."


@needs_onednn
@pytest.mark.parametrize("bias", [None, torch.arange(3.0)])
def test_onednn(bias):
    weight, x = torch.randn(3, 5), torch.randn(4, 5)
    packed = cpu_products.onednn_layout(weight, 64)
    out = cpu_products.onednn_linear(x, packed, bias)
    expected = x @ weight.T + (0 if bias is None else bias)
    assert torch.allclose(out, expected, atol=1e-5), (
        "torch.ops.mkldnn._reorder_linear_weight and _linear_pointwise no longer multiply with "
        "a matrix that was laid out before; prepacked.py and measure.py rest on them."
    )


@pytest.mark.parametrize("has_it", [True, False])
def test_bfloat16(has_it, monkeypatch):
    """The same numbers up to the last rounding, with instructions for bfloat16 or without."""
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: has_it)
    x, weight = torch.randn(20, 64).bfloat16(), torch.randint(-127, 128, (24, 64), dtype=torch.int8)
    found = cpu_products.bfloat16_linear(x, weight)
    exact = x.double() @ weight.double().T
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=0.5)


def test_int8_weights():
    q, x = whole(-127, 127, 32, 64).to(torch.int8), whole(-3, 3, 2, 64).bfloat16()
    scale = torch.full((32,), 0.5).bfloat16()
    out = cpu_products.int8_weight_linear(x, q, scale)
    expected = (x.double() @ q.double().T) * 0.5
    assert torch.allclose(out.double(), expected, rtol=2**-7, atol=1), (
        "torch._weight_int8pack_mm no longer multiplies bfloat16 with int8 rows and their scales; "
        "Int8Linear rests on it."
    )


def test_int4_weights():
    q, x = whole(0, 15, 32, 64), whole(-3, 3, 2, 64).bfloat16()
    scale_zero = torch.tensor([0.5, 3.0]).bfloat16().expand(2, 32, 2).contiguous()
    packed = cpu_products.int4_layout(q)
    assert packed.dtype == torch.uint8 and packed.shape == (32, 32), (
        "torch.ops.aten._convert_weight_to_int4pack_for_cpu no longer packs two numbers into a "
        "byte; Int4Linear reads them back from its result."
    )
    out = cpu_products.int4_weight_linear(x, packed, 32, scale_zero)
    expected = x.double() @ (0.5 * (q - 8) + 3).double().T
    assert torch.allclose(out.double(), expected, rtol=2**-7, atol=1), (
        "torch._weight_int4pack_mm_for_cpu no longer multiplies with what "
        "_convert_weight_to_int4pack_for_cpu packs, as scale (q - 8) + zero; Int4Linear rests on "
        "both."
    )


def test_int8_times_int8():
    q, weight = whole(-127, 127, 20, 64), whole(-127, 127, 48, 64)
    out = cpu_products.int8_matmul(q.to(torch.int8), weight.to(torch.int8))
    assert out.dtype == torch.int32 and torch.equal(out.long(), q @ weight.T), (
        "torch._int_mm no longer multiplies int8 with int8 exactly into int32; W8A8Linear rests "
        "on it."
    )
