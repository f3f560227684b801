"""The Triton kernels in the interpreter, against the formula in float64.

By flash-attn's criterion and on its kind of sizes: the largest error is at most twice that of plain
PyTorch in the same dtype, plus 1e-5 (`plain_attention`).
Every tensor that a kernel reads is surrounded by NaN, so reading one number too many turns the
result into NaN. What it is to write is NaN before, and so is the memory around it, which must stay
NaN.
"""

import itertools
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import patch_once_a_launch
from plain_attention import (
    at_most_twice,
    check_gradients,
    check_output,
    double,
    formula,
    formula_gradients,
    inputs,
    log_sum_exp,
)
from torch import Tensor

from minillm.layers.attention import attention

pytest.importorskip("triton", reason="needs the package triton, which exists for Linux")
from kernel_cases import DIMS, DTYPES, FEWER_KEYS, MORE_KEYS, SAME, cases, check_far, grid

from minillm.kernels import availability, flash_backward, flash_decode, flash_forward, tuning

interpret = pytest.mark.interpret
FP16 = (torch.float16,)
patch_once_a_launch()


def framed(x: Tensor) -> Tensor:
    """The same numbers surrounded by NaN: a view of a larger buffer with different strides."""
    B, N, heads, D = x.shape
    buffer = torch.full((B + 2, N + 3, heads + 2, D + 5), torch.nan, dtype=x.dtype)
    view = buffer[1 : B + 1, 2 : N + 2, 1 : heads + 1, 3 : D + 3]
    view.copy_(x)
    return view


