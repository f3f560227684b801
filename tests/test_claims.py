"""The arithmetic claims of the source articles that the lessons examine, each with its verdict.

The numbers are those of the lessons.
"""

import random
from dataclasses import replace

import pytest
import torch
from models import lively, tiny_config

from minillm import (
    Decoder,
    Engine,
    EngineConfig,
    Hardware,
    ModelConfig,
    Sampling,
    costs,
    distill,
    generate,
    make_student,
)  # fmt: skip
from minillm.blocks import BlockManager
from minillm.config import PRESETS
from minillm.evaluate import difference
from minillm.fragmentation import simulate
from minillm.hardware import roofline_seconds
from minillm.layers.per_token import rms_norm
from minillm.parallel.plan import Plan, bubble_share, part
from minillm.parallel.step_time import Cluster, decode_time
from minillm.quantization.sparsity import compress, mask_2_4
from minillm.serving.virtual_time import VirtualClock, step_seconds
from minillm.serving.workload import AZURE_OUTPUT, AZURE_PROMPT, draw_length
from minillm.speculation.formulas import speedup, tokens_per_pass

GB, GiB = 10**9, 2**30


def layer_matrices(config: ModelConfig) -> int:
    """Parameters of the attention and feed-forward matrices, without biases."""
    parts = costs.param_breakdown(
        replace(config, qkv_bias=False, attn_out_bias=False, mlp_bias=False)
    )
    return parts["attention"] + parts["mlp"]


def test_claim_01_twelve_layers_width_squared():
    """P = 12·L·C².

    Exact for the matrices of GPT-3 and OPT; elsewhere an estimate, and right by luck if it is
    right.
    """

    def rule(name: str) -> int:
        return 12 * PRESETS[name].n_layers * PRESETS[name].d_model ** 2

    for name in ("gpt3-175b", "opt-13b"):
        assert rule(name) == layer_matrices(PRESETS[name])
    # Of the layers' matrices: SwiGLU's 3CF and fewer key/value heads move it either way.
    of_matrices = {name: rule(name) / layer_matrices(PRESETS[name]) for name in PRESETS}
    # 3 · 11008 is 8.06 C, not 8 C.
    assert of_matrices["llama-2-7b"] == pytest.approx(0.995, abs=5e-4)
    assert of_matrices["llama-2-70b"] == pytest.approx(16 / 17)
    assert of_matrices["mistral-7b"] == pytest.approx(12 / 13)
    assert of_matrices["smollm2-135m"] == 9 / 8
    # Of all parameters, embeddings included.
    of_all = {name: rule(name) / costs.param_count(PRESETS[name]) for name in PRESETS}
    published = {
        "gpt3-175b": 0.996, "opt-13b": 0.979, "llama-2-7b": 0.956, "llama-2-70b": 0.934,
        "mistral-7b": 0.890, "llama-3-8b": 0.802, "smollm2-135m": 0.888, "qwen3-0.6b": 0.591,
    }  # fmt: skip
    assert of_all == pytest.approx(published, abs=5e-4)


def test_claim_02_seven_billion_parameters_are_14_gb():
    """7B parameters in 16 bits are about 14 GB.

    True to 4%: Llama-2-7B is smaller than its name, Mistral-7B larger.
    """
    llama, mistral = (
        costs.weight_bytes(ModelConfig.preset(name), "float16")
        for name in ("llama-2-7b", "mistral-7b")
    )
    assert (llama, mistral) == (2 * 6_738_415_616, 2 * 7_241_732_096)
    assert (round(llama / GB, 2), round(mistral / GB, 2)) == (13.48, 14.48)
    assert all(abs(size / (14 * GB) - 1) < 0.04 for size in (llama, mistral))
    # In the GiB that nvidia-smi shows, neither is 14.
    assert (round(llama / GiB, 2), round(mistral / GiB, 2)) == (12.55, 13.49)


