"""The arithmetic claims of the source articles that the lessons examine, by number, each with its verdict."""

from dataclasses import replace

import pytest

from minillm import Hardware, ModelConfig, costs
from minillm.config import PRESETS
from minillm.hardware import roofline_seconds

GB, GiB = 10**9, 2**30


def layer_matrices(config: ModelConfig) -> int:
    """Parameters of the attention and feed-forward matrices, without biases."""
    parts = costs.param_breakdown(replace(config, qkv_bias=False, attn_out_bias=False, mlp_bias=False))
    return parts["attention"] + parts["mlp"]


def test_claim_01_twelve_layers_width_squared():
    """P = 12·L·C². Exact for the matrices of GPT-3 and OPT; elsewhere an estimate, and right by luck if it is right."""

    def rule(name: str) -> int:
        return 12 * PRESETS[name].n_layers * PRESETS[name].d_model ** 2

    for name in ("gpt3-175b", "opt-13b"):
        assert rule(name) == layer_matrices(PRESETS[name])
    # Of the layers' matrices: SwiGLU's 3CF and fewer key/value heads move it either way.
    of_matrices = {name: rule(name) / layer_matrices(PRESETS[name]) for name in PRESETS}
    assert of_matrices["llama-2-7b"] == pytest.approx(0.995, abs=5e-4)  # 3 · 11008 is 8.06 C, not 8 C
    assert of_matrices["llama-2-70b"] == pytest.approx(16 / 17)
    assert of_matrices["mistral-7b"] == pytest.approx(12 / 13)
    assert of_matrices["smollm2-135m"] == 9 / 8
    # Of all parameters, embeddings included.
    of_all = {name: rule(name) / costs.param_count(PRESETS[name]) for name in PRESETS}
    published = {
        "gpt3-175b": 0.996, "opt-13b": 0.979, "llama-2-7b": 0.956, "llama-2-70b": 0.934, "mistral-7b": 0.890,
        "llama-3-8b": 0.802, "smollm2-135m": 0.888, "qwen3-0.6b": 0.591,
    }  # fmt: skip
    assert of_all == pytest.approx(published, abs=5e-4)


def test_claim_02_seven_billion_parameters_are_14_gb():
    """7B parameters in 16 bits are about 14 GB. True to 4%: Llama-2-7B is smaller than its name, Mistral-7B larger."""
    llama, mistral = (costs.weight_bytes(ModelConfig.preset(name), "float16") for name in ("llama-2-7b", "mistral-7b"))
    assert (llama, mistral) == (2 * 6_738_415_616, 2 * 7_241_732_096)
    assert (round(llama / GB, 2), round(mistral / GB, 2)) == (13.48, 14.48)
    assert all(abs(size / (14 * GB) - 1) < 0.04 for size in (llama, mistral))
    # In the GiB that nvidia-smi shows, neither is 14.
    assert (round(llama / GiB, 2), round(mistral / GiB, 2)) == (12.55, 13.49)


def test_claim_03_llama_2_70b_is_130_gb():
    """Llama-2-70B is 130 GB, 2 × A100-80GB hold it. 138 GB, or 128.5 GiB; two hold it with room for 16 sequences, four for 135."""
    config, memory = ModelConfig.preset("llama-2-70b"), Hardware.preset("a100-80gb").memory_bytes
    weights = costs.weight_bytes(config, "float16")
    assert round(weights / GB, 2) == 137.95
    assert round(weights / GiB, 1) == 128.5
    assert memory < weights < 2 * memory
    assert round((2 * memory - weights) / GB, 1) == 22.0  # for cache, activations and everything else
    assert costs.max_batch_size(config, 4096, 2 * memory, "float16") == 16
    assert costs.max_batch_size(config, 4096, 4 * memory, "float16") == 135
    # Without shared key/value heads, two would hold two sequences.
    assert costs.kv_bytes_per_token(replace(config, n_kv_heads=64), "float16") == 8 * costs.kv_bytes_per_token(config, "float16")
    assert (2 * memory - weights) // (8 * costs.kv_cache_bytes(config, 1, 4096, "float16")) == 2


