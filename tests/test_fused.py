"""The fused kernels give the numbers of the PyTorch code that they replace, in one launch each."""

import pytest
import torch
from interpreter import patch_once_a_launch
from models import lively, tiny_config
from tiers import HAS_TRITON
from torch import Tensor

import minillm
from minillm import Decoder, KVCache, generate
from minillm.kv_cache import KVStorage
from minillm.layers import fast, per_token
from minillm.paged import PagedKVCache

if not HAS_TRITON:
    pytest.skip("needs the package triton, which exists for Linux", allow_module_level=True)
from gpu_compiler import SHARED_LIMIT, compile_for
from stand_in_gpu import stand_in_gpu

from minillm.kernels import fused

interpret = pytest.mark.interpret
patch_once_a_launch()
DTYPES = (torch.float32, torch.float16)


def close(mine: Tensor, torch_: Tensor, exact: Tensor) -> None:
    """An error against float64 of at most twice PyTorch's, and half a rounding step."""
    error, allowed = (float((x.double() - exact).abs().max()) for x in (mine, torch_))
    rounding = torch.finfo(mine.dtype).eps * float(exact.abs().max())
    assert mine.shape == torch_.shape and mine.dtype == torch_.dtype
    assert error <= 2 * allowed + rounding / 2


@interpret
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 96), (3, 2, 100), (1, 1, 2049)])
def test_add_rms_norm(shape, dtype):
    torch.manual_seed(0)
    x, update = 3 * torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    for added in (update, None):
        given = [None if y is None else y.clone() for y in (x, added, weight)]
        mine = fused.add_rms_norm(x, added, weight, 1e-5)
        total = x if added is None else x + added
        assert torch.equal(mine[0], total)  # one rounding, as there
        plain, exact = (
            per_token.rms_norm(y, w, 1e-5)
            for y, w in ((total, weight), (total.double(), weight.double()))
        )
        close(mine[1], plain, exact)
        assert all(
            y is None or torch.equal(y, z) for y, z in zip((x, added, weight), given, strict=True)
        )


@interpret
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 3, 80), (2, 2, 2 * fused.BLOCK + 6)])
def test_silu_mul(shape, dtype):
    torch.manual_seed(0)
    x = 4 * torch.randn(shape).to(dtype)
    close(fused.silu_mul(x), per_token.swiglu(x), per_token.swiglu(x.double()))


@interpret
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "H", "K", "D"), [(1, 4, 2, 8), (5, 3, 1, 12), (7, 2, 2, 64)])
def test_rope_and_write(N, H, K, D, dtype):
    """Into blocks in any order; no other slot changes."""
    torch.manual_seed(0)
    config = tiny_config(n_heads=H, n_kv_heads=K, d_head=D)
    qkv = torch.randn(1, N, H + 2 * K, D).to(dtype)
    qk, v = qkv.split((H + K, K), dim=-2)  # views, as the model has them
    positions = torch.randperm(200)[:N]
    rope = per_token.rope_tables(config, positions, torch.device("cpu"), dtype)
    pages = torch.randn(2, 6, 4, K, D).to(dtype)
    slots = torch.randperm(24)[:N]
    expected, before = pages.clone(), pages.clone()
    q = fused.rope_and_write(qk, v, rope, (pages[0], pages[1], slots // 4, slots % 4))
    turned = per_token.apply_rope(qk, *rope)
    exact = per_token.apply_rope(qk.double(), *(x.double() for x in rope))
    close(q, turned[:, :, :H], exact[:, :, :H])
    written = pages[0, slots // 4, slots % 4]
    close(written, turned[0, :, H:], exact[0, :, H:])
    expected[:, slots // 4, slots % 4] = torch.stack((written, v[0]))
    assert torch.equal(pages, expected)
    assert torch.equal(before[:, slots // 4, slots % 4] != pages[:, slots // 4, slots % 4],
                       torch.ones(2, N, K, D, dtype=torch.bool))  # fmt: skip


@interpret
@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True}, {"n_kv_heads": 1, "qkv_bias": True}], ids=str
)
def test_the_model_is_the_same(changes):
    """Without a cache, with a contiguous one, and in pages, whose slots are written directly."""
    plain, quick = lively(**changes), lively(**changes)
    quick.fast = True
    ids = torch.arange(11)[None] % 97
    with torch.inference_mode():
        expected = plain(ids)
        torch.testing.assert_close(quick(ids), expected, atol=2e-5, rtol=2e-5)
        cache = KVCache(quick, 1, 16)
        both = torch.cat((quick(ids[:, :6], cache), quick(ids[:, 6:], cache)), 1)
        torch.testing.assert_close(both, expected, atol=2e-5, rtol=2e-5)
        paged = PagedKVCache(quick, 8, 4)
        table = paged.manager.start(ids[0].tolist())
        for chunk in (ids[:, :6], ids[:, 6:]):
            paged.reserve(table, chunk.shape[1])
            logits = quick(chunk, paged.batch([table], [chunk.shape[1]]))
        torch.testing.assert_close(logits, expected[:, 6:], atol=2e-5, rtol=2e-5)
    assert generate(quick, [1, 2, 3], 8) == generate(plain, [1, 2, 3], 8)


@interpret
def test_rows_in_another_form_are_written_by_their_own_code():
    class Noted(KVStorage):
        writes, plain = 0, False

        def write(self, *arguments):
            Noted.writes += 1
            super().write(*arguments)

    model = lively()
    model.fast = True
    for storage, writes in ((KVStorage, 0), (Noted, model.config.n_layers)):
        cache = PagedKVCache(model, 8, 4, storage=storage)
        table = cache.manager.start([1, 2, 3])
        cache.reserve(table, 3)
        with torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]), cache.batch([table], [3]))
        assert Noted.writes == writes