def test_claim_03_llama_2_70b_is_130_gb():
    """Llama-2-70B is 130 GB, 2 × A100-80GB hold it.

    138 GB, or 128.5 GiB; two hold it with room for 16 sequences, four for 135.
    """
    config, memory = ModelConfig.preset("llama-2-70b"), Hardware.preset("a100-80gb").memory_bytes
    weights = costs.weight_bytes(config, "float16")
    assert round(weights / GB, 2) == 137.95
    assert round(weights / GiB, 1) == 128.5
    assert memory < weights < 2 * memory
    # What is left for cache, activations and everything else.
    assert round((2 * memory - weights) / GB, 1) == 22.0
    assert costs.max_batch_size(config, 4096, 2 * memory, "float16") == 16
    assert costs.max_batch_size(config, 4096, 4 * memory, "float16") == 135
    # Without shared key/value heads, two would hold two sequences.
    per_token = costs.kv_bytes_per_token(config, "float16")
    assert costs.kv_bytes_per_token(replace(config, n_kv_heads=64), "float16") == 8 * per_token
    assert (2 * memory - weights) // (8 * costs.kv_cache_bytes(config, 1, 4096, "float16")) == 2


def test_claim_04_bytes_per_parameter():
    """4 bytes a parameter in fp32, 2 in fp16, 1 in int8.

    Exact for the numbers; scales and zero points come on top.
    """
    for config in PRESETS.values():
        n = costs.param_count(config)
        for dtype, n_bytes in (("fp32", 4), ("fp16", 2), ("int8", 1)):
            assert costs.weight_bytes(config, dtype) == n_bytes * n
        assert costs.weight_bytes(config, "int4") == (n + 1) // 2
    # A float16 scale for every 32 int8 numbers (GGUF's Q8_0) makes it 8.5 bits, 6.25% more.
    assert (32 * costs.dtype_bits("int8") + costs.dtype_bits("fp16")) / 32 == 8.5


def test_claim_08_loading_130_gb_bounds_the_latency():
    """130 GB at 2000 GB/s bounds a token to 65 ms; CPUs have 1050 GB/s.

    True as arithmetic; but no such chip or CPU is here.
    """
    a100 = Hardware.preset("a100-80gb")
    assert a100.bandwidth == 2039 * GB
    claimed = replace(a100, bandwidth=2000 * GB)
    assert roofline_seconds(claimed, 0, 130e9, "float16") == pytest.approx(0.065)
    assert roofline_seconds(a100, 0, 130e9, "float16") == pytest.approx(0.0638, abs=5e-5)
    # The bound of the model itself: all its weights but the input embedding. Two FLOPs for each
    # don't matter.
    config = ModelConfig.preset("llama-2-70b")
    moved, flops = costs.decode_bytes(config, 1, 1, "float16"), costs.decode_flops(config, 1)
    bound = roofline_seconds(a100, flops, moved, "float16")
    assert bound == moved / a100.bandwidth == pytest.approx(0.0674, abs=5e-5)
    assert flops / a100.peak("float16") < bound / 100
    # It does not fit on one such chip. On two that share the matrices, each reads half.
    assert costs.weight_bytes(config, "float16") > a100.memory_bytes
    assert bound / 2 == pytest.approx(0.0337, abs=5e-5)
    # 12 channels of DDR5-4800 have 460.8 GB/s: two sockets still fall short of 1050.
    socket = Hardware.preset("epyc-9654").bandwidth
    assert 2 * socket < 1050 * GB < 3 * socket


