"""A model whose logits are not numbers says so, wherever tokens come from, greedy or sampled.

float16 ends at 65,504. A feed-forward network that reaches beyond it gives infinities, their
differences NaN, and the largest of a row of NaN is the first: token 0, again and again.
"""

import pytest
import torch
from models import lively, lively_heads, save_folder

from minillm import (
    Decoder,
    Engine,
    EngineConfig,
    KVCache,
    MedusaDrafter,
    ModelDrafter,
    NgramDrafter,
    Sampling,
    generate,
    speculative_generate,
)
from minillm.__main__ import main
from minillm.paged import PagedKVCache
from minillm.sampling import greedy
from minillm.serving.cuda_graphs import DecodeRows
from minillm.speculation.drafters import Drafter

SAID = r"The model's logits are not numbers \(NaN\); nothing can be drawn\."
SAMPLINGS = [None, Sampling(0.0), Sampling(1.0, seed=1), Sampling(0.7, top_k=5, top_p=0.9, seed=1)]
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


def overflowing() -> Decoder:
    """Finite weights in float16 whose sums are not."""
    model = lively().half()
    for layer in model.layers:
        layer.gate_up.weight *= 900
        layer.down.weight *= 900
    return model


@pytest.fixture(scope="module")
def model() -> Decoder:
    found = overflowing()
    assert all(p.isfinite().all() for p in found.parameters())
    with torch.inference_mode():
        assert found(torch.tensor([PROMPT]))[0, -1].isnan().any()
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"backend": "reference"}], ids=str)
def test_generate(model, sampling, options):
    with pytest.raises(ValueError, match=SAID):
        generate(model, PROMPT, 5, sampling=sampling, **options)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "drafter",
    [NgramDrafter(), ModelDrafter(lively()), MedusaDrafter(lively_heads(2))],
    ids=lambda drafter: type(drafter).__name__,
)
def test_speculation(model, drafter, sampling):
    with pytest.raises(ValueError, match=SAID):
        speculative_generate(model, drafter, PROMPT, 5, k=2, sampling=sampling)


@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=2)], ids=str)
def test_a_drafting_model_says_that_it_is_the_one(model, sampling):
    with pytest.raises(ValueError, match="The drafting model's logits are not numbers"):
        speculative_generate(lively(), ModelDrafter(model), PROMPT, 5, k=2, sampling=sampling)


def test_medusa_heads_say_it_too():
    heads = lively_heads(2)
    heads.weight.mul_(3e38)
    with pytest.raises(ValueError, match="The drafting head's logits are not numbers"):
        speculative_generate(lively(), MedusaDrafter(heads), PROMPT, 5, k=2)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("drafter", [None, NgramDrafter()], ids=["plain", "n-grams"])
def test_the_engine_ends_the_request(model, drafter: Drafter | None, sampling):
    """The one that has the trouble; the engine goes on."""
    engine = Engine(model, EngineConfig(n_blocks=20, drafter=drafter))
    first, second = (engine.submit(PROMPT, 5, sampling=sampling) for _ in range(2))
    done = engine.run()
    for request in (first, second):
        assert done[request].finish_reason == "aborted" and done[request].tokens == []
        assert "The model's logits are not numbers (NaN)" in done[request].error
    assert not engine.busy


def test_a_drafter_that_fails_costs_the_engine_only_its_drafts(model):
    target = lively()
    engine = Engine(target, EngineConfig(n_blocks=20, drafter=ModelDrafter(model), k=2))
    request = engine.submit(PROMPT, 6)
    assert engine.run()[request].tokens == generate(target, PROMPT, 6)


def test_what_a_graph_would_capture(model):
    """The greedy token is found inside of it, and so is that there is none."""
    cache = PagedKVCache(model, 9, 4, backend="reference")
    table = cache.manager.start(PROMPT)
    cache.reserve(table, 9)
    with torch.inference_mode():
        model.hidden(torch.tensor([PROMPT]), cache.batch([table], [8]))
        rows = DecodeRows(model, cache, 1)
        rows.fill([table], [7])
        _, best = rows.step(1)
    assert best.tolist() == [-1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 3, 96])
def test_one_bad_logit_is_enough(bad, place):
    logits = torch.randn(3, 97)
    logits[1, place] = bad
    assert greedy(logits).tolist() == [logits[0].argmax(), -1, logits[2].argmax()]


def test_numbers_that_are_only_large_are_numbers():
    logits = torch.tensor([[-3e38, 3e38, 0.0], [-torch.inf, -3e38, -torch.inf]])
    assert greedy(logits).tolist() == [1, 1]
    model = lively()
    cache = KVCache(model, 1, 20)
    assert generate(model, PROMPT, 5, cache=cache) == generate(model, PROMPT, 5)


class TinyTokenizer:
    stop_ids, n_vocab = (), 97

    def encode(self, text: str) -> list[int]:
        return PROMPT

    def stream(self) -> "TinyTokenizer":
        return self

    def push(self, token: int) -> str:
        return "?"

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("options", [[], ["--temperature", "1", "--seed", "3"]], ids=str)
def test_the_command_line(model, options, tmp_path, capsys, monkeypatch):
    folder = save_folder(overflowing(), tmp_path / "model")
    monkeypatch.setattr(
        "minillm.weights.loading.tokenizer_from_folder", lambda folder: TinyTokenizer()
    )
    arguments = ["generate", "hi", "--model", str(folder), "--dtype", "float16", "--device", "cpu"]
    assert main([*arguments, *options]) == 2
    said = capsys.readouterr()
    assert said.err == "minillm: The model's logits are not numbers (NaN); nothing can be drawn.\n"