@contextmanager
def guarded() -> Iterator[None]:
    """Inside the block new tensors hold NaN; the memory around them must still do so at the end."""
    margin, buffers = 1 << 16, []

    def empty(*shape: int, dtype: torch.dtype, device: object) -> Tensor:
        n = math.prod(shape)
        buffers.append(torch.full((n + 2 * margin,), torch.nan, dtype=dtype))
        return buffers[-1][margin : margin + n].view(shape)

    def empty_like(x: Tensor, memory_format: object = None) -> Tensor:
        return empty(*x.shape, dtype=x.dtype, device=x.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", empty_like)
        yield
    assert buffers
    for buffer in buffers:
        outside = torch.cat((buffer[:margin], buffer[-margin:]))
        assert outside.isnan().all(), "written outside of the tensor"


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    with guarded():
        return flash_forward.flash_forward(framed(q), framed(k), framed(v), causal, scale)


def output(*arguments: Any) -> Tensor:
    return forward(*arguments)[0]


def backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float,
    place: Callable[[Tensor], Tensor] = framed,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With an output and a log-sum-exp from float64, to test the backward kernels alone."""
    out = formula(*double(q, k, v), causal, scale).to(q.dtype)
    lse = log_sum_exp(q, k, causal, scale).float().contiguous()
    with guarded():
        tensors = (place(x) for x in (grad, q, k, v, out))
        return flash_backward.flash_backward(*tensors, lse, causal, scale)


def decode(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    assert q.shape[1] * q.shape[2] // k.shape[2] <= flash_decode.MAX_ROWS
    with guarded():
        return flash_decode.flash_decode(framed(q), framed(k), framed(v), causal, scale)


# Forward


@interpret
@cases(grid([*SAME, *MORE_KEYS, *FEWER_KEYS], DIMS, halved=True))
def test_forward(T, S, H, K, D, dtype, causal):
    B = 2 if T < 50 else 1
    q, k, v, _ = inputs(T, S, H, K, D, B=B, dtype=dtype)
    out, lse = forward(q, k, v, causal, D**-0.5)
    plain, exact = (formula(*xs, causal, D**-0.5) for xs in ((q, k, v), double(q, k, v)))
    at_most_twice("output", out, plain, exact)
    assert lse.shape == (B, H, T) and lse.dtype == torch.float32
    exact = log_sum_exp(q, k, causal, D**-0.5)
    torch.testing.assert_close(lse.double(), exact, atol=2e-6, rtol=1e-6)


# Backward


@interpret
@cases(
    grid(
        [*SAME[:6], (1, 113), (31, 203), (113, 203), (128, 64), (31, 1)],
        (64, 16, 80, 128, 32),
        halved=True,
    )
    + grid([(1, 1), (31, 64), (113, 113), (113, 31), (64, 128), (256, 256)], (256, 8), halved=True)
)
def test_backward(T, S, H, K, D, dtype, causal):
    q, k, v, grad = inputs(T, S, H, K, D, B=2 if T < 50 else 1, dtype=dtype)
    check_gradients(backward(q, k, v, grad, causal, D**-0.5), q, k, v, grad, causal, D**-0.5)


@interpret
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_training_through_attention(dtype, causal):
    """Both passes together, by autograd, with strided inputs and an expanded gradient.

    Also for few queries, where without a gradient the decode kernel would run.
    """
    for T, S in ((40, 70), (1, 70)):
        leaf = torch.randn(2, S, 2 + 1 + 1, 16).to(dtype).requires_grad_()
        q, k, v = leaf.split((2, 1, 1), dim=2)
        q = q[:, -T:]
        out = attention(q, k, v, causal=causal, backend="triton")
        (gradient,) = torch.autograd.grad(out.float().sum(), leaf)
        plain, exact = (x.detach().requires_grad_() for x in (leaf, leaf.double()))
        for x in (plain, exact):
            q, k, v = x.split((2, 1, 1), dim=2)
            formula(q[:, -T:], k, v, causal, 0.25).double().sum().backward()
        at_most_twice("gradient", gradient, plain.grad, exact.grad)


# Decode


@interpret
@pytest.mark.parametrize("n_parts", [1, 4, 9])
@pytest.mark.parametrize(
    ("T", "H", "K"), [(1, 2, 2), (1, 9, 3), (1, 32, 1), (5, 6, 1), (16, 4, 2), (32, 2, 2)]
)
def test_decode(monkeypatch, T, H, K, n_parts):
    monkeypatch.setattr(flash_decode, "_CPU_PARTS", n_parts)
    turns = itertools.cycle(itertools.product((64, 16, 80, 128, 256, 8, 32), DTYPES, (True, False)))
    for S in (T, 64, 65, 300):
        D, dtype, causal = next(turns)
        if dtype == torch.float32:  # whose tiles have half as many keys, or fewer
            S = max(T, (S + 1) // 2)
        q, k, v, _ = inputs(T, S, H, K, D, dtype=dtype, seed=S)
        check_output(decode, q, k, v, causal, scale=0.3 if S % 2 else None)


@interpret
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_in_the_future_of_a_row(monkeypatch, dtype):
    """With 32 queries and 33 keys, the first query sees two keys.

    Most rows see none of the keys in the last parts.
    """
    chosen = flash_decode.triton.Config({"BLOCK_S": 16}, num_warps=4, num_stages=1)
    monkeypatch.setattr(flash_decode, "_CPU_PARTS", 100)
    monkeypatch.setattr(flash_decode, "decode_config", lambda *_: chosen)
    for T, S in ((32, 32), (32, 33), (32, 80), (9, 17)):
        q, k, v, _ = inputs(T, S, 1, 1, 16, B=1, dtype=dtype)
        check_output(decode, q, k, v, True)
        # The seen scores far below 0, where a masked one might hide.
        check_output(decode, -1e3 * q.abs(), k.abs(), v, True)


@interpret
def test_a_few_queries_without_a_mask_and_one_key():
    for T, S in ((32, 1), (7, 3), (1, 1)):
        q, k, v, _ = inputs(T, S, 1, 1, 16)
        check_output(decode, q, k, v, False)


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 200))
@settings(deadline=None, max_examples=300)
def test_split(n_tiles, n_programs, n_processors):
    """The parts hold all tiles, none is empty, and there are no more than requested."""
    properties = SimpleNamespace(multi_processor_count=n_processors)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        for device in ("cpu", "cuda"):
            n_parts = flash_decode.split(n_tiles, n_programs, torch.device(device))
            assert 1 <= n_parts <= flash_decode._MAX_PARTS
            tiles_a_part = math.ceil(n_tiles / n_parts)
            assert tiles_a_part * n_parts >= n_tiles > tiles_a_part * (n_parts - 1)
        assert n_parts == 1 or n_parts * n_programs <= 2 * n_processors


def test_split_fills_the_gpu_when_there_are_tiles():
    with mock.patch.object(
        torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=132)
    ):
        split = [flash_decode.split(1024, n, torch.device("cuda")) for n in (8, 32, 132, 264, 1000)]
    assert split == [32, 8, 2, 1, 1]


@interpret
@pytest.mark.parametrize(
    ("T", "H", "K", "which"),
    [(1, 8, 2, "decode"), (16, 4, 2, "decode"), (17, 4, 2, "forward"), (1, 33, 1, "forward")],
)
def test_which_kernel_runs(monkeypatch, T, H, K, which):
    ran = []
    for module, name in ((flash_forward, "flash_forward"), (flash_decode, "flash_decode")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *xs, real=real, name=name: (ran.append(name), real(*xs))[1]
        )
    q, k, v, _ = inputs(T, 40, H, K, 16)
    attention(q, k, v, backend="triton")
    assert ran == [f"flash_{which}"]


# For all three


FORWARD_LIKE: dict[str, Callable[..., Tensor]] = {"forward": output, "decode": decode}


@interpret
@pytest.mark.parametrize("kernel", FORWARD_LIKE.values(), ids=FORWARD_LIKE)
@pytest.mark.parametrize("causal", [True, False])
def test_huge_scores(kernel, causal):
    q, k, v, _ = inputs(12, 70, 4, 2, 16)
    ones = kernel(1e4 * q, 1e4 * k, torch.ones_like(v), causal, 1.0)
    torch.testing.assert_close(ones, torch.ones_like(q), atol=1e-6, rtol=0)
    check_output(kernel, 30 * q, 30 * k, v, causal)
    largest = kernel(-1e4 * q.abs(), k.abs(), v, causal, 1.0)  # all scores far below 0
    assert largest.isfinite().all() and largest.abs().max() <= v.abs().max()


@interpret
@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy warns of the overflow, which is intended
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["both signs", "all high", "all low"])
def test_scores_of_hundreds_backward(kind, causal, dtype):
    """One key may have all the weight.

    And if all scores are below -100, exp(0 - LSE) overflows: a key that does not exist must not get
    infinite weight.
    In float32 the usual criterion can't be met: the LSE, in the hundreds, is rounded by 1e-5, and
    so are all weights of its row, while plain PyTorch subtracts the row's largest score first. The
    bound there is 1e-6 · |score| · |gradient|.
    """
    q, k, v, grad = inputs(40, 70, 2, 1, 16)
    if kind == "both signs":
        q, k = 10 * q, 10 * k
    else:
        q, k = 5 + q.abs(), (5 + k.abs()) * (1 if kind == "all high" else -1)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    gradients = backward(q, k, v, grad, causal, 0.25)
    if dtype == torch.float16:
        check_gradients(gradients, q, k, v, grad, causal, 0.25)
        return
    largest = 0.25 * torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]).abs().max().item()
    assert largest > 100
    exact_gradients = formula_gradients(*double(q, k, v, grad), causal, 0.25)
    for actual, exact in zip(gradients, exact_gradients, strict=True):
        bound = 1e-6 * largest * exact.abs().max().item()
        torch.testing.assert_close(actual.double(), exact, atol=bound, rtol=0)


@interpret
@pytest.mark.parametrize("kernel", FORWARD_LIKE.values(), ids=FORWARD_LIKE)
@pytest.mark.parametrize("seen", [1, 15, 16, 31, 33, 60])
def test_the_future_is_not_seen(kernel, seen):
    """Key `seen` is the first that query 0 doesn't see.

    A huge value there must not affect it, but must affect the next query.
    """
    T, S = 16, 15 + seen
    q, k, v, _ = inputs(T, S, 2, 1, 16, B=1)
    before = kernel(q, k, v, True, 0.25)
    k[:, seen:], v[:, seen:] = 1e4, -1e4
    after = kernel(q, k, v, True, 0.25)
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.isclose(before[:, 1:], after[:, 1:]).all(-1).any()


@interpret
def test_the_future_has_no_gradient():
    q, k, v, grad = inputs(70, 90, 4, 2, 16)
    grad[:, 33:] = 0  # queries 0 … 32 see keys 0 … 52
    dq, dk, dv = backward(q, k, v, grad, True, 0.25)
    assert (dq[:, 33:] == 0).all() and (dk[:, 53:] == 0).all() and (dv[:, 53:] == 0).all()
    assert all((x != 0).all() for x in (dq[:, :33], dk[:, :53], dv[:, :53]))


@interpret
@pytest.mark.parametrize("T", [5, 40])
def test_strided_inputs(T):
    """The strides that `attention` meets.

    Parts of a fused projection, views of a cache, heads before tokens, and numbers that are not
    contiguous, which it copies first.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return attention(q, k, v, causal=causal, scale=scale, backend="triton")

    S, H, K, D = 50, 6, 2, 16
    projected = torch.randn(2, S, H + 2 * K, D)
    cache = torch.randn(2, 3, 2, 64, K, D)
    q, k, v = projected.split((H, K, K), dim=2)
    apart = torch.randn(2, S, H + 2 * K, D, 2)[..., 0].split((H, K, K), dim=2)
    assert apart[0].stride(-1) == 2
    q = q[:, -T:]
    for case in (
        (q, k, v),
        (q, cache[0, 1, :, :S], cache[1, 1, :, :S]),
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [x[:1].expand(2, *x.shape[1:]) for x in (q, k, v)],
        (apart[0][:, -T:], *apart[1:]),
        (q, apart[1], v),
    ):
        check_output(attend, *case, True)


def others(choose: Callable[..., list[Any]]) -> list[tuple[int, int]]:
    """(D, index) of the configurations after the default, which the grids above use.

    In float32 there is only the default.
    """
    assert all(len(choose(D, torch.float32)) == 1 for D in (64, 128, 256))
    return [(D, i) for D in (64, 128, 256) for i in range(1, len(choose(D, torch.float16)))]


@interpret
@pytest.mark.parametrize(("D", "i"), others(tuning.forward_configs))
def test_other_forward_configurations(monkeypatch, D, i):
    chosen = tuning.forward_configs(D, torch.float16)[i]
    monkeypatch.setattr(flash_forward, "forward_configs", lambda *_: [chosen])
    for T, S, causal in ((70, 150, True), (140, 140, True), (33, 97, False)):
        check_output(output, *inputs(T, S, 2, 1, D, B=1, dtype=torch.float16)[:3], causal)


@interpret
@pytest.mark.parametrize(
    ("name", "D", "i"),
    [
        (name, *case)
        for name in ("dkv_configs", "dq_configs")
        for case in others(getattr(tuning, name))
    ],
)
def test_other_backward_configurations(monkeypatch, name, D, i):
    chosen = getattr(tuning, name)(D, torch.float16)[i]
    monkeypatch.setattr(flash_backward, name, lambda *_: [chosen])
    for T, S, causal in ((70, 140, True), (140, 70, False)):
        q, k, v, grad = inputs(T, S, 2, 1, D, B=1, dtype=torch.float16)
        check_gradients(backward(q, k, v, grad, causal, D**-0.5), q, k, v, grad, causal, D**-0.5)


def aligned(x: Tensor) -> Tensor:
    """`framed`, with strides and an address that suit the copy engine."""
    B, N, heads, D = x.shape
    buffer = torch.full((B + 2, N + 3, heads + 2, D + 16), torch.nan, dtype=x.dtype)
    view = buffer[1 : B + 1, 2 : N + 2, 1 : heads + 1, 8 : D + 8]
    view.copy_(x)
    return view


@interpret
@cases(grid([(1, 1), (31, 113), (128, 217), (203, 203), (113, 31)], (64, 128, 80), FP16))
def test_forward_with_tensor_descriptors(T, S, H, K, D, dtype, causal):
    """Also a specialized configuration: the tiles are the same, whoever loads them."""
    q, k, v, _ = inputs(T, S, H, K, D, B=1, dtype=dtype)
    tensors = [aligned(x) for x in (q, k, v)]
    assert tuning.takes_descriptors(*tensors)
    for config in (None, tuning.specialized_configs(D)[0]):

        def forward(
            q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, config: Any = config
        ) -> Tensor:
            with guarded():
                tensors = (aligned(x) for x in (q, k, v))
                return flash_forward.flash_forward(*tensors, causal, scale, config)[0]

        check_output(forward, q, k, v, causal)


@interpret
@cases(grid([(31, 113), (70, 70), (113, 31)], (64, 80), FP16))
def test_backward_with_tensor_descriptors(T, S, H, K, D, dtype, causal):
    problem = (*inputs(T, S, H, K, D, B=1, dtype=dtype), causal, D**-0.5)
    check_gradients(backward(*problem, aligned), *problem)


def test_when_tensor_descriptors_are_used():
    """If addresses and strides are multiples of 16 bytes, in 16 bits, from Hopper on."""
    x = torch.zeros(2, 9, 3, 64, dtype=torch.float16)
    takes = tuning.takes_descriptors
    assert takes(x, x, x)
    assert not takes(x.float(), x.float(), x.float())
    shifted = torch.zeros(2 * 9 * 3 * 64 + 1, dtype=torch.float16)[1:].view(x.shape)
    narrow = torch.zeros(2, 9, 3, 66, dtype=torch.float16)[..., :64]
    assert not takes(x, shifted, x) and not takes(x, x, narrow) and not takes(narrow, x, x)
    assert takes(x[:1].expand(2, -1, -1, -1)) and not takes(x[:, :1].expand(-1, 9, -1, -1))
    on_gpu = SimpleNamespace(
        is_cuda=True, device="cuda", itemsize=2, data_ptr=lambda: 0, stride=lambda: (64, 64, 64, 1)
    )
    for capability, taken in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)):
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            assert takes(on_gpu, on_gpu, on_gpu) == taken


