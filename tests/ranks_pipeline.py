"""Run by torchrun: pipeline parallelism on as many ranks as there are, against one process.

torchrun --nproc-per-node 3 tests/ranks_pipeline.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from models import lively

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

PROMPT = [5, 90, 3, 3, 41, 8, 13]


def check_logits() -> None:
    tokens = torch.tensor([PROMPT, PROMPT[::-1], [1] * 7, [*PROMPT[1:], 4], [9, 8, 7, 6, 5, 4, 3]])
    for changes in ({}, {"tie_embeddings": True}, {"n_layers": 7}):
        model = lively(seed=3, **({"n_layers": 5} | changes))
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_logits()
    check_tokens()
    print("all checks passed")
