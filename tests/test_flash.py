"""FlashAttention in plain torch.

Tiles of any size give the formula's output and gradients, and move the bytes that costs predict.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_attention import (
    check_gradients,
    check_output,
    double,
    formula,
    formula_gradients,
    inputs,
    log_sum_exp,
    oracle,
)
from torch import Tensor

from minillm import costs
from minillm.kernels.availability import rows_contiguous
from minillm.layers.attention import attention
from minillm.layers.flash import (
    FlashAttention,
    Traffic,
    _tiled_backward,
    _tiled_forward,
    tiled_attention,
)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int | bool]:
    """T and S with or without a causal mask, heads in groups, tiles smaller and larger."""
    causal = draw(st.booleans())
    T = draw(st.integers(1, 24))
    S = T + draw(st.integers(0, 20)) if causal else draw(st.integers(1, 40))
    K = draw(st.integers(1, 3))
    return dict(
        T=T, S=S, H=K * draw(st.integers(1, 3)), K=K, D=draw(st.sampled_from([1, 3, 8, 16])),
        B=draw(st.integers(1, 2)), causal=causal, block_t=draw(st.integers(1, 30)),
        block_s=draw(st.integers(1, 50)), seed=draw(st.integers(0, 99)),
    )  # fmt: skip


def drawn(shape: dict[str, int | bool]) -> tuple[Tensor, ...]:
    sizes = (shape[name] for name in ("T", "S", "H", "K", "D"))
    return inputs(*sizes, B=shape["B"], seed=shape["seed"])


def test_the_formula_is_the_oracle():
    for T, S, causal in ((5, 5, True), (3, 8, True), (6, 4, False)):
        q, k, v, _ = double(*inputs(T, S, 6, 2, 8))
        actual, expected = (f(q, k, v, causal, 0.4) for f in (formula, oracle))
        torch.testing.assert_close(actual, expected, atol=1e-13, rtol=1e-12)


# Forward


@given(shapes(), st.sampled_from([None, 0.3, 1.0, 0.0, -0.5]))
@example(dict(T=40, S=40, H=2, K=1, D=8, B=1, causal=True, block_t=8, block_s=8, seed=0), None)
@example(dict(T=1, S=1, H=1, K=1, D=1, B=1, causal=True, block_t=1, block_s=1, seed=0), None)
@settings(deadline=None, max_examples=150)
def test_any_tiles_give_the_formula(shape, scale):
    q, k, v, _ = drawn(shape)
    causal, blocks = shape["causal"], {name: shape[name] for name in ("block_t", "block_s")}
    out = tiled_attention(q, k, v, causal=causal, scale=scale, **blocks)
    exact = formula(*double(q, k, v), causal, shape["D"] ** -0.5 if scale is None else scale)
    assert out.shape == q.shape and out.dtype == q.dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_forward_and_backward(dtype, causal):
    """By PyTorch, which computes bfloat16 correctly, unlike Triton's interpreter."""
    for seed in range(3):
        q, k, v, grad = inputs(70, 90, 4, 2, 32, dtype=dtype, seed=seed)
        check_output(lambda *xs: FlashAttention.apply(*xs, "tiled"), q, k, v, causal)
        problem = (q, k, v, grad, causal, 32**-0.5)
        check_gradients(tiled_gradients(*problem), *problem)


@pytest.mark.parametrize("causal", [True, False])
def test_log_sum_exp(causal):
    for block_s in (1, 7, 100):
        q, k, v, _ = inputs(20, 33, 6, 2, 8)
        _, lse = _tiled_forward(q, k, v, causal, 0.4, 6, block_s, Traffic())
        assert lse.shape == (2, 6, 20) and lse.dtype == torch.float32
        exact = log_sum_exp(q, k, causal, 0.4)
        torch.testing.assert_close(lse.double(), exact, atol=2e-6, rtol=1e-6)


