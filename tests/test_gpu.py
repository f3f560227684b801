"""On a CUDA device: the CPU's tokens, and the kernels by flash-attn's criterion.

Also in bfloat16, which the interpreter cannot compute. What needs einops is skipped without it: a
GPU machine need not have it.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import lively
from plain_attention import (
    FLOOR,
    at_most_twice,
    check_gradients,
    check_output,
    double,
    formula,
    inputs,
    log_sum_exp,
)
from torch import Tensor

import minillm
from minillm import Engine, EngineConfig, KVCache, Sampling, generate, quantize
from minillm.layers import per_token
from minillm.layers.attention import BACKENDS, attention
from minillm.quantization.grid import pack_blocks
from minillm.serving.cuda_graphs import graphed_step

pytest.importorskip("triton", reason="needs the package triton, which exists for Linux")
from kernel_cases import DIMS, FEWER_KEYS, MORE_KEYS, SAME, cases, check_far, grid

from minillm.kernels import fused as fused_kernels
from minillm.kernels.few_rows import few_rows_linear
from minillm.kernels.flash_decode import flash_decode
from minillm.kernels.flash_forward import flash_forward
from minillm.kernels.tuning import by_pointers, forward_configs, specialized_configs

DEVICE, LONGEST = "cuda", 16384
LOW = (torch.bfloat16, torch.float16)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_the_default_checkpoint_gives_the_cpus_tokens(default, backend, use_cache):
    model, tokenizer = default
    on_gpu, _ = minillm.load(device="cuda", dtype="float32")
    ids = tokenizer.encode("The three laws of robotics are")
    tokens = generate(on_gpu, ids, 24, backend=backend, use_cache=use_cache)
    assert tokens == generate(model, ids, 24)


def test_auto_is_bfloat16_on_the_gpu(default):
    model, tokenizer = default
    on_gpu, _ = minillm.load()
    assert (on_gpu.device.type, on_gpu.dtype) == ("cuda", torch.bfloat16)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.inference_mode():
        exact = model(ids)[0, -1]
        rounded = on_gpu(ids.cuda(), KVCache(on_gpu, 1, 16))[0, -1].float().cpu()
    assert exact.argmax() == rounded.argmax()
    assert (exact - rounded).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("backend", ["auto", "tiled", "sdpa"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("T", "S"), [(1, 513), (64, 64), (113, 203)])
def test_attention_in_low_precision(backend, dtype, T, S):
    if backend == "tiled":
        pytest.importorskip("einops", reason="needs the package einops")
    q, k, v, _ = inputs(T, S, 8, 2, 64, dtype=dtype, device=DEVICE)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return attention(q, k, v, causal=causal, scale=scale, backend=backend)

    check_output(attend, q, k, v, True)


def triton(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return attention(q, k, v, causal=causal, scale=scale, backend="triton")


def gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(triton(*leaves, causal, scale), leaves, grad)


@cases(grid([*SAME, *MORE_KEYS, *FEWER_KEYS], DIMS, (*LOW, torch.float32)))
def test_forward(T, S, H, K, D, dtype, causal):
    """In float32 the plain product is exact, not TF32, so that a TF32 in the kernel would show."""
    q, k, v, _ = inputs(T, S, H, K, D, dtype=dtype, device=DEVICE)
    out, lse = flash_forward(q, k, v, causal, D**-0.5)
    plain, exact = (formula(*xs, causal, D**-0.5) for xs in ((q, k, v), double(q, k, v)))
    at_most_twice("output", out, plain, exact)
    exact = log_sum_exp(q, k, causal, D**-0.5)
    torch.testing.assert_close(lse.double(), exact, atol=1e-5, rtol=1e-6)


@cases(grid([*SAME, *MORE_KEYS, *FEWER_KEYS], DIMS, (*LOW, torch.float32)))
def test_backward(T, S, H, K, D, dtype, causal):
    q, k, v, grad = inputs(T, S, H, K, D, dtype=dtype, device=DEVICE)
    # One key has the weight 1, whatever its score: dQ and dK are exactly 0, in the formula as well.
    # The kernel subtracts two sums of D products that were added in another order.
    floor = 5e-5 if S == 1 else FLOOR
    found = gradients(q, k, v, grad, causal, D**-0.5)
    check_gradients(found, q, k, v, grad, causal, D**-0.5, floor)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize(("T", "H", "K"), [(1, 2, 2), (1, 9, 3), (1, 32, 1), (5, 6, 1), (32, 2, 2)])
def test_decode(T, H, K, D, dtype):
    for S, causal in ((T, True), (65, True), (300, False), (4099, True)):
        q, k, v, _ = inputs(T, S, H, K, D, dtype=dtype, device=DEVICE)
        check_output(flash_decode, q, k, v, causal)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("T", "S"), [(1024, 1024), (1500, 2111)])
def test_lengths_that_are_tuned(T, S, D, dtype):
    """From 1024 queries on every listed configuration is run and timed; the one kept is right."""
    q, k, v, grad = inputs(T, S, 4, 2, D, B=1, dtype=dtype, device=DEVICE)
    check_output(triton, q, k, v, True)
    check_gradients(gradients(q, k, v, grad, True, D**-0.5), q, k, v, grad, True, D**-0.5)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("D", [64, 128])
def test_long_sequences(D, dtype):
    """16,384 tokens; the formula computes the last 128 queries, and only they have gradients."""
    q, k, v, grad = inputs(LONGEST, LONGEST, 4, 2, D, B=1, dtype=dtype, device=DEVICE)
    scale, last = D**-0.5, slice(LONGEST - 128, None)
    few = q[:, last], k, v
    exact, plain = formula(*double(*few), True, scale), formula(*few, True, scale)
    at_most_twice("output", triton(q, k, v, True, scale)[:, last], plain, exact)
    decoded = flash_decode(q[:, -1:], k, v, True, scale)
    at_most_twice("decode", decoded, plain[:, -1:], exact[:, -1:])
    grad[:, : LONGEST - 128] = 0
    dq, dk, dv = gradients(q, k, v, grad, True, scale)
    assert (dq[:, : LONGEST - 128] == 0).all()
    check_gradients((dq[:, last], dk, dv), *few, grad[:, last], True, scale)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("T", [17, 200, 2000])
def test_two_runs_give_equal_bits(T, dtype):
    q, k, v, grad = inputs(T, 2000, 8, 2, 64, dtype=dtype, device=DEVICE)
    runs = {
        "forward": lambda: [triton(q, k, v, True, 0.125)],
        "backward": lambda: gradients(q, k, v, grad, True, 0.125),
        "decode": lambda: [triton(q[:, -1:], k, v, True, 0.125)],
    }
    for name, run in runs.items():
        first = run()
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)), name


def test_huge_scores():
    q, k, v, _ = inputs(12, 70, 4, 2, 16, device=DEVICE)
    for kernel in (flash_decode, lambda *xs: flash_forward(*xs)[0]):
        ones = kernel(1e4 * q, 1e4 * k, torch.ones_like(v), True, 1.0)
        torch.testing.assert_close(ones, torch.ones_like(q), atol=1e-6, rtol=0)


@pytest.mark.parametrize("T", [1, 100])
def test_auto_is_triton_where_the_kernels_take_the_input(T):
    q, k, v, _ = inputs(T, 100, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend="triton"))
    wide = inputs(T, 100, 4, 2, 264, dtype=torch.bfloat16, device=DEVICE)[:3]
    not_taken = ((wide, 0.1), (double(q, k, v), 0.1), ((q, k, v), -0.1))
    for others, scale in not_taken:
        expected = attention(*others, scale=scale, backend="reference")
        torch.testing.assert_close(attention(*others, scale=scale), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("which", ["rows", "sequences"])
def test_offsets_beyond_31_bits(which):
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free GPU memory")
    check_far(torch.zeros(7 << 30, dtype=torch.float16, device=DEVICE), which)


# Graphs, fused kernels, few rows, and every configuration


@pytest.mark.parametrize("sampling", [None, Sampling(0.8, top_k=20, seed=3)], ids=str)
def test_generate_with_graphs_and_fused_kernels(sampling):
    """The same tokens with and without each, in float32."""
    answers = []
    for fused in (False, None):
        model = lively().cuda()
        model.fast = fused
        for step in (None, graphed_step(model, 3, 60)):
            answers.append(generate(model, [5, 6, 7], 60, sampling=sampling, step=step))
    assert answers == [answers[0]] * 4


def test_graphs_of_a_model_with_scaled_positions():
    """Llama 3.1 scales its rotary frequencies: none of them may come from the host."""
    model = lively(rope_factors=(1.0, 2.0, 4.0, 8.0)).cuda()
    step = graphed_step(model, 3, 40)
    assert step is not None
    assert generate(model, [1, 2, 3], 40, step=step) == generate(model, [1, 2, 3], 40)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_the_second_gpu():
    first, second = (generate(lively().to(f"cuda:{i}"), [1, 2], 40) for i in range(2))
    assert first == second


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_fused(dtype):
    torch.manual_seed(0)
    C, F, H, K, D, N = 4096, 14336, 32, 8, 128, 9
    x, update = torch.randn(2, 1, N, C, device=DEVICE).to(dtype)
    weight = torch.randn(C, device=DEVICE).to(dtype)
    mine, total = fused_kernels.add_rms_norm(x, update, weight, 1e-5), x + update
    assert torch.equal(mine[0], total)
    exact = per_token.rms_norm(total.double(), weight.double(), 1e-5)
    at_most_twice("norm", mine[1], per_token.rms_norm(total, weight, 1e-5), exact)
    gate_up = torch.randn(1, N, 2 * F, device=DEVICE).to(dtype)
    mine, plain = fused_kernels.silu_mul(gate_up), per_token.swiglu(gate_up)
    at_most_twice("gate", mine, plain, per_token.swiglu(gate_up.double()))
    qkv = torch.randn(1, N, H + 2 * K, D, device=DEVICE).to(dtype)
    qk, v = qkv.split((H + K, K), dim=-2)
    config = minillm.ModelConfig.preset("llama-3-8b")
    rope = per_token.rope_tables(config, range(90, 90 + N), qkv.device, dtype)
    pages = torch.zeros(2, 5, 16, K, D, device=DEVICE, dtype=dtype)
    at = torch.randperm(80, device=DEVICE)[:N]
    q = fused_kernels.rope_and_write(qk, v, rope, (*pages, at // 16, at % 16))
    plain = per_token.apply_rope(qk, *rope)
    exact = per_token.apply_rope(qk.double(), *(t.double() for t in rope))
    at_most_twice("q", q, plain[:, :, :H], exact[:, :, :H])
    at_most_twice("k", pages[0, at // 16, at % 16], plain[0, :, H:], exact[0, :, H:])
    assert torch.equal(pages[1, at // 16, at % 16], v[0])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("M", [1, 3, 16, 40, 64])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (1000, 1536)])
def test_few_rows(N, K, M, dtype):
    torch.manual_seed(0)
    x = torch.randn(M, K, device=DEVICE).to(dtype)
    w = torch.randn(N, K, device=DEVICE).to(dtype)
    exact = x.double() @ w.double().T
    at_most_twice("16 bits", few_rows_linear(x, w), x @ w.T, exact)
    q = torch.randint(-127, 127, (N, K), device=DEVICE, dtype=torch.int8)
    scale = torch.rand(N, device=DEVICE)
    w = q.double() * scale.double()[:, None]
    plain = (x.float() @ w.float().T).to(dtype)
    at_most_twice("8 bits", few_rows_linear(x, q, scale), plain, x.double() @ w.T)
    q = torch.randint(0, 16, (N, K), device=DEVICE, dtype=torch.uint8)
    scale, zero = torch.rand(2, N, K // 32, device=DEVICE).to(dtype)
    w = (q.double().unflatten(1, (-1, 32)) - 8) * scale.double()[..., None]
    w = (w + zero.double()[..., None]).flatten(1)
    plain = x @ w.to(dtype).T  # as plain PyTorch does it: the weights are rounded first
    mine = few_rows_linear(x, pack_blocks(q), scale, zero)
    at_most_twice("4 bits", mine, plain, x.double() @ w.T)


def check_forward(config: Any, D: int, dtype: torch.dtype) -> None:
    def forward(*arguments: Any) -> Tensor:
        return flash_forward(*arguments, config)[0]

    for T, S, causal in ((300, 300, True), (129, 517, True), (70, 260, False)):
        given = inputs(T, S, 4, 2, D, dtype=dtype, device=DEVICE)[:3]
        check_output(forward, *given, causal)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_every_forward_configuration(D, dtype):
    """By the copy engine and by pointers."""
    for config in forward_configs(D, dtype):
        check_forward(config, D, dtype)
        check_forward(by_pointers(config), D, dtype)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs compute capability 9.0, for the copy engine",
)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("D", [64, 128])
def test_specialized_forward(D, dtype):
    for config in specialized_configs(D):
        check_forward(config, D, dtype)


def gpu_model(**options: Any) -> Any:
    sizes = {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_head": 32, "d_ff": 256}
    return lively(size=0.05, vocab_size=256, **sizes, **options).to(DEVICE)


@pytest.mark.parametrize(
    "scheme", ["int8", "fp8", "int4", "w8a8", "llm_int8", "gptq", "awq", "smoothquant"]
)
def test_quantized_models(scheme):
    """Few rows and many: the logits of the dequantized model, within bfloat16's tolerance."""
    model = gpu_model()
    ids = torch.randint(0, 256, (2, 90), device=DEVICE)
    needs = scheme in ("gptq", "awq", "smoothquant")
    small = quantize(model, scheme, **({"calibration": ids} if needs else {}))
    for n in (1, 20, 90):
        with torch.inference_mode():
            mine, theirs = small(ids[:, :n]).float(), model(ids[:, :n])
        assert (mine - theirs).abs().max() < 0.15 * theirs.abs().max()
    prompt = ids[0, :9].tolist()
    engine = Engine(small, EngineConfig(n_blocks=20))
    number = engine.submit(prompt, 8)
    assert len(engine.run()[number].tokens) == 8


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantized_pages_in_the_engine(kv_dtype, graphs):
    """The kernel gives the same tokens as gathered and dequantized pages."""
    model, prompts = gpu_model(), [[5, 90, 3, 3, 41, 8, 13], [7, 7, 1]]
    tokens = []
    for backend, with_graphs in (("sdpa", False), ("triton", graphs)):
        config = EngineConfig(
            n_blocks=30, kv_dtype=kv_dtype, backend=backend, cuda_graphs=with_graphs
        )
        engine = Engine(model, config)
        ids = [engine.submit(prompt, 8) for prompt in prompts]
        done = engine.run()
        tokens.append([done[i].tokens for i in ids])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_sparse_product(rows):
    pytest.importorskip("einops", reason="needs the package einops")
    from minillm.quantization.sparsity import SparseLinear, compress, mask_2_4

    w, mask = torch.randn(96, 128, device=DEVICE).bfloat16(), mask_2_4(torch.randn(96, 128))
    mask = mask.to(DEVICE)
    layer = SparseLinear(compress(w, mask))
    x = torch.randn(1, rows, 128, device=DEVICE).bfloat16()
    assert torch.equal(layer.dense(), w.float() * mask)
    torch.testing.assert_close(layer(x), F.linear(x, w * mask), atol=0.1, rtol=0.02)
