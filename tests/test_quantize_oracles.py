"""The grids against other libraries: gguf and PyTorch always, torchao and quanto where installed.

A library that is given our scale must give our whole numbers; only a number beside a tie of two
steps may go to either. A library that finds the scale itself must find ours, once it is rounded to
bfloat16. gguf rounds to float16, so it gets numbers whose scale needs no rounding.

    pip install torchao optimum-quanto bitsandbytes
"""

import logging

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.quantization.grid import QuantizedMatrix, to_int4, to_int8
from minillm.quantization.w8a8 import OutlierLinear, W8A8Linear, rounded

GROUP = 32
BF16 = 2**-8
"""What rounding to bfloat16 moves a number at most, of its own size."""
CASES = [
    pytest.param(size, shift, id=f"size {size}, shift {shift}")
    for size in (1e-3, 0.05, 30.0)
    for shift in (0.0, 2.5)
]
"""Sizes of the numbers, and how many of those sizes all of them are moved."""


def numbers(size: float, shift: float, N: int = 24, K: int = 256) -> Tensor:
    """With a few large ones, as matrices have them."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(N, K, generator=generator)
    w[torch.rand(N, K, generator=generator) < 0.01] *= 8
    return (w + shift) * size


def assert_same_steps(q: Tensor, theirs: Tensor, places: Tensor) -> None:
    """Whole numbers that are equal, except beside a tie.

    places: where the numbers lie on the grid before they are rounded, in float64.
    """
    differ = q.int() != theirs.int()
    assert differ.sum() <= 2 + q.numel() / 1000  # a small tensor may hold a tie, too
    assert ((q.int() - theirs.int()).abs() <= 1).all()
    from_tie = ((places % 1) - 0.5).abs()
    assert (from_tie[differ] < 1e-4).all()


def in_groups(w: Tensor) -> Tensor:
    return w.unflatten(1, (-1, GROUP))


def places(w: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Where W's numbers lie on a grid, before they are rounded; by its docstring, in float64."""
    if matrix.zero is None:
        return w.double() / matrix.scale.double()[:, None]
    scale, zero = matrix.scale.double()[..., None], matrix.zero.double()[..., None]
    return ((in_groups(w.double()) - zero) / scale + 8).flatten(1)


# gguf: the blocks of ggml


def ggml(w: Tensor, kind: GGMLQuantizationType) -> Tensor:
    blocks = gguf.quants.quantize(w.numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize("step", [2**-9, 2**-4, 2.0])
def test_int8_against_q8_0(step):
    """Q8_0 is a scale for 32 numbers: int8 with rows of 32."""
    rows = numbers(30 * step, 0.0).view(-1, GROUP).clamp(-126 * step, 126 * step)
    rows[:, 7] = -127 * step
    matrix = to_int8(rows)
    assert (matrix.scale == step).all()
    assert_same_steps(matrix.q, ggml(rows, GGMLQuantizationType.Q8_0) / step, places(rows, matrix))


@pytest.mark.parametrize("step", [2**-9, 2**-4, 2.0])
@pytest.mark.parametrize("zero", [0, 3, -20])
def test_int4_against_q4_1(zero, step):
    """Q4_1 is a scale and a least number for 32 numbers: the asymmetric grid."""
    w = numbers(3 * step, 0.0).clamp(-7.9 * step, 6.9 * step)
    groups = in_groups(w)
    groups[..., 3], groups[..., 20] = -8 * step, 7 * step
    w += zero * step
    matrix = to_int4(w, GROUP)
    assert (matrix.scale == step).all() and (matrix.zero == zero * step).all()
    q = ggml(w, GGMLQuantizationType.Q4_1) / step - zero + 8
    assert_same_steps(matrix.q, q, places(w, matrix))


# PyTorch's own


def fake_quantized(rows: Tensor, scale: Tensor, least: Tensor, steps: int) -> Tensor:
    """How many steps (R, K) above least (R,) PyTorch's fake quantization puts each number.

    It rounds after a zero point was added, so what is no whole number is taken off before.
    """
    zero = torch.zeros(len(rows), dtype=torch.int32)
    moved = rows - least[:, None]
    theirs = torch.fake_quantize_per_channel_affine(moved, scale, zero, 0, 0, steps)
    return (theirs / scale[:, None]).round()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=40)