def test_a_row_whose_largest_score_comes_last():
    """Every tile brings a larger maximum.

    Without rescaling, the weights of the first tiles would be up to e^100 times too large.
    """
    k = torch.arange(0.0, 100, 5).reshape(1, 20, 1, 1).expand(1, 20, 1, 4)
    q, v = torch.full((1, 1, 1, 4), 1.0), torch.randn(1, 20, 1, 4)
    for block_s in (1, 3, 20):
        out = tiled_attention(q, k, v, causal=False, scale=0.25, block_s=block_s)
        exact = formula(*double(q, k, v), False, 0.25)
        torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=1e-5)


# Backward


def tiled_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(FlashAttention.apply(*leaves, causal, scale, "tiled"), leaves, grad)


@given(shapes(), st.sampled_from([0.3, 1.0, -0.5]))
@settings(deadline=None, max_examples=100)
def test_any_tiles_give_the_gradients(shape, scale):
    q, k, v, grad = drawn(shape)
    causal = shape["causal"]
    out, lse = _tiled_forward(q, k, v, causal, scale, 64, 64, Traffic())
    gradients = _tiled_backward(
        grad, q, k, v, out, lse, causal, scale, shape["block_t"], shape["block_s"]
    )
    exact = formula_gradients(*double(q, k, v, grad), causal, scale)
    for x, actual, expected in zip((q, k, v), gradients, exact, strict=True):
        assert actual.shape == x.shape and actual.dtype == x.dtype
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("T", "S", "H", "K"), [(1, 1, 1, 1), (3, 100, 4, 2), (130, 130, 3, 1), (65, 130, 2, 2)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_the_autograd_function(T, S, H, K, causal):
    q, k, v, grad = inputs(T, S, H, K, 8)
    exact = formula_gradients(*double(q, k, v, grad), causal, 0.4)
    for actual, expected in zip(tiled_gradients(q, k, v, grad, causal, 0.4), exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=2e-5)
    leaf = v.clone().requires_grad_()  # one gradient alone
    attention(q, k, leaf, causal=causal, scale=0.4, backend="tiled").backward(grad)
    torch.testing.assert_close(leaf.grad.double(), exact[2], atol=2e-5, rtol=2e-5)


def test_strided_inputs_and_gradients():
    """As in the model: q, k, v are parts of a projection, the output is transposed and summed."""
    projected = torch.randn(2, 9, 6 + 2 * 2, 8, dtype=torch.float64)
    grads = []
    for backend in ("tiled", "double"):
        leaf = (projected if backend == "double" else projected.float()).clone().requires_grad_()
        q, k, v = leaf.split((6, 2, 2), dim=2)
        if backend == "double":
            out = formula(q, k, v, True, 0.3)
        else:
            out = attention(q, k, v, scale=0.3, backend="tiled")
        out = out.transpose(1, 2).sum(0).sum(-1)  # its gradient comes back expanded
        out.square().sum().backward()
        grads.append(leaf.grad.double())
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-5)


def test_finite_differences():
    """Each gradient against (f(x + h) - f(x - h)) / 2h.

    The arithmetic is float32, so h is large; the error is of order h², plus rounding.
    """
    q, k, v, grad = inputs(3, 4, 2, 1, 3, B=1)
    gradients = tiled_gradients(q, k, v, grad, True, 0.6)
    for position, gradient in enumerate(gradients):
        for i in range(gradient.numel()):
            values = []
            for h in (1e-2, -1e-2):
                moved = [x.clone() for x in (q, k, v)]
                moved[position].flatten()[i] += h
                values.append((attention(*moved, scale=0.6, backend="tiled").double() * grad).sum())
            numeric = (values[0] - values[1]) / 2e-2
            assert abs(numeric - gradient.flatten()[i]) < 5e-4


