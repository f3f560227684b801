"""On a CUDA device: the same tokens as on the CPU, and bfloat16 no worse than plain PyTorch in bfloat16."""

import pytest
import torch

import minillm
from minillm import KVCache, generate
from minillm.attention import BACKENDS, attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_the_default_checkpoint_gives_the_cpus_tokens(default, backend, use_cache):
    model, tokenizer = default
    on_gpu, _ = minillm.load(device="cuda", dtype="float32")
    ids = tokenizer.encode("The three laws of robotics are")
    assert generate(on_gpu, ids, 24, backend=backend, use_cache=use_cache) == generate(model, ids, 24)


def test_auto_is_bfloat16_on_the_gpu(default):
    model, tokenizer = default
    on_gpu, _ = minillm.load()
    assert (on_gpu.device.type, on_gpu.dtype) == ("cuda", torch.bfloat16)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.inference_mode():
        exact, rounded = model(ids)[0, -1], on_gpu(ids.cuda(), KVCache(on_gpu, 1, 16))[0, -1].float().cpu()
    assert exact.argmax() == rounded.argmax()
    assert (exact - rounded).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "S"), [(1, 513), (64, 64), (113, 203)])
def test_attention_in_low_precision(dtype, T, S):
    """flash-attn's criterion: at most twice the error of plain PyTorch in the same dtype."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, heads, 64, device="cuda") for n, heads in ((T, 8), (S, 2), (S, 2)))
    exact = attention(q, k, v, backend="reference")
    low = [x.to(dtype) for x in (q, k, v)]
    plain = (attention(*low, backend="reference").float() - exact).abs().max()
    assert (attention(*low, backend="sdpa").float() - exact).abs().max() <= 2 * plain + 1e-5