def test_claim_10_key_and_value_are_a_sixth_of_the_work():
    """K and V of a token cost 1/6 of its forward pass.

    Exact for 12·L·C² models less scores and head; with GQA far less.
    """

    def kv_flops(config: ModelConfig) -> int:
        parameters = 2 * config.d_model * config.n_kv_heads * config.d_head  # two matrices
        return config.n_layers * 2 * parameters

    for name in ("gpt3-175b", "opt-13b"):
        config = ModelConfig.preset(name)
        assert kv_flops(config) == 4 * config.n_layers * config.d_model**2
        assert 6 * kv_flops(config) == 2 * layer_matrices(config)
        assert 6 * kv_flops(config) == 24 * config.n_layers * config.d_model**2
        # Scores and head only make the share smaller.
        assert kv_flops(config) / costs.decode_flops(config, 2048) < 1 / 6
    gpt3 = PRESETS["gpt3-175b"]
    share = kv_flops(gpt3) / costs.decode_flops(gpt3, 2048)
    assert share == pytest.approx(0.1616, abs=5e-5)
    one_in = {name: 2 * layer_matrices(PRESETS[name]) / kv_flops(PRESETS[name]) for name in PRESETS}
    assert one_in["llama-2-7b"] == 6.03125
    assert (one_in["llama-2-70b"], one_in["mistral-7b"], one_in["smollm2-135m"]) == (51, 26, 16)


def test_claim_12_kv_bytes_per_token():
    """2·L·H·D·bytes a token, 2 GB for Llama-2-7B at 4096.

    Exactly 2 GiB; where heads are shared it is K, not H.
    """
    llama = ModelConfig.preset("llama-2-7b")
    n_bytes = costs.kv_cache_bytes(llama, 1, 4096, "float16")
    assert n_bytes == 1 * 4096 * 2 * 32 * 4096 * 2 == 2_147_483_648 == 2 * GiB
    for config in PRESETS.values():
        claimed = 2 * config.n_layers * config.n_heads * config.d_head * 2
        per_token = costs.kv_bytes_per_token(config, "float16")
        assert claimed == per_token * config.n_heads // config.n_kv_heads
    assert costs.kv_cache_bytes(ModelConfig.preset("mistral-7b"), 1, 4096, "float16") == GiB // 2


def test_claim_13_bytes_per_token_of_opt_13b():
    """2 × 5120 × 20 layers × 2 bytes = 400 kB; 8000 tokens 3.2 GB.

    An erratum: OPT-13B has 40 layers, so it is double, the vLLM paper's 800 KB.
    """
    opt = ModelConfig.preset("opt-13b")
    assert (opt.n_layers, opt.d_model) == (40, 5120)
    claimed = 2 * 5120 * 20 * 2
    assert claimed == 409_600 == 400 * 1024
    assert round(8000 * claimed / GB, 2) == 3.28
    assert costs.kv_bytes_per_token(opt, "float16") == 819_200 == 800 * 1024 == 2 * claimed
    assert round(costs.kv_cache_bytes(opt, 1, 8000, "float16") / GB, 2) == 6.55


