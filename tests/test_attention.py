"""Every attention backend against a softmax written out per head and query, in float64."""

import math
import sys

import pytest
import torch
from interpreter import patch_once_a_launch
from models import lively, tiny_config
from plain_attention import oracle
from tiers import BACKEND_PARAMETERS, HAS_TRITON, INTERPRETED
from torch import Tensor

from minillm import Decoder, KVCache, generate
from minillm.cache import NoCache
from minillm.kernels import availability
from minillm.layers.attention import BACKENDS, attention

patch_once_a_launch()
backends = pytest.mark.parametrize("backend", BACKEND_PARAMETERS)
heads = pytest.mark.parametrize(
    ("n_heads", "n_kv_heads"), [(4, 4), (6, 2), (4, 1), (1, 1)], ids=["MHA", "GQA", "MQA", "one"]
)


def qkv(
    T: int, S: int, H: int, K: int, D: int = 8, B: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, n, heads, D, generator=generator) for n, heads in ((T, H), (S, K), (S, K))
    )


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
    out = attention(q, k, v, causal=False, backend=backend)
    close(out, oracle(q, k, v, False, 1 / math.sqrt(8)))


@backends
@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("T", [1, 4, 9])
def test_scale(backend, scale, T):
    q, k, v = qkv(T, 9, H=4, K=2)
    close(attention(q, k, v, scale=scale, backend=backend), oracle(q, k, v, True, scale))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
@pytest.mark.parametrize("scale", [0.0, -0.7])
@pytest.mark.parametrize("T", [1, 4, 9])
def test_scales_of_zero_and_below(backend, scale, T):
    """The Triton kernels refuse them."""
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
    # q as the model has it: some heads of a joint projection.
    projected = torch.randn(2, T, H + 2 * K, D)
    # k and v as a cache has them: part of a layer's buffer.
    cache = torch.randn(2, 3, 2, 32, K, D)
    q, k, v = projected[:, :, :H], cache[0, 1, :, :S], cache[1, 1, :, :S]
    assert not (q.is_contiguous() or k.is_contiguous())
    before = cache.clone()
    close(attention(q, k, v, backend=backend), oracle(q, k, v, True, D**-0.5))
    heads_first = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    close(attention(*heads_first, backend=backend), oracle(q, k, v, True, D**-0.5))
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("backend", "dtype"),  # Triton's interpreter refuses bfloat16
    [
        *((backend, torch.bfloat16) for backend in BACKENDS if backend != "triton"),
        *(
            pytest.param(*getattr(p, "values", (p,)), torch.float16, marks=getattr(p, "marks", ()))
            for p in BACKEND_PARAMETERS
        ),
    ],
)
@pytest.mark.parametrize(("T", "S"), [(1, 40), (17, 17), (17, 40)])
def test_half_precision_is_as_exact_as_plain_torch(backend, dtype, T, S):
    """flash-attn's criterion: at most twice the error of the same formula in the same dtype."""
    for seed in range(5):
        full = qkv(T, S, H=4, K=2, D=32, seed=seed)
        q, k, v = (t.to(dtype) for t in full)
        exact = attention(q.float(), k.float(), v.float(), backend="reference")
        # (B, H, S, D)
        k_all, v_all = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), r"shapes \(3, 4, 8\), .*expected \(B, T, H, D\)"),
        ((2, 3, 4, 8), (3, 4, 8), (3, 4, 8), r"expected \(B, T, H, D\), \(B, S, K, D\)"),
        ((2, 3, 4, 8), (2, 3, 4, 8), (2, 4, 4, 8), r"shapes .*\(2, 4, 4, 8\); expected"),
        ((2, 3, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8), "differ in batch size or head dimension"),
        ((2, 3, 4, 8), (2, 3, 4, 16), (2, 3, 4, 16), "differ in batch size or head dimension"),
        ((2, 3, 4, 8), (2, 3, 3, 8), (2, 3, 3, 8),
         "4 query heads are not a multiple of 3 key/value heads"),
        ((2, 3, 4, 8), (2, 3, 8, 8), (2, 3, 8, 8),
         "4 query heads are not a multiple of 8 key/value heads"),
        ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8),
         r"k \(2, 3, 0, 8\) is empty; every size must be 1 or more"),
        ((2, 3, 0, 8), (2, 3, 2, 8), (2, 3, 2, 8), r"q \(2, 3, 0, 8\) or k .* is empty"),
        ((0, 3, 4, 8), (0, 3, 4, 8), (0, 3, 4, 8),
         r"q \(0, 3, 4, 8\) or k \(0, 3, 4, 8\) is empty"),
        ((2, 0, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), r"q \(2, 0, 4, 8\) or k .* is empty"),
        ((2, 3, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8), r"k \(2, 0, 4, 8\) is empty"),
        ((2, 3, 4, 0), (2, 3, 4, 0), (2, 3, 4, 0), r"q \(2, 3, 4, 0\) or k .* is empty"),
        ((2, 3, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8), "causal attention of 3 queries to 2 keys"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(backend, q, k, v, message):
    with pytest.raises(ValueError, match=message):
        attention(zeros(*q), zeros(*k), zeros(*v), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_dtypes_that_do_not_fit(backend, position):
    for other in (torch.float16, torch.int64):
        dtypes = [torch.float32] * 3
        dtypes[position] = other
        with pytest.raises(TypeError, match="must be the same floating-point dtype"):
            attention(*(zeros(1, 2, 2, 8, dtype=dtype) for dtype in dtypes), backend=backend)
    message = r"dtypes torch\.int64, torch\.int64, torch\.int64; all three"
    with pytest.raises(TypeError, match=message):
        attention(*[zeros(1, 2, 2, 8, dtype=torch.int64)] * 3, backend=backend)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_devices_that_do_not_fit(position):
    devices = ["cpu"] * 3
    devices[position] = "meta"
    with pytest.raises(ValueError, match="move them to one device"):
        attention(*(zeros(1, 2, 2, 8, device=device) for device in devices))


@pytest.mark.parametrize("backend", ["flash", "", None, "SDPA"])
def test_unknown_backends(backend):
    message = f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}"
    with pytest.raises(ValueError, match=message):
        attention(*qkv(1, 1, 1, 1), backend=backend)


# Refusals of the Triton kernels, and what "auto" does instead


NO_PACKAGE = "needs the package triton, which exists for Linux; use 'sdpa' or 'tiled'"


def refusal(message: str) -> str:
    """What backend "triton" says: the message, or that the package is not installed."""
    return f"backend 'triton' {message if HAS_TRITON else NO_PACKAGE}"


def through_a_cache(cache: KVCache | NoCache, dtype: torch.dtype = torch.float32) -> Tensor:
    return cache.attend(0, *(zeros(1, 2, heads, 8, dtype=dtype) for heads in (4, 2, 2)))


@pytest.mark.skipif(
    INTERPRETED, reason="Triton's interpreter is on, so that the kernels run on the CPU"
)
@pytest.mark.parametrize("T", [1, 40])
def test_triton_needs_a_cuda_device(T):
    message = refusal(
        "needs a CUDA device, and the tensors are on cpu; use 'sdpa' or 'tiled', or set "
        "TRITON_INTERPRET=1 before"
    )
    tiny = lively()
    q, k, v = qkv(T, 40, H=4, K=2)
    for inputs in ((q, k, v), [x.requires_grad_() for x in qkv(T, 40, 4, 2)]):
        with pytest.raises(ValueError, match=message):
            attention(*inputs, backend="triton")
    for cache in (KVCache(tiny, 1, 8, backend="triton"), NoCache("triton")):
        with pytest.raises(ValueError, match=message):
            through_a_cache(cache)
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=message):
            generate(tiny, [1] * T, 3, backend="triton", use_cache=use_cache)