def test_what_is_kept_for_the_backward_pass():
    """q, k, v, the output and one number a row; nothing that grows with T × S."""
    T, S, kept = 200, 300, {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    q, k, v, _ = (x.requires_grad_() for x in inputs(T, S, 4, 2, 8))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(q, k, v, backend="tiled")
        assert kept.keys() >= {x.data_ptr() for x in (q, k, v, out)}  # these themselves, no copies
        assert sum(kept.values()) == q.nbytes + k.nbytes + v.nbytes + out.nbytes + 4 * 2 * 4 * T
        kept.clear()
        attention(q, k, v, backend="reference")
        # At least one matrix is kept; otherwise the count above would prove nothing.
        assert sum(kept.values()) > 4 * 2 * 4 * T * S


def test_twice_differentiable_is_refused():
    q, k, v, _ = (x.requires_grad_() for x in inputs(3, 3, 2, 1, 4))
    loss = attention(q, k, v, backend="tiled").square().sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# Bytes


@given(shapes(), st.sampled_from([torch.float32, torch.float16]))
@settings(deadline=None, max_examples=60)
def test_traffic_is_what_costs_predict(shape, dtype):
    q, k, v = (x.to(dtype) for x in drawn(shape)[:3])
    blocks, traffic = {name: shape[name] for name in ("block_t", "block_s")}, Traffic()
    tiled_attention(q, k, v, causal=False, traffic=traffic, **blocks)
    heads = shape["B"] * shape["H"]
    assert traffic.total == heads * costs.attention_bytes(
        shape["T"], shape["S"], shape["D"], dtype, block=shape["block_t"]
    )
    assert traffic.stored == q.nbytes + 4 * heads * shape["T"]


@given(shapes())
@settings(deadline=None, max_examples=60)
def test_causal_traffic_by_an_independent_count(shape):
    """A tile of queries needs a tile of keys when its last query sees the tile's first key."""
    T, S, D, block_t, block_s = (shape[name] for name in ("T", "S", "D", "block_t", "block_s"))
    S = max(S, T)
    q, k, v, _ = inputs(T, S, shape["H"], shape["K"], D, B=shape["B"])
    traffic = Traffic()
    tiled_attention(q, k, v, causal=True, block_t=block_t, block_s=block_s, traffic=traffic)
    keys = 0
    for t0 in range(0, T, block_t):
        last = min(t0 + block_t, T) - 1
        keys += sum(min(block_s, S - s0) for s0 in range(0, S, block_s) if s0 <= S - T + last)
    assert traffic.loaded == q.nbytes + shape["B"] * shape["H"] * keys * 2 * D * 4
    everything = Traffic()
    tiled_attention(q, k, v, causal=False, block_t=block_t, block_s=block_s, traffic=everything)
    assert traffic.loaded <= everything.loaded and traffic.stored == everything.stored


def test_causal_traffic_is_about_half():
    q, k, v, _ = inputs(256, 256, 1, 1, 8, B=1)
    both = {causal: Traffic() for causal in (True, False)}
    for causal, traffic in both.items():
        tiled_attention(q, k, v, causal=causal, block_t=16, block_s=16, traffic=traffic)
    keys = {causal: traffic.loaded - q.nbytes for causal, traffic in both.items()}
    assert keys[True] / keys[False] == (16 * 17 / 2) / 16**2


def test_traffic_adds_up():
    q, k, v, _ = inputs(10, 10, 2, 1, 4)
    once, twice = Traffic(), Traffic()
    tiled_attention(q, k, v, traffic=once)
    for _ in range(2):
        tiled_attention(q, k, v, traffic=twice)
    for count in ("loaded", "stored", "total"):
        assert getattr(twice, count) == 2 * getattr(once, count)


# Refusals


@pytest.mark.parametrize(
    ("stride", "copied"),
    [
        ((96, 24, 8, 1), False),
        ((96, 8, 32, 1), False),
        ((96, 24, 8, 2), True),
        ((1, 1, 2**30 - 1, 1), False),
        ((1, 1, 2**30, 1), True),
    ],
)
def test_what_the_kernels_cannot_read_is_copied(stride, copied):
    """Offsets from head to head (2 heads here) must fit into 32 bits.

    The numbers of one head must be contiguous.
    """
    x = torch.empty_strided((2, 4, 2, 8), stride, device="meta")
    assert (rows_contiguous(x) is not x) == copied
    assert rows_contiguous(x).stride(-1) == 1


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "16", None, math.inf])
@pytest.mark.parametrize("name", ["block_t", "block_s"])
def test_bad_blocks_are_refused(name, bad):
    q, k, v, _ = inputs(3, 3, 2, 1, 4)
    message = f"{name} is {bad!r}; it must be a whole number, 1 or more"
    with pytest.raises(ValueError, match=message):
        tiled_attention(q, k, v, **{name: bad})
