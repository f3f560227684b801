"""Checks of what PyTorch ships, against one process and against this package's own way."""

import os

import pytest
import torch
from models import lively
from torch.distributed.tensor.debug import CommDebugMode

from minillm import KVCache, generate, pipeline_parallel, quantize, tensor_parallel
from minillm.parallel.plan import Plan
from minillm.parallel.with_pytorch import dtensor_parallel, pytorch_pipeline

PROMPT = [5, 90, 3, 3, 41, 8, 13]
SIZES = {"n_heads": 8, "n_kv_heads": 2, "d_model": 32, "d_ff": 96, "d_head": 16}  # 96: 3 x 32
VARIANTS = {
    "fewer key/value heads than four ranks": {},
    "as many as heads": {"n_kv_heads": 8},
    "odd vocabulary": {"vocab_size": 101, "d_ff": 36},
    "biases and norms": {"qkv_bias": True, "attn_out_bias": True, "qk_norm": True},
    "tied": {"tie_embeddings": True, "n_kv_heads": 4},
}


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def check_logits() -> None:
    tokens = torch.tensor([PROMPT, PROMPT[::-1]])
    for i, changes in enumerate(VARIANTS.values()):
        model = lively(seed=i, size=0.1, **(SIZES | changes))
        before = {name: p.clone() for name, p in model.named_parameters()}
        theirs, own = dtensor_parallel(model), tensor_parallel(model)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                expected = model(tokens)
                with CommDebugMode() as sent:
                    logits = theirs(tokens)
                close(logits, expected)
                close(logits, own(tokens))
                if not changes or "qk_norm" in changes:  # each new shape takes DTensor seconds
                    cache = KVCache(theirs, 2, 20)
                    parts = [theirs(part, cache) for part in tokens.split((6, 1), 1)]
                    close(torch.cat(parts, 1), expected)
            # A sum after the embedding and after every block, and the logits: no weight is moved.
            counts = {str(op): n for op, n in sent.get_comm_counts().items()}
            assert counts == {
                "c10d_functional.all_reduce": 1 + 2 * model.config.n_layers,
                "c10d_functional.all_gather_into_tensor": 1,
            }
        now = dict(model.named_parameters())
        assert all(type(now[name]) is type(model.norm) for name in before)
        assert all(torch.equal(now[name], p) for name, p in before.items())


def check_parts(p: int) -> None:
    """A rank holds what the plan gives it, and no more."""
    model = lively(seed=3, qkv_bias=True, tie_embeddings=True, **(SIZES | {"d_ff": 32 * p}))
    plan = Plan(model.config, p, int(os.environ["RANK"]))
    theirs = dtensor_parallel(model)
    assert theirs.head.weight is theirs.embed.weight
    for layer, whole in zip(theirs.layers, model.layers, strict=True):
        assert layer.config == plan.layer_config
        for matrix in ("qkv", "gate_up", "out", "down"):
            mine, expected = getattr(layer, matrix), getattr(whole, matrix).weight
            if rows := plan.rows(matrix):
                expected = torch.cat([expected[r.start : r.stop] for r in rows])
            if columns := plan.columns(matrix):
                expected = expected[:, columns.start : columns.stop]
            weight = mine.weight.to_local()
            assert torch.equal(weight, expected)
            assert weight.untyped_storage().nbytes() == weight.nbytes  # the whole is not kept
        bias = torch.cat([whole.qkv.bias[r.start : r.stop] for r in plan.rows("qkv")])
        assert torch.equal(layer.qkv.bias.to_local(), bias)


def check_tokens() -> None:
    for changes in ({}, {"qkv_bias": True, "attn_out_bias": True, "qk_norm": True}):
        model = lively(seed=5, **(SIZES | changes))
        theirs = dtensor_parallel(model)
        expected = generate(model, PROMPT, 12)
        assert len(set(expected)) > 5
        assert generate(theirs, PROMPT, 12) == expected
        assert generate(theirs, PROMPT, 3, use_cache=False) == expected[:3]


def check_refused(p: int) -> None:
    with pytest.raises(ValueError, match=f"{p} ranks cannot share the MLP's d_ff = 41 evenly"):
        dtensor_parallel(lively(**(SIZES | {"d_ff": 41})))
    with pytest.raises(ValueError, match="query heads"):
        dtensor_parallel(lively(**(SIZES | {"n_heads": 7, "n_kv_heads": 7})))
    with pytest.raises(ValueError, match="not a plain Linear"):
        dtensor_parallel(quantize(lively(**SIZES), "int8"))


def check_pipeline(p: int) -> None:
    rank = int(os.environ["RANK"])
    rows = [PROMPT, PROMPT[::-1], [1] * 7, [*PROMPT[1:], 4]]
    tokens = torch.tensor(rows)
    for changes in ({}, {"tie_embeddings": True, "qk_norm": True}, {"qkv_bias": True}):
        model = lively(seed=3, **({"n_layers": 5} | changes))
        for m in (1, 2, 4):
            theirs, own = pytorch_pipeline(model, m), pipeline_parallel(model, n_microbatches=m)
            # Another shape, the first one once more, and other tokens of that shape.
            for given in (tokens, tokens[:, :3].repeat(2, 1), tokens, tokens.flip(0)):
                logits, expected = theirs.forward(given), own.forward(given)
                assert (logits is not None) == (expected is not None) == (rank == p - 1)
                if logits is not None:
                    with torch.inference_mode():
                        close(logits, model(given))
                    close(logits, expected)
    for wrong, why in (
        (tokens[:3], "B a multiple of the 4 micro-batches"),
        (tokens[:, :0], "tokens has shape"),
        (tokens.repeat(1, 40), "T at most 256"),
        (tokens + 50, "holds the id"),
    ):
        with pytest.raises(ValueError, match=why):
            theirs.forward(wrong)
    with pytest.raises(ValueError, match="n_microbatches"):
        pytorch_pipeline(model, 0)
    with pytest.raises(ValueError, match=f"{p} ranks cannot share {p - 1} layers"):
        pytorch_pipeline(lively(n_layers=p - 1), 1)


def check_tensor(p: int) -> None:
    check_logits()
    check_parts(p)
    check_tokens()
    check_refused(p)