@pytest.mark.parametrize(
    ("D", "dtype", "scale", "message"),
    [
        (8, torch.float64, None, "computes in float32, float16 or bfloat16, not in "
         r"torch\.float64; convert to one of them, or use 'sdpa'"),
        (257, torch.float32, None, "takes heads of at most 256 dimensions, not 257; use 'sdpa'"),
        (512, torch.float16, None, "takes heads of at most 256 dimensions, not 512"),
        (8, torch.float32, 0.0, r"needs a scale above 0, not 0\.0; use 'sdpa'"),
        (8, torch.float32, -0.5, r"needs a scale above 0, not -0\.5"),
        (8, torch.float32, math.nan, "needs a scale above 0, not nan"),
    ],
)  # fmt: skip
def test_what_the_triton_kernels_refuse(D, dtype, scale, message):
    for T in (1, 40):
        inputs = [x.to(dtype) for x in qkv(T, 40, H=4, K=2, D=D)]
        with pytest.raises(ValueError, match=refusal(message)):
            attention(*inputs, scale=scale, backend="triton")


def test_caches_pass_the_refusals_on():
    model = Decoder(tiny_config()).double()
    for cache in (KVCache(model, 1, 8, backend="triton"), NoCache("triton")):
        with pytest.raises(ValueError, match=refusal("computes in float32, float16 or bfloat16")):
            through_a_cache(cache, torch.float64)


def test_without_the_package_triton(monkeypatch):
    monkeypatch.setattr(availability, "_HAS_TRITON", False)
    inputs = qkv(3, 3, H=4, K=2)
    with pytest.raises(ValueError, match=f"backend 'triton' {NO_PACKAGE}"):
        attention(*inputs, backend="triton")
    for backend in ("auto", "tiled"):
        close(attention(*inputs, backend=backend), oracle(*inputs, True, 8**-0.5))


@pytest.mark.interpret
def test_the_interpreter_refuses_what_it_computes_wrongly():
    message = (
        "Triton's interpreter computes bfloat16 products wrongly; use float32 or float16 there"
    )
    with pytest.raises(ValueError, match=message):
        attention(*(x.bfloat16() for x in qkv(3, 3, 4, 2)), backend="triton")
    with pytest.raises(ValueError, match=message):
        generate(lively().bfloat16(), [1, 2], 2, backend="triton")
    message = "Triton's interpreter needs tensors on the CPU, and these are on meta"
    with pytest.raises(ValueError, match=message):
        attention(*(zeros(1, 3, n, 8, device="meta") for n in (4, 2, 2)), backend="triton")


@pytest.mark.parametrize("T", [1, 40])
def test_auto_on_a_cpu_is_sdpa(monkeypatch, T):
    """Also with the interpreter, which is there for tests."""
    called = []
    module = sys.modules["minillm.layers.attention"]
    monkeypatch.setattr(module, "_sdpa", lambda *inputs: called.append(inputs))
    attention(*qkv(T, 40, H=4, K=2))
    assert len(called) == 1


@pytest.mark.parametrize("backend", BACKEND_PARAMETERS)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("learns", range(3), ids="qkv")
def test_one_input_alone_may_learn(learns, T, backend):
    """If one input needs a gradient, a kernel without a backward pass must not be chosen."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, n, heads, 8) for n, heads in ((T, 4), (7, 2), (7, 2))]
    inputs[learns].requires_grad_()
    outputs = (attention(*inputs, backend=name) for name in (backend, "reference"))
    gradients = (torch.autograd.grad(x.square().sum(), inputs[learns])[0] for x in outputs)
    torch.testing.assert_close(*gradients)
