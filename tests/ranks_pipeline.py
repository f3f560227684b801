"""Checks of pipeline parallelism against one process: a stage a rank, of 4 ranks two a stage."""

import os
import random
from pathlib import Path

import torch
from models import lively, save_folder

from minillm import (
    Engine,
    EngineConfig,
    KVCache,
    ModelDrafter,
    Sampling,
    generate,
    pipeline_parallel,
    speculative_generate,
)
from minillm.parallel.loading import load_pipeline
from minillm.parallel.serving import shared_engine

PROMPT = [5, 90, 3, 3, 41, 8, 13]


def check_logits() -> None:
    tokens = torch.tensor([PROMPT, PROMPT[::-1], [1] * 7, [*PROMPT[1:], 4], [9, 8, 7, 6, 5, 4, 3]])
    g = random.Random(0)
    drawn = [
        {"n_layers": g.randint(3, 9), "d_ff": g.randint(8, 90), "vocab_size": g.randint(95, 130),
         "tie_embeddings": g.random() < 0.5, "qk_norm": g.random() < 0.5}
        for _ in range(4)
    ]  # fmt: skip
    for changes in ({"n_layers": 5}, {"n_layers": 7}, *drawn):
        model = lively(seed=3, **changes)
        with torch.inference_mode():
            expected = model(tokens)
        for m in (1, 2, 4, 5):
            stage = pipeline_parallel(model, n_microbatches=m)
            logits = stage.forward(tokens)
            last = stage.group.rank == stage.group.size - 1
            assert (logits is not None) == last
            if last:
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            assert [span.microbatch for span in stage.spans] == list(range(m))
            assert all(span.end > span.start > 0 for span in stage.spans)
            sent = 0 if last else tokens.numel() * model.config.d_model * 4
            assert stage.group.sent["send"] == sent  # micro-batches change nothing in all


def check_tokens() -> None:
    model = lively(seed=3, n_layers=5)
    stage = pipeline_parallel(model, n_microbatches=1)
    part = stage.model
    assert KVCache(part, 1, 9).nbytes < KVCache(model, 1, 9).nbytes
    for sampling in (None, Sampling(0.8, top_p=0.9, seed=1)):
        expected = generate(model, PROMPT, 20, sampling=sampling)
        assert generate(part, PROMPT, 20, sampling=sampling) == expected
        config = EngineConfig(n_blocks=40, block_size=4, max_batch_tokens=9, max_seqs=3)
        engine = Engine(part, config)
        numbers = [engine.submit(PROMPT[: 3 + i], 12, sampling=sampling) for i in range(4)]
        done = engine.run()
        for i, number in enumerate(numbers):
            assert done[number].tokens == generate(model, PROMPT[: 3 + i], 12, sampling=sampling)
    drafter = ModelDrafter(lively(seed=5, n_layers=1))
    result = speculative_generate(part, drafter, PROMPT, 20, k=3)
    assert result.tokens == generate(model, PROMPT, 20)


def check_generate() -> None:
    """Several sequences at once, in micro-batches that each have a cache."""
    prompts = torch.tensor([PROMPT, PROMPT[::-1], [1] * 7, [*PROMPT[1:], 4], [9, 8, 7, 6, 5, 4, 3]])
    model = lively(seed=3, n_layers=5)
    expected = [generate(model, prompt, 9) for prompt in prompts.tolist()]
    for m in (1, 2, 5):
        stage = pipeline_parallel(model, n_microbatches=m)
        assert stage.generate(prompts, 9).tolist() == expected
        assert len(stage.spans) == 9 * m
        assert stage.generate(prompts, 1).tolist() == [tokens[:1] for tokens in expected]


def check_rank_0_schedules() -> None:
    model = lively(seed=3, n_layers=5)
    stage = pipeline_parallel(model, n_microbatches=1)
    engine = shared_engine(stage.model, EngineConfig(n_blocks=40, block_size=4))
    if engine is not None:
        with engine:
            numbers = [engine.submit(PROMPT[: 3 + i], 12) for i in range(4)]
            done = engine.run()
        for i, number in enumerate(numbers):
            assert done[number].tokens == generate(model, PROMPT[: 3 + i], 12)


def check_loading() -> None:
    model = lively(seed=3, n_layers=5, tie_embeddings=True)
    folder = Path(os.environ["MINILLM_TEST_FOLDER"]) / "model"
    if os.environ["RANK"] == "0":
        save_folder(model, folder)
    expected = pipeline_parallel(model, n_microbatches=1)
    stage, _ = load_pipeline(folder, n_microbatches=1, dtype="float32")
    assert generate(stage.model, PROMPT, 5) == generate(expected.model, PROMPT, 5)
    held = sum(p.numel() for p in stage.model.parameters())
    assert held < 0.6 * sum(p.numel() for p in model.parameters())


def check_stages_of_two_ranks() -> None:
    """Two stages of two ranks."""
    tokens = torch.tensor([PROMPT, PROMPT[::-1], [1] * 7])
    folder = Path(os.environ["MINILLM_TEST_FOLDER"]) / "stages"
    for changes in ({}, {"tie_embeddings": True, "attn_out_bias": True, "qkv_bias": True}):
        model = lively(seed=3, n_layers=5, **changes)
        if os.environ["RANK"] == "0":
            save_folder(model, folder)
        with torch.inference_mode():
            logits = model(tokens)
        expected = [generate(model, prompt, 9) for prompt in tokens.tolist()]
        for sequence_parallel in (False, True):
            options = {"n_microbatches": 2, "tp": 2, "sequence_parallel": sequence_parallel}
            stage = pipeline_parallel(model, **options)
            read, _ = load_pipeline(folder, dtype="float32", **options)
            numbers = dict(stage.model.named_parameters())
            for name, parameter in read.model.named_parameters():
                assert torch.equal(parameter, numbers[name]), name
            for each in (stage, read):
                found = each.forward(tokens)
                assert (found is not None) == (int(os.environ["RANK"]) >= 2)
                if found is not None:
                    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
                assert each.generate(tokens, 9).tolist() == expected
                assert generate(each.model, PROMPT, 9) == expected[0]
        engine = shared_engine(stage.model, EngineConfig(n_blocks=40, block_size=4))
        if engine is not None:
            with engine:
                number = engine.submit(PROMPT, 9)
                assert engine.run()[number].tokens == expected[0]


def die(p: int) -> None:
    stage = pipeline_parallel(lively(n_layers=3), n_microbatches=1)
    if os.environ["RANK"] == "1":
        os._exit(7)
    stage.forward(torch.tensor([PROMPT]))
    stage.generate(torch.tensor([PROMPT]), 4)


def check_all(p: int) -> None:
    if p == 4:
        check_stages_of_two_ranks()
        return
    for check in (
        check_logits, check_tokens, check_generate, check_rank_0_schedules, check_loading
    ):  # fmt: skip
        check()
