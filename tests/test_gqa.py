"""Merging key/value heads: each new head is what the method says, and nothing else changes."""

import math

import pytest
import torch
import torch.nn.functional as F
from models import tiny_config
from torch import Tensor

from minillm import Decoder, KVCache, costs, generate, merge_kv_heads, prepack
from minillm.generation import decode, prefill
from minillm.gqa import METHODS
from minillm.training import next_token_loss, uptrain

VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "attn_out_bias": True},
    "qk_norm": {"qk_norm": True},
    "wide heads": {"d_head": 20, "n_layers": 1},
}
variants = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def lively(**changes: object) -> Decoder:
    """8 query heads on 4 key/value heads, biases and norms included in what is random."""
    torch.manual_seed(0)
    model = (
        Decoder(tiny_config(**({"n_heads": 8, "n_kv_heads": 4} | changes)))
        .eval()
        .requires_grad_(False)
    )
    for p in model.parameters():
        p += 0.2 * torch.randn_like(p)
    return model


def heads(model: Decoder, layer: int, name: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The rows of q, k and v of each head, from the fused projection's parameter of that name."""
    c, rows = model.config, getattr(model.layers[layer].qkv, name).detach()
    each = [rows[i * c.d_head : (i + 1) * c.d_head] for i in range(c.n_heads + 2 * c.n_kv_heads)]
    assert len(rows) == len(each) * c.d_head
    return (
        each[: c.n_heads],
        each[c.n_heads : c.n_heads + c.n_kv_heads],
        each[c.n_heads + c.n_kv_heads :],
    )


def parameters(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# What is merged


@variants
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_heads_by_hand(changes, n, method):
    model = lively(**changes)
    merged = merge_kv_heads(model, n, method=method)
    size = 4 // n
    for layer in range(model.config.n_layers):
        for name, _ in model.layers[layer].qkv.named_parameters():
            (q, *old), (new_q, *new) = heads(model, layer, name), heads(merged, layer, name)
            assert all(torch.equal(a, b) for a, b in zip(q, new_q, strict=True))
            for before, after in zip(old, new, strict=True):  # k, then v
                assert len(after) == n
                for j, head in enumerate(after):
                    group = before[j * size : (j + 1) * size]
                    if method == "mean":
                        torch.testing.assert_close(head, sum(group[1:], group[0]) / size)
                    elif method == "first":
                        assert torch.equal(head, group[0])
                    else:
                        assert all((head != other).any() for other in before) and head.std() < 0.04


@variants
@pytest.mark.parametrize("method", METHODS)
def test_nothing_else_changes(changes, method):
    model = lively(**changes)
    before = parameters(model)
    merged = merge_kv_heads(model, 2, method=method)
    after = parameters(merged)
    assert before.keys() == after.keys()
    for name in before.keys() - {name for name in before if ".qkv." in name}:
        assert torch.equal(before[name], after[name]), name
    assert (model.config.n_kv_heads, merged.config.n_kv_heads) == (4, 2)
    assert all(layer.config is merged.config for layer in merged.layers)
    # The original: neither changed now nor by changes to the copy.
    for p in merged.parameters():
        p.data.zero_()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.layers[0].qkv.out_features == 16 * model.config.d_head


def test_random_heads_differ_from_each_other_and_from_run_to_run():
    model = lively()
    first, second = (
        heads(merge_kv_heads(model, 2, method="random"), 0, "weight") for _ in range(2)
    )
    _, k, v = first
    assert len({tuple(x.flatten().tolist()) for x in (*k, *v, *second[1], *second[2])}) == 8
    assert torch.cat(k).std() == pytest.approx(0.02, rel=0.3)


def test_random_heads_have_no_bias():
    _, k, v = heads(merge_kv_heads(lively(qkv_bias=True), 2, method="random"), 0, "bias")
    assert not any(x.any() for x in (*k, *v))


def test_tied_heads_stay_tied():
    merged = merge_kv_heads(lively(tie_embeddings=True), 1)
    assert merged.head.weight is merged.embed.weight
    merged = merge_kv_heads(lively(), 1)
    assert merged.head.weight is not merged.embed.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_dtype_mode_and_gradients_are_kept(dtype, training, learned):
    model = lively(qkv_bias=True).to(dtype).train(training).requires_grad_(learned)
    model.layers[0].qkv.weight.requires_grad_(not learned)
    merged = merge_kv_heads(model, 2)
    assert merged.training == training and all(m.training == training for m in merged.modules())
    flags = {name: p.requires_grad for name, p in merged.named_parameters()}
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert {p.dtype for p in merged.parameters()} == {dtype} and merged.dtype == dtype
    assert all(p.is_leaf for p in merged.parameters())


def test_the_mean_in_half_precision_is_rounded_once():
    model = lively().bfloat16()
    exact = merge_kv_heads(lively().bfloat16().double().float(), 1).bfloat16()
    assert all(
        torch.equal(a, b)
        for a, b in zip(merge_kv_heads(model, 1).parameters(), exact.parameters(), strict=True)
    )


def test_the_device_is_kept():
    with torch.device("meta"):
        model = Decoder(tiny_config())
    merged = merge_kv_heads(model, 1)
    assert {p.device.type for p in merged.parameters()} == {"meta"}


# What it does to the model


@variants
@pytest.mark.parametrize("method", ["mean", "first"])
def test_as_many_heads_as_before_is_the_same_model(changes, method):
    model = lively(**changes)
    tokens = torch.randint(97, (2, 20))
    assert torch.equal(merge_kv_heads(model, 4, method=method)(tokens), model(tokens))


def test_as_many_heads_as_before_in_float64():
    model = lively().double()
    for p in model.parameters():
        p /= 3
    tokens = torch.randint(97, (2, 20))
    assert torch.equal(merge_kv_heads(model, 4)(tokens), model(tokens))


@variants
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("method", ["mean", "first"])
def test_heads_that_are_copies_merge_without_a_trace(changes, n, method):
    """All heads of a group equal: their mean is each of them, bit for bit, in groups of 2 and 4."""
    model = lively(**changes)
    for layer in range(model.config.n_layers):
        for name, _ in model.layers[layer].qkv.named_parameters():
            for rows in heads(model, layer, name)[1:]:
                for j, head in enumerate(rows):
                    head.copy_(rows[j // (4 // n) * (4 // n)])
    merged, ids = merge_kv_heads(model, n, method=method), [5, 90, 3, 3, 41, 8, 13]
    tokens = torch.tensor([ids])
    torch.testing.assert_close(merged(tokens), model(tokens), atol=1e-5, rtol=1e-5)
    assert (
        generate(merged, ids, 20)
        == generate(model, ids, 20)
        == generate(merged, ids, 20, use_cache=False, backend="reference")
    )


def test_other_heads_leave_a_trace():
    """Otherwise the test above could not fail."""
    model, tokens = lively(), torch.tensor([[5, 90, 3, 3, 41, 8, 13]])
    for n in (1, 2):
        assert (merge_kv_heads(model, n)(tokens) - model(tokens)).abs().max() > 0.1


@variants
@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_costs_say(changes, n):
    model = lively(**changes)
    merged = merge_kv_heads(model, n)
    old, new = KVCache(model, 3, 50), KVCache(merged, 3, 50)
    assert new.nbytes * 4 == old.nbytes * n
    assert new.nbytes == costs.kv_cache_bytes(merged.config, 3, 50, "float32")
    assert sum(p.numel() for p in merged.parameters()) == costs.param_count(merged.config)
    assert costs.attention_flops(merged.config, 100) == costs.attention_flops(model.config, 100)
    assert (costs.param_count(merged.config) < costs.param_count(model.config)) == (n < 4)


@pytest.mark.parametrize("n", [1, 2])
@torch.inference_mode()
def test_merged_models_run_through_a_cache(n):
    merged, ids = merge_kv_heads(lively(), n), [5, 90, 3, 3, 41, 8, 13]
    cache = KVCache(merged, 1, 7)
    logits = [prefill(merged, ids[:4], cache)] + [decode(merged, i, cache) for i in ids[4:]]
    torch.testing.assert_close(
        torch.stack(logits), merged(torch.tensor([ids]))[0, 3:], atol=1e-5, rtol=1e-5
    )


def test_the_default_checkpoint_with_one_head(default):
    """Three heads become one: another model, worse, but whole.

    Its answer is the same with and without a cache.
    """
    model, tokenizer = default
    merged, ids = merge_kv_heads(model, 1), tokenizer.encode("The three laws of robotics are")
    assert merged.config.n_kv_heads == 1 and model.config.n_kv_heads == 3
    assert KVCache(merged, 1, 64).nbytes * 3 == KVCache(model, 1, 64).nbytes
    answer = generate(merged, ids, 4)
    assert len(answer) == 4 and answer == generate(
        merged, ids, 4, use_cache=False, backend="reference"
    )
    tokens = torch.tensor(
        [tokenizer.encode("The capital of France is Paris. The capital of Italy is Rome.")]
    )
    with torch.inference_mode():
        assert next_token_loss(merged, tokens) > next_token_loss(model, tokens) + 0.5


# Refusals


@pytest.mark.parametrize("bad", [3, 8, 0, -1, True, 2.0, "2", None])
def test_refused_numbers(bad):
    with pytest.raises(
        ValueError,
        match=rf"n_kv_heads is {bad!r}; custom has 4 key/value heads, which can be merged into "
        r"1 or 2 or 4\.",
    ):
        merge_kv_heads(lively(), bad)


@pytest.mark.parametrize("bad", ["max", "", None, "Mean"])
def test_refused_methods(bad):
    with pytest.raises(ValueError, match=f"method is {bad!r}; choose one of mean, first, random"):
        merge_kv_heads(lively(), 2, method=bad)


def test_a_prepacked_model_is_refused():
    """The packed copies would go on multiplying with the old heads."""
    model = prepack(lively())
    with pytest.raises(ValueError, match="are PrepackedLinear, not plain Linear; merge the heads"):
        merge_kv_heads(model, 1)


# Training


def test_next_token_loss_by_hand():
    model, tokens = lively(), torch.randint(97, (3, 6))
    total = 0.0
    for row in tokens.tolist():
        for t in range(1, 6):
            logits = model(torch.tensor([row[:t]]))[0, -1].double()
            total -= (logits[row[t]] - logits.logsumexp(0)).item()
    assert next_token_loss(model, tokens).item() == pytest.approx(total / 15, rel=1e-5)


def test_the_loss_of_a_model_that_knows_nothing():
    model = lively()
    model.head.weight.zero_()
    assert next_token_loss(model, torch.randint(97, (2, 9))).item() == pytest.approx(
        math.log(97), rel=1e-6
    )


def test_one_token_has_no_next():
    with pytest.raises(ValueError, match="tokens is empty"):
        next_token_loss(lively(), torch.tensor([[1]]))


def test_the_loss_is_float32_in_half_precision():
    model, tokens = lively().bfloat16(), torch.randint(97, (2, 9))
    loss = next_token_loss(model, tokens)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()).item()
    )


def counting(n: int, batch_size: int = 8, length: int = 12) -> list[Tensor]:
    """Sequences that count up from somewhere, modulo 97: learnable from the last token alone."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randint(97, (batch_size, 1), generator=generator) for _ in range(n)]
    return [(start + torch.arange(length)) % 97 for start in starts]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}], ids=str)
def test_uptraining_lowers_the_loss(changes):
    """Train a model, merge its heads, train on: the loss falls, jumps, and falls again."""
    torch.manual_seed(0)
    model = Decoder(tiny_config(n_heads=8, n_kv_heads=4, n_layers=1, **changes))
    losses = uptrain(model, counting(40), lr=0.02)
    assert len(losses) == 40 and losses[0] == pytest.approx(math.log(97), rel=0.05)
    assert losses[-1] < 0.2 * losses[0]
    merged = merge_kv_heads(model, 1)
    again = uptrain(merged, counting(25), lr=0.01)
    assert sum(again[-5:]) < sum(again[:5]) and again[-1] < 0.2 * losses[0]


def test_the_losses_are_those_before_each_step():
    model, batches = lively(), counting(3)
    before = next_token_loss(model, batches[0]).item()
    losses = uptrain(model, iter(batches), lr=0.01)
    assert losses[0] == pytest.approx(before) and len(losses) == 3
    assert uptrain(model, [], lr=0.01) == []
    assert next_token_loss(model, batches[0]).item() < before


def test_uptraining_trains_everything_and_restores_what_is_learned():
    model = lively()
    model.norm.requires_grad_(True)
    before = parameters(model)
    uptrain(model, counting(2), lr=0.01)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["norm"]
    assert all((p != before[name]).any() for name, p in model.named_parameters())


def test_a_bad_batch_leaves_the_model_as_it_was_learned():
    """A batch that can't be computed raises.

    What is learned, and that no gradients are left, is as after a good end.
    """
    model = lively()
    model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match="tokens holds the id 97"):
        uptrain(model, [*counting(1), torch.full((1, 4), model.config.vocab_size)], lr=0.01)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["norm"]
    assert all(p.grad is None for p in model.parameters())


def test_a_learning_rate_of_nothing_changes_nothing():
    model = lively()
    before = parameters(model)
    uptrain(model, counting(2), lr=0.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
