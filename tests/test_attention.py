"""Every attention backend against a softmax written out per head and query, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm.attention import BACKENDS, attention

backends = pytest.mark.parametrize("backend", BACKENDS)
heads = pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (6, 2), (4, 1), (1, 1)], ids=["MHA", "GQA", "MQA", "one"])


def oracle(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """One query of one head of one sequence at a time; no mask, the keys it may not see are not there."""
    q, k, v = (t.double().numpy() for t in (q, k, v))
    (B, T, H, _), S, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out = np.empty_like(q)
    for b in range(B):
        for t in range(T):
            for h in range(H):
                visible = S - T + t + 1 if causal else S
                scores = k[b, :visible, h // group] @ q[b, t, h] * scale
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights @ v[b, :visible, h // group] / weights.sum()
    return torch.from_numpy(out)


def qkv(T: int, S: int, H: int, K: int, D: int = 8, B: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, heads, D, generator=generator) for n, heads in ((T, H), (S, K), (S, K)))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-6, rtol=1e-5)


@backends
@heads
@pytest.mark.parametrize("T", [1, 3, 17])
@pytest.mark.parametrize("causal", [True, False])
def test_against_the_oracle(backend, n_heads, n_kv_heads, T, causal):
    for S in (T, T + 1, T + 30):
        q, k, v = qkv(T, S, n_heads, n_kv_heads, seed=S)
        out = attention(q, k, v, causal=causal, backend=backend)
        assert out.shape == q.shape and out.dtype == q.dtype
        close(out, oracle(q, k, v, causal, 1 / math.sqrt(8)))


@backends
def test_fewer_keys_than_queries_without_a_mask(backend):
    q, k, v = qkv(T=5, S=2, H=4, K=2)
    close(attention(q, k, v, causal=False, backend=backend), oracle(q, k, v, False, 1 / math.sqrt(8)))


@backends
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 3.0])
@pytest.mark.parametrize("T", [1, 4])
def test_scale(backend, scale, T):
    q, k, v = qkv(T, 9, H=4, K=2)
    close(attention(q, k, v, scale=scale, backend=backend), oracle(q, k, v, True, scale))


@backends
@pytest.mark.parametrize("D", [2, 20, 64])
def test_default_scale_follows_the_head_dimension(backend, D):
    q, k, v = qkv(3, 5, H=2, K=1, D=D)
    close(attention(q, k, v, backend=backend), oracle(q, k, v, True, D**-0.5))


@backends
@pytest.mark.parametrize("T", [1, 4])
def test_strided_inputs(backend, T):
    S, H, K, D = 10, 6, 2, 8
    projected = torch.randn(2, T, H + 2 * K, D)  # q as the model has it: some heads of a joint projection
    cache = torch.randn(2, 3, 2, 32, K, D)  # k and v as a cache has them: part of a layer's buffer
    q, k, v = projected[:, :, :H], cache[0, 1, :, :S], cache[1, 1, :, :S]
    assert not (q.is_contiguous() or k.is_contiguous())
    before = cache.clone()
    close(attention(q, k, v, backend=backend), oracle(q, k, v, True, D**-0.5))
    heads_first = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    close(attention(*heads_first, backend=backend), oracle(q, k, v, True, D**-0.5))
    assert torch.equal(cache, before)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("T", "S"), [(1, 40), (17, 17), (17, 40)])
def test_half_precision_is_as_exact_as_plain_torch(backend, dtype, T, S):
    """The criterion of flash-attn's tests: at most twice the error of the same formula in the same dtype."""
    for seed in range(5):
        full = qkv(T, S, H=4, K=2, D=32, seed=seed)
        q, k, v = (t.to(dtype) for t in full)
        exact = attention(q.float(), k.float(), v.float(), backend="reference")
        k_all, v_all = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))  # (B, H, S, D)
        scores = q.transpose(1, 2) @ k_all.transpose(-1, -2) / math.sqrt(32)
        scores = scores.masked_fill(torch.ones(T, S, dtype=torch.bool).triu(S - T + 1), -torch.inf)
        plain = (scores.softmax(-1) @ v_all).transpose(1, 2)
        out = attention(q, k, v, backend=backend)
        assert out.dtype == dtype
        assert (out.float() - exact).abs().max() <= 2 * (plain.float() - exact).abs().max()


