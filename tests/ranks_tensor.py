"""Checks of tensor parallelism on as many ranks as there are, against one process."""

import math
import os
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from models import lively, save_folder

from minillm import (
    Decoder,
    Engine,
    EngineConfig,
    KVCache,
    ModelDrafter,
    Sampling,
    generate,
    model_bytes,
    quantize,
    speculative_generate,
    tensor_parallel,
)
from minillm.costs import weight_bytes
from minillm.parallel.loading import load_tensor_parallel
from minillm.parallel.serving import shared_engine
from minillm.weights.safetensors_folder import SafetensorsFolder

PROMPT = [5, 90, 3, 3, 41, 8, 13]
SIZES = {"n_heads": 6, "n_kv_heads": 2, "d_model": 64, "d_ff": 96, "d_head": 32}
VARIANTS = (
    {},
    {"d_ff": 41, "vocab_size": 101},
    {"qkv_bias": True, "attn_out_bias": True, "qk_norm": True},
    {"tie_embeddings": True},
)


def fitting(p: int) -> dict:
    """Heads that p ranks can share, with fewer key/value heads than ranks for p = 4."""
    return SIZES | {2: {}, 3: {"n_kv_heads": 3}, 4: {"n_heads": 8}}[p]


def drawn_config(p: int, seed: int) -> dict:
    """Sizes and switches by chance, of a model that p ranks can share."""
    g = random.Random(seed)
    K = g.choice([k for k in (1, 2, 3, 4, 6, 8) if k % p == 0 or p % k == 0])
    return {
        "n_kv_heads": K, "n_heads": math.lcm(K, p) * g.randint(1, 2), "d_head": g.choice((8, 16)),
        "d_model": g.choice((24, 40, 64)), "d_ff": g.randint(p, 90), "n_layers": g.randint(1, 4),
        "vocab_size": g.randint(95, 130), "tie_embeddings": g.random() < 0.5,
        "qkv_bias": g.random() < 0.5, "attn_out_bias": g.random() < 0.5,
        "qk_norm": g.random() < 0.5,
    }  # fmt: skip


def check_logits(p: int) -> None:
    tokens = torch.tensor([PROMPT, PROMPT[::-1]])
    configs = [fitting(p) | changes for changes in VARIANTS]
    configs.append(fitting(p) | {"n_kv_heads": fitting(p)["n_heads"]})
    for config in configs + [drawn_config(p, seed) for seed in range(4)]:
        model = lively(seed=3, size=0.1, **config)
        for sequence_parallel in (False, True):
            sharded = tensor_parallel(model, sequence_parallel=sequence_parallel)
            with torch.inference_mode():
                torch.testing.assert_close(sharded(tokens), model(tokens), atol=1e-4, rtol=1e-4)
                cache = KVCache(sharded, 2, 20)  # a few tokens at a time, also fewer than ranks
                parts = [sharded(part, cache) for part in tokens.split((6, 1), 1)]
                torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-4, rtol=1e-4)


def check_tokens(p: int) -> None:
    model = lively(seed=3, **fitting(p))
    drawn = Sampling(0.8, top_p=0.9, seed=1)
    for sequence_parallel in (False, True):
        sharded = tensor_parallel(model, sequence_parallel=sequence_parallel)
        for sampling in (None, drawn):
            expected = generate(model, PROMPT, 12, sampling=sampling)
            assert generate(sharded, PROMPT, 12, sampling=sampling) == expected
            engine = Engine(
                sharded, EngineConfig(n_blocks=40, block_size=4, max_batch_tokens=9, max_seqs=3)
            )
            numbers = [engine.submit(PROMPT[: 3 + i], 8, sampling=sampling) for i in range(4)]
            done = engine.run()
            for i, number in enumerate(numbers):
                alone = generate(model, PROMPT[: 3 + i], 8, sampling=sampling)
                assert done[number].tokens == alone
        drafter = ModelDrafter(lively(seed=5, n_layers=1))
        result = speculative_generate(sharded, drafter, PROMPT, 12, k=3)
        assert result.tokens == generate(model, PROMPT, 12)


def check_rank_0_schedules(p: int) -> None:
    """Requests, their number and the drafter are known to rank 0 alone."""
    model = lively(seed=3, **fitting(p))
    sharded = tensor_parallel(model)
    drawn = Sampling(0.8, top_p=0.9, seed=1)
    sizes = {"n_blocks": 11, "block_size": 4, "max_batch_tokens": 9, "max_seqs": 3}
    for kv_dtype, drafter in ((None, None), (None, ModelDrafter(model)), ("int8", None)):
        config = EngineConfig(**sizes, kv_dtype=kv_dtype, drafter=drafter, k=2)
        engine = shared_engine(sharded, config)
        assert (engine is None) == (sharded.group.rank > 0)
        if engine is None:
            continue
        with engine:
            alone = Engine(model, config)
            for each in (engine, alone):
                for sampling in (None, drawn):
                    for i in range(4):
                        each.submit(PROMPT[: 3 + i], 12, sampling=sampling)
            done, expected = engine.run(), alone.run()
            assert {i: c.tokens for i, c in done.items()} == {
                i: c.tokens for i, c in expected.items()
            }
            assert engine.scheduler.preemptions  # blocks ran out
            engine.submit(PROMPT, 2)  # and again, later
            assert engine.run()[8].tokens == generate(model, PROMPT, 2) or kv_dtype


