"""A few rows times a matrix in 16, 8 and 4 bits, in the interpreter and compiled."""

import itertools

import pytest
import torch
from interpreter import patch_once_a_launch
from plain_attention import at_most_twice
from tiers import HAS_TRITON
from torch import Tensor

if not HAS_TRITON:
    pytest.skip("needs the package triton, which exists for Linux", allow_module_level=True)
from gpu_compiler import (
    SHARED_LIMIT,
    Launch,
    compile_for,
    instructions_a_step,
    recorded,
    specialization,
)

from minillm.kernels import few_rows
from minillm.kernels.few_rows import few_rows_linear
from minillm.quantization.grid import pack_blocks

interpret = pytest.mark.interpret
patch_once_a_launch()
# M, N, K: one row and many, N and K that no tile divides, fewer columns than parts
SIZES = [(1, 70, 512), (8, 64, 384), (17, 130, 128), (3, 40, 352), (64, 66, 192)]
FOUR = ("4 bits, groups of 32", "4 bits, groups of 64", "4 bits, groups of 128")
FORMATS = ("16 bits", "8 bits", "8-bit floats", *FOUR)


def whole_groups(K: int, form: str) -> bool:
    return form not in FOUR or K % int(form.split()[-1]) == 0


def matrix(form: str, N: int, K: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """The kernel's inputs, and the matrix that it multiplies with in float64.

    In 4 bits each number is rounded to dtype before the product, so that is the exact one.
    """
    if form == "16 bits":
        w = torch.randn(N, K).to(dtype)
        return (w,), w.double()
    if form == "8 bits":
        q, scale = torch.randint(-127, 128, (N, K), dtype=torch.int8), torch.rand(N) + 0.1
        return (q, scale), q.double() * scale.double()[:, None]
    if form == "8-bit floats":
        q, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(N) + 0.1
        return (q, scale), q.double() * scale.double()[:, None]
    group = int(form.split()[-1])
    q = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    scale = (torch.rand(N, K // group) + 0.1).to(dtype)
    zero = torch.randn(N, K // group).to(dtype)
    rounded = (q.to(dtype).unflatten(1, (-1, group)) - 8) * scale[..., None] + zero[..., None]
    return (pack_blocks(q), scale, zero), rounded.flatten(1).double()


@interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K", "form"),
    [
        (*size, form)
        for size, form in itertools.product(SIZES, FORMATS)
        if whole_groups(size[2], form)
    ],
)
def test_product(M, N, K, form, dtype):
    torch.manual_seed(0)
    given, exact = matrix(form, N, K, dtype)
    x = torch.randn(M, K).to(dtype)
    expected = x.double() @ exact.T
    plain = (x.float() @ exact.float().T).to(dtype)
    # Half a unit in the last place of the sum of magnitudes: the CPU may add in any order.
    floor = (x.double().abs() @ exact.abs().T).max().item() * torch.finfo(torch.float32).eps / 2
    for n_parts in (None, 1, 2):
        out = few_rows_linear(x, *given, n_parts=n_parts)
        assert out.shape == (M, N) and out.dtype == dtype
        at_most_twice("product", out, plain, expected, floor)


@interpret
def test_nothing_is_read_or_written_outside():
    """The rows after the matrix hold NaN, which would show in the output."""
    x, w = torch.ones(3, 200), torch.full((90, 200), torch.nan)
    w[:70] = 1
    assert torch.equal(few_rows_linear(x, w[:70]), torch.full((3, 70), 200.0))


def test_whole_numbers_from_their_bits():
    """What `_minus_8` rests on, in bfloat16, which the interpreter cannot compute."""
    q = torch.arange(16, dtype=torch.int16)
    for bits, base, dtype in (
        (few_rows.BITS_OF_128.value, 128, torch.bfloat16),
        (few_rows.BITS_OF_1024.value, 1024, torch.float16),
    ):
        assert torch.equal((q | bits).view(dtype) - (base + 8), (q - 8).to(dtype))


def test_a_step_has_whole_groups():
    for M, K, group in itertools.product((1, 33), range(32, 4097, 32), (32, 64, 128)):
        if K % group == 0:
            columns = few_rows._columns(M, K)
            assert K % columns == columns % group == 0 and 32 <= columns <= 256


def calls_for(form: str, M: int, K: int = 64 * 256) -> list[Launch]:
    """Both launches for a matrix of 4096 rows, which are recorded and not run."""
    given, _ = matrix(form, 64, 256, torch.bfloat16)
    meta = [torch.empty(4096, K // 256 * t.shape[1] if t.dim() > 1 else 1, dtype=t.dtype,
                        device="meta") for t in given]  # fmt: skip
    if form.startswith("8"):
        meta[1] = meta[1][:, 0]
    x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    with recorded(few_rows) as launches:
        few_rows_linear(x, *meta)
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "few_rows_kernel", "add_parts_kernel"
    ]  # fmt: skip
    return launches


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("M", [1, 64])
def test_compiled(M, form, capability):
    """A matrix of Llama-3-8B's width: matrix instructions, nothing spilled, loads ahead."""
    if form == "8-bit floats" and capability < 90:
        pytest.skip("sm_80 has no 8-bit floats; the package multiplies in 16 bits there")
    product, add_parts = calls_for(form, M)
    binary = compile_for(product, capability)
    spilled = 8 if (M, form, capability) == (64, FOUR[1], 80) else 0
    assert binary.spilled_bytes <= spilled and binary.shared_bytes <= SHARED_LIMIT[capability]
    assert "mma" in binary.ptx and ".bf16" in binary.ptx
    assert not binary.computed_twice() and all(binary.ahead())
    if form in FOUR:  # scale · (q - 8) + zero is rounded once
        assert "fma.rn.bf16" in binary.ptx
    if form == FOUR[0] or (M, form) == (1, FOUR[1]):
        assert binary.ahead() == [10]  # two steps of q, scale, zero and both tiles of x
    assert compile_for(add_parts, capability).spilled_bytes == 0


@pytest.mark.compile
def test_instructions_a_byte():
    """In 4 bits arithmetic could take longer than the memory: the count is in the docstring."""
    product, _ = calls_for(FOUR[0], 1)
    columns = product.arguments["BLOCK_K"]
    n_bytes = 64 * (columns // 2 + columns // 32 * 4)
    assert n_bytes == 10240
    assert n_bytes / instructions_a_step(compile_for(product, 90)) > 15


@pytest.mark.compile
def test_rows_need_no_new_kernel():
    keys = set()
    for M in (1, 2, 5, 8, 16):
        x, w = (torch.empty(n, 512, dtype=torch.bfloat16, device="meta") for n in (M, 640))
        with recorded(few_rows) as launches:
            few_rows_linear(x, w)
        keys |= {str(specialization(launch)) for launch in launches}
    assert len(keys) == 2