def test_kernels_are_launched_on_the_tensors_gpu(monkeypatch):
    """A model on the second GPU launches there, even if the first one is the current device."""
    from stand_in_gpu import stand_in_gpu
    from torch._subclasses import FakeTensorMode

    from minillm.ragged import RaggedLayout

    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", current.append)
    with FakeTensorMode():
        availability.on_device_of(torch.empty(1, device="cuda:1"))
    assert current == [torch.device("cuda:1")]
    with availability.on_device_of(torch.empty(1)):  # on a CPU there is nothing to choose
        pass

    with torch.device("meta"), stand_in_gpu() as launches:
        q, k = torch.empty(2, 40, 4, 64), torch.empty(2, 40, 2, 64)
        attention(q, k, k, backend="triton")
        attention(q[:, :1], k, k, backend="triton")
        leaf = q.requires_grad_()
        torch.autograd.grad(attention(leaf, k, k, backend="triton").sum(), leaf)
        pages, lens = (torch.empty(9, 16, 2, 64),) * 2, torch.empty(2, 3, dtype=torch.int32)
        tables = torch.empty(3, 4, dtype=torch.int32)
        layout = RaggedLayout(tables, lens, [40, 9, 16], [3, 1, 1], 16)
        layout.attention(q[0, :5], pages, lambda blocks: pages, 0.1, "triton")
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == [
        "flash_forward_kernel", "part_kernel", "merge_kernel", "flash_forward_kernel",
        "delta_kernel", "dkv_kernel", "dq_kernel", "paged_kernel", "merge_kernel",
    ]  # fmt: skip