def test_int8_against_pytorch(N, K, seed, size):
    w = torch.randn(N, 8 * K, generator=torch.Generator().manual_seed(seed)) * size
    matrix = to_int8(w)
    scale, zero = matrix.scale.float(), torch.zeros(N, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(w, scale, zero, 0, -127, 127)
    q = (theirs / scale[:, None]).round()
    assert_same_steps(matrix.q, q, places(w, matrix))
    assert torch.equal(QuantizedMatrix(q, matrix.scale).dequantized(), theirs)


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("size", "shift"), CASES)
def test_int4_against_pytorch(size, shift, symmetric, bits):
    """A channel of theirs is a group of ours."""
    w = numbers(size, shift)
    matrix = to_int4(w, GROUP, symmetric=symmetric, bits=bits)
    scale, zero = matrix.scale.float().flatten(), matrix.zero.float().flatten()
    steps = 2**bits - 2 if symmetric else 2**bits - 1
    first = 8 - steps // 2 if symmetric else 0
    theirs = fake_quantized(w.view(-1, GROUP), scale, zero + (first - 8) * scale, steps)
    assert_same_steps(matrix.q, first + theirs.view_as(w), places(w, matrix))


# torchao


@pytest.fixture
def ao():
    """torchao's primitives; its import says on stderr which GPU kernels it cannot load."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    from torchao.quantization import quant_primitives

    return quant_primitives


@pytest.mark.parametrize(("size", "shift"), CASES)
def test_int8_against_torchao(ao, size, shift):
    w = numbers(size, shift)
    matrix, rows = to_int8(w), (1, w.shape[1])
    scale, zero = ao.choose_qparams_affine(
        w, ao.MappingType.SYMMETRIC, rows, torch.int8, -127, 127, scale_dtype=torch.bfloat16
    )
    assert torch.equal(scale, matrix.scale) and not zero.any()
    q = ao.quantize_affine(w, rows, scale.float(), zero, torch.int8, -127, 127)
    assert_same_steps(matrix.q, q, places(w, matrix))
    theirs = ao.dequantize_affine(q, rows, scale.float(), zero, torch.int8, -127, 127)
    assert torch.equal(QuantizedMatrix(q, matrix.scale).dequantized(), theirs)


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize(("size", "shift"), CASES)
def test_symmetric_int4_against_torchao(ao, size, shift, bits):
    """Their whole numbers are around 0, ours around 8."""
    w, groups, most = numbers(size, shift), (1, GROUP), 2 ** (bits - 1) - 1
    matrix = to_int4(w, GROUP, symmetric=True, bits=bits)
    scale, zero = ao.choose_qparams_affine(
        w, ao.MappingType.SYMMETRIC, groups, torch.int8, -most, most,
        scale_dtype=torch.bfloat16, keepdim=True,
    )  # fmt: skip
    assert torch.equal(scale, matrix.scale) and not zero.any() and not matrix.zero.any()
    q = ao.quantize_affine(w, groups, scale.float(), zero, torch.int8, -most, most)
    assert_same_steps(matrix.q, q + 8, places(w, matrix))
    theirs = ao.dequantize_affine(q, groups, scale.float(), zero, torch.int8, -most, most)
    assert torch.equal(QuantizedMatrix(q + 8, matrix.scale, matrix.zero).dequantized(), theirs)


@pytest.mark.parametrize(("size", "shift"), CASES)
def test_int4_against_torchao(ao, size, shift):
    """Its grid for the product of PyTorch has our form: a zero in the middle, between steps."""
    w, groups = numbers(size, shift), (1, GROUP)
    matrix = to_int4(w, GROUP)
    own_scale, own_zero = ao._choose_qparams_affine_tinygemm(
        w, ao.MappingType.ASYMMETRIC, groups, torch.uint8, 0, 15, scale_dtype=torch.bfloat16
    )
    assert torch.equal(own_scale, matrix.scale)
    # Ours is in the middle of the rounded scale's steps, rounded itself.
    off = (matrix.zero.float() - own_zero).abs()
    assert (off <= 8 * own_scale.float() * BF16 * 1.01 + own_zero.abs() * BF16 * 1.01).all()
    scale, zero = matrix.scale.float(), matrix.zero.float()
    q = ao._quantize_affine_tinygemm(w, groups, scale, zero, torch.uint8, 0, 15)
    assert_same_steps(matrix.q, q, places(w, matrix))
    theirs = ao._dequantize_affine_tinygemm(q, groups, scale, zero, torch.uint8, 0, 15)
    mine = QuantizedMatrix(q, matrix.scale, matrix.zero).dequantized()
    torch.testing.assert_close(mine, theirs, atol=float(w.abs().max()) * 2**-22, rtol=2**-22)


def test_w8a8_against_torchao(ao):
    """A scale for each row of x, and one for each row of W."""
    from torchao.kernel.intmm import int_scaled_matmul

    w, x = numbers(0.05, 0.0), numbers(1.0, 0.0, N=40).bfloat16()
    matrix, rows = to_int8(w), (1, x.shape[1])
    scale, zero = ao.choose_qparams_affine(
        x.float(), ao.MappingType.SYMMETRIC, rows, torch.int8, -127, 127
    )
    theirs = ao.quantize_affine(x.float(), rows, scale, zero, torch.int8, -127, 127)
    q, own_scale = rounded(x)
    torch.testing.assert_close(own_scale.flatten(), scale.flatten(), atol=0, rtol=1e-6)
    assert_same_steps(q, theirs, x.double() / own_scale.double())
    y = int_scaled_matmul(theirs, matrix.q.T.contiguous(), scale.view(-1, 1)) * matrix.scale.float()
    assert (W8A8Linear(matrix)(x).float() - y).abs().max() < 0.005 * y.abs().max()


# quanto


@pytest.fixture
def quanto():
    reason = "optimum-quanto is not installed: pip install optimum-quanto"
    return pytest.importorskip("optimum.quanto", reason=reason)


@pytest.mark.parametrize(("size", "shift"), CASES)
def test_int8_against_quanto(quanto, size, shift):
    w = numbers(size, shift)
    matrix = to_int8(w)
    scale = quanto.AbsmaxOptimizer()(w, quanto.qint8, 0)  # (N, 1)
    assert torch.equal(scale[:, 0].bfloat16(), matrix.scale)
    scale = scale.bfloat16().float()
    theirs = quanto.quantize_weight(w, quanto.qint8, axis=0, scale=scale, optimized=False)
    q = theirs._data.clamp(min=-127)
    assert_same_steps(matrix.q, q, places(w, matrix))
    assert torch.equal(
        QuantizedMatrix(theirs._data, matrix.scale).dequantized(), theirs.dequantize()
    )


@pytest.mark.parametrize(("size", "shift"), CASES)
def test_int4_against_quanto(quanto, size, shift):
    """It counts from the least number of a group instead of from the middle."""
    w = numbers(size, shift)
    matrix = to_int4(w, GROUP)
    own_scale, own_shift = quanto.MaxOptimizer()(w, quanto.qint4, 0, GROUP)
    assert torch.equal(own_scale.bfloat16().flatten(), matrix.scale.flatten())
    scale, zero = matrix.scale.float().view(-1, 1), matrix.zero.float().view(-1, 1)
    least = zero - 8 * scale
    off = (least + own_shift.view(-1, 1)).abs()
    assert (off <= (16 * scale + zero.abs()) * BF16 * 1.01).all()
    theirs = quanto.quantize_weight(
        w, quanto.qint4, axis=0, group_size=GROUP, scale=scale, shift=-least, optimized=False
    )
    q = theirs._data.unpack() if hasattr(theirs._data, "unpack") else theirs._data
    assert_same_steps(matrix.q, q.view_as(w), places(w, matrix))
    tolerance = float(w.abs().max()) * 2**-22
    mine = QuantizedMatrix(q.view_as(w), matrix.scale, matrix.zero).dequantized()
    torch.testing.assert_close(mine, theirs.dequantize(), atol=tolerance, rtol=2**-22)


# bitsandbytes


def test_llm_int8_against_bitsandbytes():
    """Their product on our numbers: columns with a magnitude of 6 are multiplied in 16 bits."""
    reason = "bitsandbytes is not installed: pip install bitsandbytes"
    functional = pytest.importorskip("bitsandbytes.functional", reason=reason)
    w, x = numbers(0.05, 0.0, K=64), numbers(1.0, 0.0, N=40, K=64).clamp(-5, 5)
    x[:, 5] *= 12
    x[2, 7] = 7.5
    x = x.bfloat16()
    matrix, half = to_int8(w), x.half()
    q, scale, columns = functional.int8_vectorwise_quant(half.clone(), threshold=6.0)
    theirs = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
        half, q, matrix.q, scale, matrix.scale.float() * 127, columns, None
    )[0].float()
    apart, together = OutlierLinear(matrix)(x).float(), W8A8Linear(matrix)(x).float()
    assert (apart - theirs).abs().max() < 0.006 * theirs.abs().max()
    assert (together - theirs).abs().max() > 0.01 * theirs.abs().max()
