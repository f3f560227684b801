"""Medusa heads: what they compute, that they learn, and what they need from the target."""

import pytest
import torch
import torch.nn.functional as F
from models import lively, lively_heads
from safetensors.torch import save_file

from minillm import Engine, EngineConfig, generate, quantize, speculative_generate
from minillm.speculation.medusa import MedusaDrafter, MedusaHeads
from minillm.speculation.medusa_heads import DECAY, load_heads, save_heads, train_heads


def test_the_heads_by_their_formula():
    heads, h = lively_heads(3), torch.randn(2, 5, 24)
    out = heads(h)
    assert out.shape == (2, 5, 3, 24)
    for i in range(3):
        torch.testing.assert_close(out[:, :, i], h + F.silu(h @ heads.weight[i].T))
    torch.testing.assert_close(heads(h, 2), out[:, :, :2])
    new = MedusaHeads(2, 24)  # says what the model says
    torch.testing.assert_close(new(h)[:, :, 1], h)


def test_draft_tokens_are_the_greedy_ones_of_each_head():
    model, heads = lively(), lively_heads(3)
    state = torch.randn(24)
    session = MedusaDrafter(heads).start(model, 99, None)
    logits = model.head(torch.stack([state + F.silu(heads.weight[i] @ state) for i in range(3)]))
    expected = logits.argmax(-1).tolist()
    assert session.propose([1], 3, [], state).tokens == expected
    assert session.propose([1], 2, [], state).tokens == expected[:2]
    assert session.propose([1], 9, [], state).tokens == expected  # no more than there are heads
    assert session.propose([1], 3, []).tokens == []


def cycle(n_rows: int) -> list[torch.Tensor]:
    """A text of which each token says the next: 10, 11, …, 19, 10, …, from any place."""
    return [
        torch.stack([10 + (torch.arange(16) + i + j) % 10 for j in range(4)]) for i in range(n_rows)
    ]


@pytest.fixture(scope="module")
def learned():
    """A model that knows the cycle, and heads that were trained on it."""
    from minillm.training import uptrain

    model = lively(n_layers=1)
    uptrain(model.requires_grad_(True), cycle(60), lr=0.01)
    model.requires_grad_(False)
    heads = MedusaHeads(3, 24)
    losses = train_heads(model, heads, cycle(150), lr=0.02)
    return model, heads, losses


def test_heads_learn_what_comes_after_the_next_token(learned):
    model, heads, losses = learned
    assert losses[-1] < 0.2 * losses[0]
    prompt = [10, 11, 12, 13, 14, 15]
    result = speculative_generate(model, MedusaDrafter(heads), prompt, 21, k=3)
    assert result.tokens == generate(model, prompt, 21) == [10 + (6 + i) % 10 for i in range(21)]
    assert result.accepted == result.drafted == 15 and result.target_calls == 6


def test_the_target_is_frozen_and_left_as_it_was(learned):
    model, _, _ = learned
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.head.weight.requires_grad_(True)
    try:
        train_heads(model, MedusaHeads(2, 24), cycle(2), lr=0.1)
        assert model.head.weight.requires_grad and model.head.weight.grad is None
    finally:
        model.requires_grad_(False)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_the_loss_by_its_formula():
    model, heads = lively(), lively_heads(2)
    (tokens,) = cycle(1)
    (found,) = train_heads(model, heads, [tokens], lr=0.0)
    with torch.no_grad():
        h = model.hidden(tokens)
        expected = sum(
            DECAY**i
            * F.cross_entropy(
                model.head(h + F.silu(h @ heads.weight[i].T))[:, : 14 - i].flatten(0, 1),
                tokens[:, 2 + i :].flatten(),
            )
            for i in range(2)
        )
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_in_the_engine_steps_are_saved(learned):
    model, heads, _ = learned
    engine = Engine(model, EngineConfig(n_blocks=40, drafter=MedusaDrafter(heads), k=3))
    number = engine.submit([10, 11, 12, 13], 21)
    tokens = engine.run()[number].tokens
    assert tokens == generate(model, [10, 11, 12, 13], 21) and engine.stats.steps == 6


def test_a_quantized_target_uses_the_same_heads():
    model = quantize(lively(d_model=64, d_head=16, d_ff=64), "int8")
    result = speculative_generate(model, MedusaDrafter(lively_heads(2, 64)), [1, 2, 3], 12, k=2)
    assert result.tokens == generate(model, [1, 2, 3], 12)


def test_saved_heads_are_the_same_up_to_int8(tmp_path):
    heads, path = lively_heads(3), tmp_path / "h.safetensors"
    save_heads(heads, path)
    loaded = load_heads(path)
    assert loaded.weight.shape == heads.weight.shape and not loaded.weight.requires_grad
    step = heads.weight.abs().amax(-1, keepdim=True) / 127
    assert bool(((loaded.weight - heads.weight).abs() <= 0.6 * step).all())


def test_files_that_are_no_heads(tmp_path):
    path = tmp_path / "h.safetensors"
    with pytest.raises(FileNotFoundError, match=r"does not exist; train heads with python -m"):
        load_heads(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is damaged"):
        load_heads(path)
    for q, scale in (((5, 4), 5), ((8, 4), 7), ((0, 4), 0), ((8,), 8)):
        save_file({"q": torch.zeros(q, dtype=torch.int8), "scale": torch.ones(scale)}, path)
        with pytest.raises(ValueError, match="which are not heads in int8; train them again"):
            load_heads(path)
    save_file({"q": torch.zeros(4, 4, dtype=torch.int8)}, path)
    with pytest.raises(ValueError, match="is damaged"):
        load_heads(path)


def test_refusals():
    model, heads = lively(), lively_heads(2, 32)
    for call in (
        lambda: MedusaDrafter(heads).start(model, 9, None),
        lambda: train_heads(model, heads, cycle(1), lr=0.1),
    ):
        with pytest.raises(ValueError, match="for states of 32 numbers and the target's have 24"):
            call()
    with pytest.raises(ValueError, match="Rows of 3 tokens are too short for 2 heads; give at"):
        train_heads(model, lively_heads(2), [torch.zeros(1, 3, dtype=torch.long)], lr=0.1)
    with pytest.raises(ValueError, match="n is 0"):
        MedusaHeads(0, 24)
    drafting = EngineConfig(n_blocks=9, drafter=MedusaDrafter(lively_heads(2)), cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs keeps no hidden states"):
        Engine(model, drafting)