@interpret
def test_unequal_tiles(monkeypatch):
    """Queries and keys in tiles of 16 and 64, and the other way round: no size is mixed up."""
    for block_t, block_s in ((16, 64), (64, 16), (32, 32)):
        chosen = flash_forward.triton.Config(
            {"BLOCK_T": block_t, "BLOCK_S": block_s}, num_warps=4, num_stages=1
        )
        specialized = flash_forward.triton.Config(chosen.kwargs | {"SPECIALIZED": False}, 4, 1)
        monkeypatch.setattr(flash_forward, "forward_configs", lambda *_, c=specialized: [c])
        for name in ("dkv_configs", "dq_configs"):
            monkeypatch.setattr(flash_backward, name, lambda *_, c=chosen: [c])
        lengths = ((1, 1), (15, 15), (16, 16), (17, 17), (64, 80), (65, 80), (31, 64), (100, 163))
        for T, S in lengths:
            q, k, v, grad = inputs(T, S, 2, 1, 16, B=1)
            check_output(output, q, k, v, True)
            check_gradients(backward(q, k, v, grad, True, 0.25), q, k, v, grad, True, 0.25)


@interpret
@pytest.mark.parametrize("causal", [True, False])
def test_two_runs_give_equal_bits(causal):
    q, k, v, grad = inputs(20, 90, 4, 2, 32, dtype=torch.float16)

    def everything() -> list[Tensor]:
        few = decode(q[:, :16], k, v, causal, 0.2)
        return [*forward(q, k, v, causal, 0.2), *backward(q, k, v, grad, causal, 0.2), few]

    for first, second in zip(everything(), everything(), strict=True):
        assert torch.equal(first, second)


# Tensors of more than 2**31 numbers


@pytest.fixture
def memory() -> Tensor:
    """14 GB of addresses in float16, of which only the pages written to take memory.

    Offsets from the middle that lose their upper 32 bits still point inside, where there are zeros.
    """
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.12 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        return torch.frombuffer(mmap.mmap(-1, 14 << 30, flags=flags), dtype=torch.float16)
    except OSError:
        pytest.skip("needs 14 GB of address space")


@interpret
@pytest.mark.parametrize("which", ["rows", "sequences"])
def test_offsets_beyond_31_bits(memory, which):
    check_far(memory, which)