def test_claim_04_bytes_per_parameter():
    """4 bytes a parameter in fp32, 2 in fp16, 1 in int8. Exact for the numbers; scales and zero points come on top."""
    for config in PRESETS.values():
        n = costs.param_count(config)
        assert [costs.weight_bytes(config, dtype) for dtype in ("fp32", "fp16", "int8")] == [4 * n, 2 * n, n]
        assert costs.weight_bytes(config, "int4") == (n + 1) // 2
    # A float16 scale for every 32 int8 numbers (GGUF's Q8_0) makes it 8.5 bits, 6.25% more.
    assert (32 * costs.dtype_bits("int8") + costs.dtype_bits("fp16")) / 32 == 8.5


def test_claim_08_loading_130_gb_bounds_the_latency():
    """130 GB at 2000 GB/s bounds a token to 65 ms; CPUs have 1050 GB/s. True as arithmetic; but no such chip or CPU is here."""
    a100 = Hardware.preset("a100-80gb")
    assert a100.bandwidth == 2039 * GB
    assert roofline_seconds(replace(a100, bandwidth=2000 * GB), 0, 130e9, "float16") == pytest.approx(0.065)
    assert roofline_seconds(a100, 0, 130e9, "float16") == pytest.approx(0.0638, abs=5e-5)
    # The bound of the model itself: all its weights but the input embedding, and two FLOPs for each don't matter.
    config = ModelConfig.preset("llama-2-70b")
    moved, flops = costs.decode_bytes(config, 1, 1, "float16"), costs.decode_flops(config, 1)
    bound = roofline_seconds(a100, flops, moved, "float16")
    assert bound == moved / a100.bandwidth == pytest.approx(0.0674, abs=5e-5)
    assert flops / a100.peak("float16") < bound / 100
    # It does not fit on one such chip. On two that share the matrices, each reads half.
    assert costs.weight_bytes(config, "float16") > a100.memory_bytes
    assert bound / 2 == pytest.approx(0.0337, abs=5e-5)
    # 12 channels of DDR5-4800 have 460.8 GB/s: two sockets still fall short of 1050.
    assert 2 * Hardware.preset("epyc-9654").bandwidth < 1050 * GB < 3 * Hardware.preset("epyc-9654").bandwidth


def test_claim_10_key_and_value_are_a_sixth_of_the_work():
    """K and V of a token cost 1/6 of its forward pass. Exact for 12·L·C² models less scores and head; with GQA far less."""

    def kv_flops(config: ModelConfig) -> int:
        return config.n_layers * 2 * (2 * config.d_model * config.n_kv_heads * config.d_head)  # two matrices, 2 FLOPs each

    for name in ("gpt3-175b", "opt-13b"):
        config = ModelConfig.preset(name)
        assert kv_flops(config) == 4 * config.n_layers * config.d_model**2
        assert 6 * kv_flops(config) == 2 * layer_matrices(config) == 24 * config.n_layers * config.d_model**2
        # Scores and head only make the share smaller.
        assert kv_flops(config) / costs.decode_flops(config, 2048) < 1 / 6
    assert kv_flops(PRESETS["gpt3-175b"]) / costs.decode_flops(PRESETS["gpt3-175b"], 2048) == pytest.approx(0.1616, abs=5e-5)
    one_in = {name: 2 * layer_matrices(PRESETS[name]) / kv_flops(PRESETS[name]) for name in PRESETS}
    assert one_in["llama-2-7b"] == 6.03125
    assert (one_in["llama-2-70b"], one_in["mistral-7b"], one_in["smollm2-135m"]) == (51, 26, 16)