@backends
@heads
def test_shared_heads_are_repeated_heads(backend, n_heads, n_kv_heads):
    for T in (1, 5):
        q, k, v = qkv(T, 12, n_heads, n_kv_heads)
        repeated = (t.repeat_interleave(n_heads // n_kv_heads, dim=2) for t in (k, v))
        close(attention(q, k, v, backend=backend), attention(q, *repeated, backend=backend))


@backends
def test_the_future_is_not_seen(backend):
    q, k, v = qkv(T=6, S=9, H=4, K=2)
    before = attention(q, k, v, backend=backend)
    k[:, 6:], v[:, 6:] = 1e4, -1e4  # keys 0 … 5 are all that queries 0 … 2 see
    after = attention(q, k, v, backend=backend)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all(-1).any()


@backends
@pytest.mark.parametrize("T", [1, 7])
def test_weights_sum_to_one_even_for_huge_scores(backend, T):
    q, k, v = qkv(T, 20, H=4, K=2)
    close(attention(1e4 * q, 1e4 * k, torch.ones_like(v), backend=backend), torch.ones_like(q))


# Refusals


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@backends
@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), r"shapes \(3, 4, 8\), .*expected \(B, T, H, D\)"),
        ((2, 3, 4, 8), (3, 4, 8), (3, 4, 8), r"expected \(B, T, H, D\), \(B, S, K, D\)"),
        ((2, 3, 4, 8), (2, 3, 4, 8), (2, 4, 4, 8), r"shapes .*\(2, 4, 4, 8\); expected"),
        ((2, 3, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8), "differ in batch size or head dimension"),
        ((2, 3, 4, 8), (2, 3, 4, 16), (2, 3, 4, 16), "differ in batch size or head dimension"),
        ((2, 3, 4, 8), (2, 3, 3, 8), (2, 3, 3, 8), "4 query heads are not a multiple of 3 key/value heads"),
        ((2, 3, 4, 8), (2, 3, 8, 8), (2, 3, 8, 8), "4 query heads are not a multiple of 8 key/value heads"),
        ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8), "4 query heads are not a multiple of 0"),
        ((2, 3, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8), "causal attention of 3 queries to 2 keys"),
    ],
)
def test_shapes_that_do_not_fit(backend, q, k, v, message):
    with pytest.raises(ValueError, match=message):
        attention(zeros(*q), zeros(*k), zeros(*v), backend=backend)


@backends
@pytest.mark.parametrize("position", [0, 1, 2])
def test_dtypes_that_do_not_fit(backend, position):
    for other in (torch.float16, torch.int64):
        dtypes = [torch.float32] * 3
        dtypes[position] = other
        with pytest.raises(TypeError, match="must be the same floating-point dtype"):
            attention(*(zeros(1, 2, 2, 8, dtype=dtype) for dtype in dtypes), backend=backend)
    with pytest.raises(TypeError, match=r"dtypes torch\.int64, torch\.int64, torch\.int64; all three"):
        attention(*[zeros(1, 2, 2, 8, dtype=torch.int64)] * 3, backend=backend)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_devices_that_do_not_fit(position):
    devices = ["cpu"] * 3
    devices[position] = "meta"
    with pytest.raises(ValueError, match="move them to one device"):
        attention(*(zeros(1, 2, 2, 8, device=device) for device in devices))


@pytest.mark.parametrize("backend", ["flash", "", None, "SDPA"])
def test_unknown_backends(backend):
    with pytest.raises(ValueError, match=f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}"):
        attention(*qkv(1, 1, 1, 1), backend=backend)