def test_who_may_use_them(tiny):
    ids = torch.tensor([[1, 2]])
    assert fast.operations(torch.zeros(1, 1, 8), None) is None  # not on a CPU
    tiny.fast = True
    with torch.inference_mode(), pytest.raises(ValueError, match="leave it at None") as raised:
        tiny.double()(ids)
    assert "Decoder.fast = True computes in float32" in str(raised.value)
    with stand_in_gpu(), pytest.raises(ValueError, match="have no gradients; leave it at None"):
        tiny(ids)  # gradients are recorded here
    tiny.fast = False
    with stand_in_gpu() as launches, torch.inference_mode():
        tiny(ids)
    assert not launches


def test_launches_of_a_layer():
    """Five small kernels per layer become three, which also write to the cache."""
    with torch.device("meta"):
        model = Decoder(tiny_config(n_layers=3)).requires_grad_(False)
    model.fast = True
    cache = PagedKVCache(model, 8, 4, backend="triton")
    table = cache.manager.start([1, 2, 3])
    cache.reserve(table, 3)
    with stand_in_gpu() as launches, torch.inference_mode():
        model(torch.zeros(1, 3, dtype=torch.int64, device="meta"), cache.batch([table], [3]))
    names = [launch.kernel.fn.__name__ for launch in launches]
    names = [name for name in names if name.startswith(("add", "rope", "silu"))]
    layer = ["add_rms_norm_kernel", "rope_and_write_kernel", "add_rms_norm_kernel"]
    assert names == [*layer, "silu_mul_kernel"] * 3
    assert [launch.arguments["ADD"] for launch in launches if "ADD" in launch.arguments] == [
        False, *[True] * 5
    ]  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED_LIMIT)
def test_compiled(capability):
    """For Llama-3-8B's shapes: few registers, nothing spilled."""
    with torch.device("meta"):
        config = minillm.ModelConfig.preset("llama-3-8b")
        x = torch.empty(1, 7, config.d_model, dtype=torch.bfloat16)
        qkv = torch.empty(1, 7, 48, 128, dtype=torch.bfloat16)
        cos = torch.empty(7, 1, 128, dtype=torch.bfloat16)
        pages, at = torch.empty(9, 16, 8, 128, dtype=torch.bfloat16), torch.empty(7).long()
        with stand_in_gpu() as launches, fast.on_device_of(x):
            fused.add_rms_norm(x, x, x[0, 0], 1e-5)
            fused.add_rms_norm(x, None, x[0, 0], 1e-5)
            fused.silu_mul(torch.empty(1, 7, 2 * config.d_ff, dtype=torch.bfloat16))
            fused.rope_and_write(*qkv.split((40, 8), -2), (cos, cos), (pages, pages, at, at))
    assert len(launches) == 4
    for launch in launches:
        binary = compile_for(launch, capability)
        assert binary.spilled_bytes == 0 and binary.registers <= 128
        assert binary.shared_bytes <= 1024
