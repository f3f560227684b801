"""`costs` against what it counts: live parameters, tensors, PyTorch's FLOP counter, and itself."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import lively, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from minillm import Decoder, KVCache, ModelConfig, costs
from minillm.config import PRESETS
from minillm.weights.build import parameter_sources

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RUNNABLE = [name for name, config in PRESETS.items() if config.runnable]
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "qkv bias": {"qkv_bias": True},
    "out bias": {"attn_out_bias": True},
    "qk_norm": {"qk_norm": True},
    "everything": {
        "tie_embeddings": True,
        "qkv_bias": True,
        "attn_out_bias": True,
        "qk_norm": True,
        "n_kv_heads": 1,
    },
    "wide heads": {"d_head": 20, "n_kv_heads": 4},
}
CONFIGS = [pytest.param(tiny_config(**changes), id=name) for name, changes in VARIANTS.items()]

configs = st.builds(
    lambda kv, group, **others: ModelConfig(
        n_heads=kv * group, n_kv_heads=kv, vocab_size=101, max_seq_len=1 << 20, **others
    ),
    kv=st.integers(1, 8),
    group=st.integers(1, 8),
    tie_embeddings=st.booleans(),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
    n_layers=st.integers(1, 100),
    d_model=st.integers(1, 500),
    d_head=st.sampled_from([2, 64, 80, 128]),
    d_ff=st.integers(1, 999),
)


def on_meta(config: ModelConfig) -> Decoder:
    """The model without memory: shapes are all that counting needs."""
    with torch.device("meta"):
        return Decoder(config)


@torch.no_grad()
def counted_flops(model: Decoder, n_tokens: int, cache: KVCache | None = None) -> int:
    """What PyTorch's counter sees in one forward pass.

    The reference backend multiplies all T * S pairs.
    """
    cache = KVCache(model, 1, n_tokens, backend="reference") if cache is None else cache
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, n_tokens, dtype=torch.int64, device=model.device), cache)
    return counter.get_total_flops()


# Parameters


@pytest.mark.parametrize(
    "config", [*CONFIGS, *(pytest.param(PRESETS[name], id=name) for name in RUNNABLE)]
)
def test_parameters_of_live_models(config):
    model = on_meta(config)
    sources = parameter_sources(config)  # which Hugging Face tensors are in a parameter
    marks = {
        "norms": "norm",
        "attention": "self_attn",
        "mlp": "mlp",
        "embedding": "embed_tokens",
        "head": "lm_head",
    }
    live = dict.fromkeys(costs.param_breakdown(config), 0)
    for name, p in model.named_parameters():  # tied matrices come once
        live[next(part for part, mark in marks.items() if mark in next(iter(sources[name])))] += (
            p.numel()
        )
    assert costs.param_breakdown(config) == live
    assert (
        costs.param_count(config)
        == sum(live.values())
        == sum(p.numel() for p in model.parameters())
    )


@pytest.mark.parametrize(
    ("name", "published"),
    # The sum over the tensors of each model's published checkpoint; GPT-3's, which is not public,
    # by hand.
    [
        ("opt-13b", 12_853_473_280),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("mistral-7b", 7_241_732_096),
        ("llama-3-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("gpt3-175b", 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048 + 2) * 12288),
    ],
)
def test_parameters_of_published_models(name, published):
    assert costs.param_count(ModelConfig.preset(name)) == published


@given(configs)
@settings(deadline=None, max_examples=50)
def test_breakdown_sums_to_the_count(config):
    parts = costs.param_breakdown(config)
    assert sum(parts.values()) == costs.param_count(config)
    assert min(parts.values()) >= 0 and (parts["head"] == 0) == config.tie_embeddings
    untied = costs.param_count(replace(config, tie_embeddings=False))
    assert (
        untied - costs.param_count(config)
        == config.tie_embeddings * config.vocab_size * config.d_model
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_matmul_params_are_the_matrices_a_token_meets(config):
    model = on_meta(config)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert costs.matmul_params(config) == matrices  # a tied head is a Linear, too


# Bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_weight_bytes_of_live_models(config, dtype):
    model = on_meta(config).to(dtype)
    total = sum(p.nbytes for p in model.parameters())
    assert costs.weight_bytes(config, dtype) == costs.weight_bytes(config, str(dtype)) == total
    assert costs.weight_read_bytes(config, dtype) == total - (
        0 if config.tie_embeddings else model.embed.weight.nbytes
    )


def test_learned_positions_are_stored_but_not_read():
    opt = ModelConfig.preset("opt-13b")
    assert (
        costs.weight_bytes(opt, "float16") - costs.weight_read_bytes(opt, "float16")
        == 2050 * 5120 * 2
    )


def test_narrow_weights():
    config = tiny_config(vocab_size=96, n_layers=1, d_model=9)
    assert costs.param_count(config) % 2 == 1
    assert (
        costs.weight_bytes(config, "int8")
        == costs.weight_bytes(config, "fp8")
        == costs.param_count(config)
    )
    assert costs.weight_bytes(config, "int4") == (costs.param_count(config) + 1) // 2  # whole bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch_size", "max_len"), [(1, 1), (3, 17)])
@pytest.mark.parametrize("config", CONFIGS)
def test_kv_cache_bytes_of_live_caches(config, batch_size, max_len, dtype):
    cache = KVCache(on_meta(config).to(dtype), batch_size, max_len)
    assert costs.kv_cache_bytes(config, batch_size, max_len, dtype) == cache.nbytes
    assert costs.kv_cache_read_bytes(config, batch_size, max_len, dtype) == cache.nbytes
    assert costs.kv_bytes_per_token(config, dtype) * batch_size * max_len == cache.nbytes


def test_bytes_are_exact_where_floats_are_not():
    config = replace(tiny_config(), n_kv_heads=1, d_head=2, n_layers=1)
    n = 10**17 + 1  # 4 numbers per token
    assert costs.kv_cache_bytes(config, 1, n, "int8") == 4 * n
    assert costs.kv_cache_bytes(config, n, n, "int4") == 2 * n**2


@given(
    configs,
    st.integers(1, 5000),
    st.integers(0, 10**12),
    st.sampled_from(["float32", "bf16", "int8", "int4"]),
)
@settings(deadline=None, max_examples=100)
def test_max_batch_size_is_the_largest_that_fits(config, seq_len, memory, dtype):
    k = costs.max_batch_size(config, seq_len, memory, dtype)
    weights = costs.weight_bytes(config, dtype)
    assert k == 0 or weights + costs.kv_cache_bytes(config, k, seq_len, dtype) <= memory
    assert weights + costs.kv_cache_bytes(config, k + 1, seq_len, dtype) > memory


def test_max_batch_size_at_the_edge():
    config = tiny_config()
    two = costs.weight_bytes(config, "fp16") + costs.kv_cache_bytes(config, 2, 64, "fp16")
    assert [costs.max_batch_size(config, 64, two + extra, "fp16") for extra in (-1, 0, 1)] == [
        1,
        2,
        2,
    ]
    assert costs.max_batch_size(config, 64, costs.weight_bytes(config, "fp16") - 1, "fp16") == 0


@pytest.mark.parametrize(
    ("T", "S", "D", "dtype", "block", "expected"),
    [
        # Plain attention: Q and O, K and V, and the score matrix four times.
        (1, 1, 1, "int8", None, 2 + 2 + 4),
        (2, 3, 5, "fp16", None, 2 * (2 * 2 * 5 + 2 * 3 * 5 + 4 * 2 * 3)),
        (1024, 1024, 64, "fp16", None, 2 * (4 * 1024 * 64 + 4 * 1024**2)),
        # Tiles: K and V once per tile, and one float32 per query, whatever the dtype.
        (1, 1, 1, "int8", 1, 2 + 2 + 4),
        (2, 3, 5, "fp16", 1, 2 * (2 * 2 * 5 + 2 * (2 * 3 * 5)) + 4 * 2),
        (2, 3, 5, "fp16", 2, 2 * (2 * 2 * 5 + 2 * 3 * 5) + 4 * 2),
        (2, 3, 5, "fp32", 128, 4 * (2 * 2 * 5 + 2 * 3 * 5) + 4 * 2),
        (1024, 1024, 64, "fp16", 128, 2 * (2 * 1024 * 64 + 8 * 2 * 1024 * 64) + 4096),
        (
            1025,
            1024,
            64,
            "fp16",
            128,
            2 * (2 * 1025 * 64 + 9 * 2 * 1024 * 64) + 4100,
        ),  # one query more, one tile more
        (0, 7, 64, "fp16", 128, 0),
    ],
)
def test_attention_bytes_by_hand(T, S, D, dtype, block, expected):
    assert costs.attention_bytes(T, S, D, dtype, block=block) == expected


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([16, 64, 128]), st.integers(1, 512)
)
def test_attention_bytes_by_the_algorithm(T, S, D, block):
    """Tile after tile; and larger tiles never move more."""
    moved = sum(
        4 * (2 * min(block, T - t0) * D + 2 * S * D) + 4 * min(block, T - t0)
        for t0 in range(0, T, block)
    )
    assert costs.attention_bytes(T, S, D, "fp32", block=block) == moved
    assert costs.attention_bytes(T, S, D, "fp32", block=block + 1) <= moved


def test_attention_bytes_of_long_sequences():
    """Both grow with the square.

    Tiles of M/d rows move d²/M times as much as the matrix of scores, up to the constant.
    """
    plain, tiled = (
        [costs.attention_bytes(n, n, 64, "fp16", block=block) for n in (1 << 18, 1 << 19)]
        for block in (None, 128)
    )
    assert plain[1] / plain[0] == pytest.approx(4, rel=1e-3)
    assert tiled[1] / tiled[0] == pytest.approx(4, rel=1e-3)
    assert plain[0] / tiled[0] == pytest.approx(4 / (2 * 64 / 128), rel=2e-2)


# FLOPs


# From 2: PV with a single value is no matrix product, and the counter skips it.
@pytest.mark.parametrize("n", [2, 17])
@pytest.mark.parametrize("config", CONFIGS)
def test_prefill_flops_against_the_counter(config, n):
    # The counter also sees the pairs above the diagonal.
    masked = costs.attention_flops(config, n * n - n * (n + 1) // 2)
    assert counted_flops(on_meta(config), n) == costs.prefill_flops(config, n) + masked


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-2-70b", "qwen3-0.6b"])
def test_decode_flops_of_presets_against_the_counter(name):
    model = on_meta(ModelConfig.preset(name))
    cache = KVCache(model, 1, 1000, backend="reference")
    for context in (2, 500, 1000):
        cache.length = context - 1  # pretend that the past was computed
        assert counted_flops(model, 1, cache) == costs.decode_flops(model.config, context)


def test_the_counter_agrees_on_memory_that_exists():
    model = lively()
    assert counted_flops(model, 5) == counted_flops(on_meta(model.config), 5)


@torch.no_grad()
def test_last_logits_only_against_the_counter():
    model = on_meta(tiny_config())
    n, cache = 9, KVCache(on_meta(tiny_config()), 1, 9, backend="reference")
    with FlopCounterMode(display=False) as counter:
        model.head(model.hidden(torch.zeros(1, n, dtype=torch.int64, device="meta"), cache)[:, -1:])
    masked = costs.attention_flops(model.config, n * (n - 1) // 2)
    assert (
        counter.get_total_flops()
        == costs.prefill_flops(model.config, n, last_logits_only=True) + masked
    )


@given(configs, st.integers(0, 60))
@settings(deadline=None, max_examples=50)
def test_prefill_is_the_sum_of_decode_steps(config, n):
    full = costs.prefill_flops(config, n)
    assert full == sum(costs.decode_flops(config, i) for i in range(1, n + 1))
    saved = full - costs.prefill_flops(config, n, last_logits_only=True)
    assert saved == 2 * config.vocab_size * config.d_model * max(0, n - 1)


@given(configs, st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 500))
@settings(deadline=None, max_examples=100)
def test_costs_grow_with_tokens_batch_and_context(config, n, more, batch):
    assert costs.prefill_flops(config, n) < costs.prefill_flops(config, n + more)
    assert costs.prefill_flops(config, n, last_logits_only=True) < costs.prefill_flops(
        config, n + more, last_logits_only=True
    )
    assert costs.decode_flops(config, n) < costs.decode_flops(config, n + more)
    for of in (costs.kv_cache_bytes, costs.kv_cache_read_bytes, costs.decode_bytes):
        assert of(config, batch, n, "fp16") < of(config, batch, n + more, "fp16")
        assert of(config, batch, n, "fp16") < of(config, batch + more, n, "fp16")
        assert of(config, batch, n, "fp16") < of(config, batch, n, "fp32")
    assert decode_intensity(config, batch, n) < decode_intensity(config, batch + more, n)


@given(configs)
@settings(deadline=None, max_examples=50)
def test_layers_add_up(config):
    for cost in (
        costs.param_count,
        costs.matmul_params,
        lambda c: costs.weight_bytes(c, "fp16"),
        lambda c: costs.kv_cache_bytes(c, 3, 100, "fp16"),
        lambda c: costs.prefill_flops(c, 100),
        lambda c: costs.decode_flops(c, 100),
    ):
        at = {
            n: cost(replace(config, n_layers=n))
            for n in (1, 2, config.n_layers, 2 * config.n_layers)
        }
        assert at[2 * config.n_layers] - at[config.n_layers] == config.n_layers * (at[2] - at[1])


def decode_intensity(config, batch, n):
    """FLOPs per byte of a decode step with n cached tokens per sequence, in 16 bits."""
    return batch * costs.decode_flops(config, n) / costs.decode_bytes(config, batch, n, "fp16")


def test_a_decode_step_has_as_many_flops_per_byte_as_sequences():
    config = ModelConfig.preset("llama-2-7b")
    # With hardly any context a step is 2 FLOPs per parameter, and each parameter is 2 bytes.
    for batch in (1, 8, 64):
        assert decode_intensity(config, batch, 1) == pytest.approx(batch, rel=0.01)
    assert costs.decode_bytes(config, 5, 777, "fp16") == (
        costs.weight_read_bytes(config, "fp16") + costs.kv_cache_bytes(config, 5, 777, "fp16")
    )


# Refusals


@pytest.mark.parametrize("bad", [-1, True, 1.0, "3", None])
def test_sizes_that_are_no_sizes(bad):
    config = tiny_config()
    for call in (
        lambda: costs.prefill_flops(config, bad),
        lambda: costs.decode_flops(config, bad),
        lambda: costs.kv_cache_bytes(config, bad, 1, "fp16"),
        lambda: costs.kv_cache_read_bytes(config, 1, bad, "fp16"),
        lambda: costs.max_batch_size(config, bad, 10**9, "fp16"),
        lambda: costs.max_batch_size(config, 1, bad, "fp16"),
        lambda: costs.attention_bytes(bad, 1, 64, "fp16"),
        lambda: costs.attention_bytes(1, bad, 64, "fp16", block=1),
        lambda: costs.attention_bytes(1, 1, bad, "fp16"),
    ):
        with pytest.raises(ValueError, match="must be a whole number, 0 or more"):
            call()


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "3"])
def test_blocks_that_are_no_blocks(bad):
    with pytest.raises(ValueError, match=f"block is {bad!r}; it must be a whole number, 1 or more"):
        costs.attention_bytes(4, 4, 64, "fp16", block=bad)


@pytest.mark.parametrize("dtype", ["float12", "", None, torch.complex64, 16])
def test_unknown_dtypes(dtype):
    for call in (costs.weight_bytes, costs.weight_read_bytes, costs.kv_bytes_per_token):
        with pytest.raises(ValueError, match="is not known here; choose one of float32, float16"):
            call(tiny_config(), dtype)
    with pytest.raises(ValueError, match="is not known here"):
        costs.attention_bytes(4, 4, 64, dtype)


def test_dtype_names():
    bits = {
        "fp32": 32,
        torch.float32: 32,
        "half": 16,
        "bf16": 16,
        torch.bfloat16: 16,
        "torch.float16": 16,
        "fp8": 8,
        torch.int8: 8,
        "int4": 4,
    }
    assert {name: costs.dtype_bits(name) for name in bits} == bits