def counted(load: Callable, *arguments: object, **options: object) -> tuple[Decoder, int]:
    """What `load` gives, and how many bytes it took out of the folder."""
    n_read, slices = [], SafetensorsFolder.slices

    def counting(self, *given):
        for piece in slices(self, *given):
            n_read.append(piece.nbytes)
            yield piece

    SafetensorsFolder.slices = counting
    part, _ = load(*arguments, **options)
    SafetensorsFolder.slices = slices
    return part, sum(n_read)


def check_memory(p: int) -> None:
    """Of a large folder a rank never holds much more than its part."""
    folder = Path(os.environ["MINILLM_TEST_FOLDER"])
    load_tensor_parallel(folder / "small", dtype="float32")  # the libraries and their threads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, _ = load_tensor_parallel(folder / "large", dtype="float32")
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    share, whole = model_bytes(model), weight_bytes(model.config, "float32")
    assert share < 1.01 * whole / model.group.size
    # pages of the file that are mapped just now, the last tensor's too, and a slice in two forms
    assert peak < share + (64 << 20) + 3 * (16 << 20), f"{peak:,} bytes for {share:,}"
    assert peak < 0.7 * whole
    assert "torch._dynamo" not in sys.modules  # it takes seconds on each rank


def check_loading(p: int) -> None:
    """A rank reads its own part of a folder, and holds what the cut model holds."""
    for changes in ({}, {"tie_embeddings": True}, {"qkv_bias": True, "attn_out_bias": True}):
        model = lively(seed=3, **(fitting(p) | changes))
        folder = Path(os.environ["MINILLM_TEST_FOLDER"]) / f"{p}-{len(changes)}"
        if os.environ["RANK"] == "0":
            save_folder(model, folder)
        for sequence_parallel in (False, True):
            options = {"sequence_parallel": sequence_parallel}
            expected = tensor_parallel(model, **options)  # after it the folder is there
            part, n_read = counted(load_tensor_parallel, folder, dtype="float32", **options)
            assert n_read == sum(p.nbytes for p in part.parameters())
            numbers = dict(expected.named_parameters())
            assert numbers.keys() == dict(part.named_parameters()).keys()
            for name, parameter in part.named_parameters():
                assert torch.equal(parameter, numbers[name]), name
            assert generate(part, PROMPT, 5) == generate(expected, PROMPT, 5)


def check_quantized(p: int) -> None:
    sizes = fitting(p) | {"vocab_size": 48 * p, "tie_embeddings": True, "d_ff": 32 * p}
    for scheme, options in (("int8", {}), ("int4", {"group_size": 32}), ("fp8", {})):
        model = quantize(lively(seed=3, size=0.1, **sizes), scheme, **options)
        sharded = tensor_parallel(model)
        tokens = torch.tensor([PROMPT])
        with torch.inference_mode():
            torch.testing.assert_close(sharded(tokens), model(tokens), atol=0.05, rtol=0.05)


def check_ledger(p: int) -> None:
    """Bytes a pass sends, against the formulas."""
    model = lively(seed=3, **fitting(p))
    c, T = model.config, 12
    tokens = torch.arange(T)[None]
    for sequence_parallel in (False, True):
        sharded = tensor_parallel(model, sequence_parallel=sequence_parallel)
        with torch.inference_mode():
            sharded(tokens)
        n = T * c.d_model * 4
        sums, share = 2 * c.n_layers + 1, (p - 1) / p
        widest = -(-c.vocab_size // p)
        logits = T * widest * 4 * (p - 1)
        sent = sharded.group.sent
        if not sequence_parallel:
            assert sent["all_reduce"] == round(2 * n * share) * sums
            assert sent["all_gather"] == logits and not sent["reduce_scatter"]
        else:
            assert sent["reduce_scatter"] == round(n * share) * sums
            assert sent["all_gather"] == round(n * share) * sums + logits and not sent["all_reduce"]


def check_kept(p: int) -> None:
    """Numbers that lie between the blocks: with a cut sequence 1 / p of them, rounded up."""
    model = lively(seed=3, **fitting(p))
    T, c = 13, model.config
    for sequence_parallel, tokens in ((False, T), (True, -(-T // p))):
        sharded = tensor_parallel(model, sequence_parallel=sequence_parallel)
        kept: list[int] = []
        for layer in sharded.layers:
            layer.register_forward_pre_hook(
                lambda _, given, kept=kept: kept.append(given[0].nbytes)
            )
        with torch.inference_mode():
            sharded(torch.arange(T)[None])
        assert kept == [tokens * c.d_model * 4] * c.n_layers


def differ(p: int) -> None:
    """Every rank with another model."""
    tensor_parallel(lively(n_layers=2 + int(os.environ["RANK"])))


def die(p: int) -> None:
    sharded = tensor_parallel(lively())
    if os.environ["RANK"] == "1":
        os._exit(7)
    sharded(torch.tensor([PROMPT]))


def check_all(p: int) -> None:
    for check in (
        check_logits, check_tokens, check_rank_0_schedules, check_loading, check_quantized,
        check_ledger, check_kept,
    ):  # fmt: skip
        check(p)