def test_claim_14_weights_take_65_percent():
    """Weights 65%, cache 30% of serving memory.

    True of 13B on 40 GB, where the vLLM paper found it; not of other pairs.
    """
    opt, a100 = ModelConfig.preset("opt-13b"), Hardware.preset("a100-40gb")
    assert 13e9 * 2 / a100.memory_bytes == pytest.approx(0.65)
    weights = costs.weight_bytes(opt, "float16")
    assert weights / a100.memory_bytes == pytest.approx(0.643, abs=5e-4)
    assert (a100.memory_bytes - weights) / GB == pytest.approx(14.3, abs=0.05)
    assert costs.max_batch_size(opt, 2048, a100.memory_bytes, "float16") == 8
    # 30% of the memory is 12 GB: fourteen and a half thousand tokens.
    assert 0.30 * a100.memory_bytes // costs.kv_bytes_per_token(opt, "float16") == 14648
    other = costs.weight_bytes(ModelConfig.preset("llama-3-8b"), "float16")
    assert other / Hardware.preset("h200").memory_bytes == pytest.approx(0.114, abs=5e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_claim_15_the_cache_grows_linearly(name):
    """The cache grows linearly with batch and sequence length.

    Exactly, for a cache that is not shared or cut off.
    """
    config = ModelConfig.preset(name)
    per_token = costs.kv_bytes_per_token(config, "fp16")
    for batch in (0, 1, 2, 7, 64):
        for seq_len in (0, 1, 2, 1000, 2048):
            n_bytes = costs.kv_cache_bytes(config, batch, seq_len, "fp16")
            assert n_bytes == batch * seq_len * per_token


def azure_trace(n: int) -> list[tuple[int, int]]:
    generator = random.Random(0)
    return [
        tuple(draw_length(lengths, generator) for lengths in (AZURE_PROMPT, AZURE_OUTPUT))
        for _ in range(n)
    ]


def test_claim_21_a_fifth_to_three_eighths_of_the_reserved_cache_was_used():
    """20–38% of the reserved cache held tokens.

    So it is when the reservation is 1.0 to 1.5 times the longest; at 1.7 times 18%, paging 98%.
    """
    longest = AZURE_PROMPT[-1][1] + AZURE_OUTPUT[-1][1]

    def used(policy: str, max_len: int) -> float:
        samples = simulate(azure_trace(300), policy, n_slots=1 << 17, max_len=max_len, n_steps=300)
        return sum(s.used for s in samples) / sum(s.used + s.reserved + s.internal for s in samples)

    shares = [used("max", n) for n in (longest, 5120, 7100, 8192)]
    assert shares == pytest.approx([0.33, 0.30, 0.21, 0.18], abs=0.01)
    assert used("paged", longest) > 0.98


def test_claim_22_paging_wastes_less_than_a_block_a_sequence():
    """No external fragments, and at most P - 1 slots a sequence inside.

    Exactly; half a block on average.
    """
    sizes = dict(n_slots=1 << 17, max_len=5120, n_steps=300)
    samples = simulate(azure_trace(300), "paged", block_size=16, **sizes)
    assert all(s.external == s.reserved == 0 and s.internal <= 15 * s.running for s in samples)
    mean = sum(s.internal for s in samples) / sum(s.running for s in samples)
    assert mean == pytest.approx(7.5, abs=0.5)
    others = simulate(azure_trace(300), "oracle", **sizes)
    # Even when every length is known ahead.
    assert sum(s.external for s in others) / len(others) > 0.05 * (1 << 17)
    # Of OPT-13B at most 15 · 800 KiB, 12 MB: what 15 tokens take, whatever the sequence's length.
    assert 15 * costs.kv_bytes_per_token(PRESETS["opt-13b"], "float16") == 12_288_000


def test_claim_23_samples_share_the_blocks_of_their_prompt():
    """Parallel samples share their prompt's blocks.

    All that are full. Four answers of 100 tokens to a prompt of 1000 take 90 blocks, not 276.
    """

    def blocks(n_prompt: int, n_new: int, n_samples: int) -> int:
        manager = BlockManager(1000, 16, prefix_caching=False)
        first = manager.start([0] * n_prompt)
        manager.reserve(first, n_prompt)
        first.n_tokens = n_prompt
        for table in [first, *(manager.fork(first) for _ in range(n_samples - 1))]:
            for _ in range(n_new):
                manager.reserve(table, 1)
                table.n_tokens += 1
        return 1000 - manager.n_available

    assert (blocks(1000, 100, 4), 4 * blocks(1000, 100, 1)) == (62 + 4 * 7, 276)
    for n_prompt, n_new, n in ((16, 16, 3), (17, 1, 5), (160, 40, 2), (1, 33, 8)):
        shared = n_prompt // 16
        assert blocks(n_prompt, n_new, n) == shared + n * (-(-(n_prompt + n_new) // 16) - shared)


def test_claim_25_latency_is_ttft_and_the_steps_after_it():
    """TTFT = queue + prefill + one decode, latency = TTFT + TPOT · tokens.

    Off by one: the prefill gives the first token.
    """
    a100, llama = Hardware.preset("a100-80gb"), ModelConfig.preset("llama-2-7b")
    clock = VirtualClock(llama, a100)
    tiny = Decoder(tiny_config(max_seq_len=64))
    engine = Engine(tiny, EngineConfig(n_blocks=9, max_seqs=1, prefix_caching=False), clock=clock)
    for _ in range(2):
        engine.submit([1] * 40, 11)
    first, second = engine.run().values()
    prefill = step_seconds(llama, a100, 40, 0, 40, "float16")
    decodes = [step_seconds(llama, a100, 0, 1, 40 + i, "float16") for i in range(1, 11)]
    assert first.ttft == pytest.approx(prefill)
    assert second.ttft == pytest.approx(first.latency + prefill)
    assert first.latency == pytest.approx(prefill + sum(decodes))
    assert first.latency == pytest.approx(first.ttft + first.tpot * 10)


def test_claim_4_and_27_bytes_a_parameter():
    """1 byte in int8: true up to 1%, for its scales. 4 bits in groups of 32 are 5, and a head.

    So 80 GB hold Llama-2-70B in int8 and in int4, and in 16 bits they don't; 48 GB in int4.
    """
    for name in ("llama-2-7b", "llama-2-70b", "smollm2-135m"):
        c = ModelConfig.preset(name)
        n, rows = costs.param_count(c), c.vocab_size * c.d_model
        untied = 0 if c.tie_embeddings else rows  # an embedding of its own stays in 16 bits
        assert n < costs.quantized_bytes(c, "int8") - untied < 1.01 * n
        in_layers = n - rows - untied
        assert costs.quantized_bytes(c, "int4") == pytest.approx(
            in_layers * 5 / 8 + rows + 2 * untied, rel=2e-3
        )
    large = ModelConfig.preset("llama-2-70b")
    assert costs.weight_bytes(large, "float16") > 80 * GB > costs.quantized_bytes(large, "int8")
    assert costs.quantized_bytes(large, "int4") < 48 * GB


def test_claim_30_the_indices_count():
    """2:4 takes 56.25% of 16-bit bytes and 62.5% of 8-bit ones, not half."""
    mask = mask_2_4(torch.randn(64, 256))
    for dtype, share in ((torch.bfloat16, 0.5625), (torch.int8, 0.625)):
        dense = torch.ones(64, 256, dtype=dtype)
        assert compress(dense, mask).nbytes == share * dense.nbytes


@pytest.mark.slow
def test_claim_31_soft_targets_ground_truth_and_states():
    """Soft targets, the text, and states besides: each brings a student nearer to its teacher.

    On a tiny model; lesson 11 has the kinds beside each other on the real one.
    """
    teacher = lively(n_layers=3, vocab_size=31)
    tokens = [sampled(teacher, 24, seed) for seed in range(40)]
    exam = [i for seed in range(900, 904) for i in sampled(teacher, 24, seed)[0].tolist()]
    far = difference(make_student(teacher, 1), teacher, exam).kl
    for text_weight, states in ((0.0, 0.0), (1.0, 0.0), (0.5, 1.0)):
        options = {"text_weight": text_weight, "states": states}
        student = make_student(teacher, 1)
        distill(teacher, student, tokens, temperature=1.0, lr=0.02, **options)
        assert difference(student, teacher, exam).kl < 0.8 * far


def sampled(model: Decoder, n: int, seed: int) -> torch.Tensor:
    """A text (1, n) that the model wrote."""
    return torch.tensor([[1, *generate(model, [1], n - 1, sampling=Sampling(seed=seed))]])


def test_claim_32_what_a_round_of_guesses_yields():
    """(1 - α^(k+1)) / (1 - α) tokens a pass; slower than plain decoding where c·k + 1 is more."""
    stream = random.Random(0)
    for alpha, k in ((0.5, 2), (0.8, 4)):
        total = 0
        for _ in range(20_000):
            right = 0
            while right < k and stream.random() < alpha:
                right += 1
            total += right + 1
        assert total / 20_000 == pytest.approx(tokens_per_pass(alpha, k), rel=0.02)
    assert speedup(0.5, 2, 0.1) > 1 > speedup(0.5, 2, 0.5)


def test_claim_33_bubbles_shrink_and_stay():
    """Idle (p - 1) / (m + p - 1): replayed stage by stage. On four stages each holds a quarter."""
    for p, m in ((2, 1), (4, 1), (4, 4), (4, 8), (8, 32)):
        done = [[0] * m for _ in range(p)]  # when a stage, of one second, has done a micro-batch
        for stage in range(p):
            for i in range(m):
                given = done[stage - 1][i] if stage else 0
                done[stage][i] = max(given, done[stage][i - 1] if i else 0) + 1
        assert 1 - m / done[-1][-1] == pytest.approx(bubble_share(p, m))
    assert bubble_share(4, 1) > bubble_share(4, 8) > bubble_share(4, 1000) > 0
    big = ModelConfig.preset("llama-2-70b")
    assert [len(part(big.n_layers, 4, rank)) for rank in range(4)] == [big.n_layers // 4] * 4


def test_claim_34_columns_then_rows_need_one_sum():
    """A by columns and B by rows: the parts add up. A by rows: they don't, unless summed before."""
    torch.manual_seed(0)
    x, A, B = torch.randn(3, 8), torch.randn(8, 12), torch.randn(12, 5)
    halves = [(x @ A[:, s]).relu() @ B[s] for s in (slice(0, 6), slice(6, 12))]
    torch.testing.assert_close(sum(halves), (x @ A).relu() @ B)
    wrong = sum((x[:, s] @ A[s]).relu() @ B for s in (slice(0, 4), slice(4, 8)))
    assert not torch.allclose(wrong, (x @ A).relu() @ B)
    big = ModelConfig.preset("llama-2-70b")
    plan = Plan(big, 2, 0)
    assert (len(plan.heads), len(plan.kv_heads), len(plan.mlp)) == (32, 4, big.d_ff // 2)


def test_claim_35_a_norm_looks_at_one_token():
    """So it can be computed on a part of the sequence. The sums go over the wire as before."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 12, 8), torch.rand(8)
    parts = [rms_norm(piece, weight, 1e-5) for piece in x.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), rms_norm(x, weight, 1e-5))
    cluster = Cluster(Hardware.preset("h100"))
    whole, half = (cluster.ring(8, 1e9, rounds)[1] for rounds in (2, 1))
    assert whole == 2 * half  # an all-reduce is a reduce-scatter and an all-gather


def test_claim_36_replicas_speed_up_no_answer():
    """Twice the GPUs as a second replica: the time to a token stays. As slices: it falls."""
    cluster, big = Cluster(Hardware.preset("h100")), ModelConfig.preset("llama-2-70b")
    step = {"batch_size": 1, "context_len": 1000, "dtype": "bfloat16"}
    four, eight = (decode_time(big, cluster, tp=tp, **step).total for tp in (4, 8))
    assert eight < 0.7 * four  # two replicas of four ranks would stay at `four`


def test_claim_37_flops_grew_faster_than_memory():
    """A100 to H100: FLOPs more than double, memory stays at 80 GB.

    True; bandwidth grew 1.64 times, so the ridge moved from 153 to 295.
    """
    a100, h100 = Hardware.preset("a100-80gb"), Hardware.preset("h100")
    assert (a100.peak("bfloat16"), h100.peak("bfloat16")) == (312e12, 989.5e12)
    assert h100.peak("bfloat16") / a100.peak("bfloat16") == pytest.approx(3.17, abs=5e-3)
    assert a100.memory_bytes == h100.memory_bytes == 80 * GB
    assert h100.bandwidth / a100.bandwidth == pytest.approx(1.64, abs=5e-3)
    assert (round(a100.ridge_point("bfloat16")), round(h100.ridge_point("bfloat16"))) == (153, 295)