def test_claim_12_kv_bytes_per_token():
    """2·L·H·D·bytes a token, 2 GB for Llama-2-7B at 4096. Exactly 2 GiB; where heads are shared it is K, not H."""
    llama = ModelConfig.preset("llama-2-7b")
    assert costs.kv_cache_bytes(llama, 1, 4096, "float16") == 1 * 4096 * 2 * 32 * 4096 * 2 == 2_147_483_648 == 2 * GiB
    for config in PRESETS.values():
        claimed = 2 * config.n_layers * config.n_heads * config.d_head * 2
        assert claimed == costs.kv_bytes_per_token(config, "float16") * config.n_heads // config.n_kv_heads
    assert costs.kv_cache_bytes(ModelConfig.preset("mistral-7b"), 1, 4096, "float16") == GiB // 2


def test_claim_13_bytes_per_token_of_opt_13b():
    """2 × 5120 × 20 layers × 2 bytes = 400 kB; 8000 tokens 3.2 GB. An erratum: OPT-13B has 40 layers, so it is double."""
    opt = ModelConfig.preset("opt-13b")
    assert (opt.n_layers, opt.d_model) == (40, 5120)
    claimed = 2 * 5120 * 20 * 2
    assert claimed == 409_600 == 400 * 1024
    assert round(8000 * claimed / GB, 2) == 3.28
    assert costs.kv_bytes_per_token(opt, "float16") == 819_200 == 800 * 1024 == 2 * claimed  # the vLLM paper's 800 KB
    assert round(costs.kv_cache_bytes(opt, 1, 8000, "float16") / GB, 2) == 6.55


def test_claim_14_weights_take_65_percent():
    """Weights 65%, cache 30% of serving memory. True of 13B on 40 GB, where the vLLM paper found it; not of other pairs."""
    opt, a100 = ModelConfig.preset("opt-13b"), Hardware.preset("a100-40gb")
    assert 13e9 * 2 / a100.memory_bytes == pytest.approx(0.65)
    weights = costs.weight_bytes(opt, "float16")
    assert weights / a100.memory_bytes == pytest.approx(0.643, abs=5e-4)
    assert (a100.memory_bytes - weights) / GB == pytest.approx(14.3, abs=0.05)
    assert costs.max_batch_size(opt, 2048, a100.memory_bytes, "float16") == 8
    # 30% of the memory is 12 GB: fourteen and a half thousand tokens.
    assert 0.30 * a100.memory_bytes // costs.kv_bytes_per_token(opt, "float16") == 14648
    other = costs.weight_bytes(ModelConfig.preset("llama-3-8b"), "float16") / Hardware.preset("h200").memory_bytes
    assert other == pytest.approx(0.114, abs=5e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_claim_15_the_cache_grows_linearly(name):
    """The cache grows linearly with batch and sequence length. Exactly, for a cache that is not shared or cut off."""
    config = ModelConfig.preset(name)
    for batch in (1, 2, 7, 64):
        for seq_len in (1, 2, 1000, 2048):
            assert costs.kv_cache_bytes(config, batch, seq_len, "fp16") == batch * seq_len * costs.kv_bytes_per_token(config, "fp16")
    assert costs.kv_cache_bytes(config, 0, 9, "fp16") == costs.kv_cache_bytes(config, 9, 0, "fp16") == 0


def test_claim_37_flops_grew_faster_than_memory():
    """A100 to H100: FLOPs more than double, memory stays at 80 GB. True; bandwidth grew 1.64 times, so the ridge moved from 153 to 295."""
    a100, h100 = Hardware.preset("a100-80gb"), Hardware.preset("h100")
    assert (a100.peak("bfloat16"), h100.peak("bfloat16")) == (312e12, 989.5e12)
    assert h100.peak("bfloat16") / a100.peak("bfloat16") == pytest.approx(3.17, abs=5e-3)
    assert a100.memory_bytes == h100.memory_bytes == 80 * GB
    assert h100.bandwidth / a100.bandwidth == pytest.approx(1.64, abs=5e-3)
    assert (round(a100.ridge_point("bfloat16")), round(h100.ridge_point("bfloat16"))) == (153, 295)
