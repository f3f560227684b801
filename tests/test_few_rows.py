"""A few rows times a matrix in 16, 8 and 4 bits, in the interpreter and compiled."""

import pytest
import torch
from interpreter import patch_once_a_launch
from plain_attention import at_most_twice
from tiers import HAS_TRITON
from torch import Tensor

if not HAS_TRITON:
    pytest.skip("needs the package triton, which exists for Linux", allow_module_level=True)
from gpu_compiler import SHARED_LIMIT, compile_for, recorded, specialization

from minillm.kernels import few_rows
from minillm.kernels.few_rows import few_rows_linear
from minillm.quantization.grid import pack

interpret = pytest.mark.interpret
patch_once_a_launch()
# M, N, K: one row and many, N and K that no tile divides, fewer columns than parts
SIZES = [(1, 70, 256), (8, 64, 384), (17, 130, 128), (3, 40, 320), (64, 66, 192)]
FORMATS = ("16 bits", "8 bits", "8-bit floats", "4 bits, groups of 32", "4 bits, groups of 64")


def matrix(form: str, N: int, K: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """The kernel's inputs, and the same matrix in float64."""
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
    exact = (q.double().unflatten(1, (-1, group)) - 8) * scale.double()[..., None]
    exact = (exact + zero.double()[..., None]).flatten(1)
    return (pack(q), scale, zero), exact


@interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("M", "N", "K"), SIZES)
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


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("M", [1, 8, 64])
def test_compiled(M, form, capability):
    """Llama-3-8B's output projection: matrix instructions, nothing spilled, loads ahead."""
    if form == "8-bit floats" and capability < 90:
        pytest.skip("sm_80 has no 8-bit floats; the package multiplies in 16 bits there")
    given, _ = matrix(form, 64, 256, torch.bfloat16)
    meta = [torch.empty(4096, 64 * t.shape[1] if t.dim() > 1 else 1, dtype=t.dtype, device="meta")
            for t in given]  # fmt: skip
    if form.startswith("8"):
        meta[1] = meta[1][:, 0]
    x = torch.empty(M, 64 * 256, dtype=torch.bfloat16, device="meta")
    with recorded(few_rows) as launches:
        few_rows_linear(x, *meta)
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "few_rows_kernel", "add_parts_kernel"
    ]  # fmt: skip
    binary = compile_for(launches[0], capability)
    assert binary.spilled_bytes == 0 and binary.shared_bytes <= SHARED_LIMIT[capability]
    assert "mma" in binary.ptx and ".bf16" in binary.ptx
    assert not binary.computed_twice() and binary.waits() > 0
    assert compile_for(launches[1], capability).spilled_bytes == 0


@pytest.mark.compile
def test_rows_need_no_new_kernel():
    keys = set()
    for M in (1, 2, 5, 8, 16):
        x, w = (torch.empty(n, 512, dtype=torch.bfloat16, device="meta") for n in (M, 640))
        with recorded(few_rows) as launches:
            few_rows_linear(x, w)
        keys |= {str(specialization(launch)) for launch in launches}
    assert len(keys) == 2
