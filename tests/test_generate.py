"""The matrix: greedy tokens are identical however they are computed; the rest of the loop."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from models import lively
from tiers import BACKEND_PARAMETERS

from minillm import Decoder, Engine, EngineConfig, KVCache, Sampling, Tokenizer, prepack
from minillm.cache import NoCache
from minillm.generation import decode, generate, prefill
from minillm.layers.attention import BACKENDS
from minillm.paged import BACKENDS as PAGED_BACKENDS


def served(
    model: Decoder,
    ids: list[int],
    n: int,
    *,
    sampling: Sampling | None = None,
    case: str = "",
    **options: object,
) -> list[int]:
    """By the engine: alone, or with what `case` says."""
    most = len(ids) + n - 1
    if case == "preempted":  # the pool holds little more than one of three
        options |= {"n_blocks": -(-most // 2) + 2, "max_seqs": 3, "prefix_caching": False}
    engine = Engine(
        model, EngineConfig(**({"n_blocks": 200, "block_size": 2, "max_seqs": 3} | options))
    )
    others = (
        [(ids[::-1], n + 3), ([7] * 11, 5), (ids[: len(ids) // 2 + 1], 9)]
        if case == "with strangers"
        else []
    )
    others = [([*ids, 1][-len(ids) :], n)] * 2 if case == "preempted" else others
    for prompt, length in others:
        engine.submit(prompt, length, sampling=sampling)
    request = engine.submit(ids, n, sampling=sampling)
    if case == "seen before":
        engine.run()
        request = engine.submit(ids, n, sampling=sampling)
    completions = engine.run()
    assert len(completions) == len(others) + 1
    assert (engine.stats.preemptions > 0) == (case == "preempted" and n > 4)
    assert engine.stats.prefix_hit_tokens == (len(ids) - 1) // 2 * 2 or case != "seen before"
    return completions[request].tokens


# Every technique that must not change a token: a name, and how it continues `ids` by `n` tokens.
# New ones add a line.
TECHNIQUES: dict[str, Callable[[Decoder, list[int], int], list[int]]] = {
    **{
        f"no cache, {backend}": partial(generate, use_cache=False, backend=backend)
        for backend in BACKENDS
    },
    **{f"KV cache, {backend}": partial(generate, backend=backend) for backend in BACKENDS},
    **{f"paged, {backend}": partial(served, backend=backend) for backend in PAGED_BACKENDS},
    **{
        f"paged, {case}": partial(served, case=case)
        for case in ("seen before", "with strangers", "preempted")
    },
    "paged, in chunks": partial(served, max_batch_tokens=3, block_size=16),
    "static batch": partial(served, case="with strangers", policy="static"),
    "prepacked": lambda model, ids, n, **options: served(
        prepack(model), ids, n, case="with strangers", **options
    ),
}
# Those of the Triton kernels run in the interpreter here, and answer with a few tokens.
TECHNIQUE_PARAMETERS = [
    pytest.param(name, marks=pytest.mark.interpret) if "triton" in name else name
    for name in TECHNIQUES
]
techniques = pytest.mark.parametrize("technique", TECHNIQUE_PARAMETERS)
MODELS = {
    "GQA": {},
    "MHA": {"n_kv_heads": 4},
    "MQA": {"n_kv_heads": 1},
    "qk_norm": {"qk_norm": True, "d_head": 16},
    "biases": {"qkv_bias": True, "attn_out_bias": True},
    "tied": {"tie_embeddings": True},
    "one layer": {"n_layers": 1, "n_heads": 3, "n_kv_heads": 3, "d_head": 4},
}
PROMPTS = ("The three laws of robotics are", "def fibonacci(n):\n    ")


@torch.inference_mode()
def by_hand(model: Decoder, ids: list[int], n: int) -> list[int]:
    """The definition of greedy: the whole sequence through the model for each token."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]), NoCache("reference"))[0, -1].argmax()))
    return ids[-n:]


@cache
def answered(name: str, seed: int, ids: tuple[int, ...], n: int) -> list[int]:
    """Of `lively` models, by their names in MODELS; many techniques are compared with it."""
    return by_hand(lively(seed, **MODELS[name]), list(ids), n)


@cache
def drawn(sampling: Sampling, n: int) -> list[int]:
    return generate(lively(), [5, 90, 3], n, sampling=sampling)


@pytest.fixture
def model() -> Decoder:
    return lively()


@pytest.fixture(scope="module")
def default_answers(default: tuple[Decoder, Tokenizer]) -> Callable[[str, int], list[int]]:
    model, tokenizer = default
    return cache(lambda prompt, n: by_hand(model, tokenizer.encode(prompt), n))


# The matrix


@techniques
@pytest.mark.parametrize("prompt", PROMPTS)
def test_matrix_on_the_default_checkpoint(default, default_answers, technique, prompt):
    model, tokenizer = default
    most = {"no cache, triton": 2, "KV cache, triton": 4, "paged, triton": 4}.get(technique, 16)
    n = min(most, 6) if "no cache" in technique else most  # there every token costs a long pass
    found = TECHNIQUES[technique](model, tokenizer.encode(prompt), n)
    assert found == default_answers(prompt, most)[:n]


@techniques
@pytest.mark.parametrize(
    "name",
    [  # one for every edit, all for `make test`
        pytest.param(name, marks=() if name == "qk_norm" else pytest.mark.slow) for name in MODELS
    ],
)
def test_matrix_on_tiny_models(technique, name):
    seeds, n = (1, 12) if "triton" in technique else (2, 24)
    for seed in range(seeds):
        model = lively(seed, **MODELS[name])
        for ids in ([seed], [5, 90, 3, 3, 41, 8, 13]):
            assert TECHNIQUES[technique](model, ids, n) == answered(name, seed, tuple(ids), n)


class Forgetful(KVCache):
    """A cache with the bugs that the matrix is there to find."""

    def __init__(self, bug: str, model: Decoder):
        super().__init__(model, 1, 64)
        self.bug = bug

    def positions(self, n_new):
        positions = super().positions(n_new)
        return range(n_new) if self.bug == "positions" else positions

    def advance(self, n_new):
        super().advance(0 if self.bug == "overwrites" and self.length else n_new)

    def attend(self, layer, q, k, v):
        if self.bug == "stale" and self.length:
            k = self.storage.k[layer][:, self.length - 1 : self.length]
        return super().attend(layer, q, k, v)


@pytest.mark.parametrize("bug", ["positions", "overwrites", "stale"])
@pytest.mark.parametrize("name", MODELS)
def test_the_matrix_finds_bugs(name, bug):
    model, ids = lively(**MODELS[name]), [5, 90, 3, 3, 41, 8, 13]
    cache, answer = Forgetful(bug, model), []
    with torch.inference_mode():
        while len(answer) < 30:
            answer.append(
                int(
                    (
                        decode(model, answer[-1], cache) if answer else prefill(model, ids, cache)
                    ).argmax()
                )
            )
    assert answer != answered(name, 0, tuple(ids), 30)


# The two phases


@pytest.mark.parametrize("backend", BACKEND_PARAMETERS)
@torch.inference_mode()
def test_decode_after_prefill_gives_the_logits_of_the_full_forward(model, backend):
    ids, cache = [5, 90, 3, 3, 41, 8, 13], KVCache(model, 1, 7, backend=backend)
    full = model(torch.tensor([ids]))[0]
    logits = [prefill(model, ids[:4], cache)] + [decode(model, i, cache) for i in ids[4:]]
    assert logits[0].shape == (97,) and cache.length == 7
    torch.testing.assert_close(torch.stack(logits), full[3:], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_prefill_without_a_cache(model):
    torch.testing.assert_close(
        prefill(model, [1, 2, 3], NoCache()),
        model(torch.tensor([[1, 2, 3]]))[0, -1],
        atol=1e-5,
        rtol=1e-5,
    )


# The loop


@pytest.mark.parametrize("use_cache", [True, False])
def test_stop_ids_end_the_answer_and_belong_to_it(model, use_cache):
    free = generate(model, [5, 90, 3], 30, use_cache=use_cache)
    for stop in ([free[0]], [free[9], free[4]], {free[29]}):
        first = next(i for i, token in enumerate(free) if token in stop)
        assert (
            generate(model, [5, 90, 3], 30, stop_ids=iter(stop), use_cache=use_cache)
            == free[: first + 1]
        )
    never = set(range(97)) - set(free)
    assert generate(model, [5, 90, 3], 30, stop_ids=never, use_cache=use_cache) == free


def test_a_stop_token_in_the_prompt_stops_nothing(model):
    free = generate(model, [5, 90, 3], 5)
    stop = next(i for i in (5, 90, 3) if i not in free)
    assert generate(model, [5, 90, 3], 5, stop_ids={stop}) == free


@pytest.mark.parametrize("use_cache", [True, False])
def test_on_token_is_told_each_token_once_and_in_order(model, use_cache):
    told: list[int] = []
    answer = generate(model, [5, 90, 3], 20, on_token=told.append, use_cache=use_cache)
    assert told == answer and len(answer) == 20
    told.clear()
    assert (
        generate(
            model, [5, 90, 3], 20, on_token=told.append, stop_ids={answer[3]}, use_cache=use_cache
        )
        == told
    )
    assert told[-1] == answer[3]


def test_on_token_hears_of_a_token_before_the_next_is_computed(model):
    told: list[int] = []

    def interrupt(token: int) -> None:
        told.append(token)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, [5, 90, 3], 20, on_token=interrupt)
    assert told == generate(model, [5, 90, 3], 3)


@pytest.mark.parametrize("use_cache", [True, False])
def test_nothing_asked_for(model, use_cache):
    assert (
        generate(
            model,
            [5],
            0,
            use_cache=use_cache,
            on_token=lambda token: pytest.fail("no token was asked for"),
        )
        == []
    )


def test_a_longer_answer_begins_with_the_shorter(model):
    assert generate(model, [5, 90, 3], 20)[:7] == generate(model, [5, 90, 3], 7)
    assert (
        generate(model, [5, 90, 3, *generate(model, [5, 90, 3], 7)], 13)
        == generate(model, [5, 90, 3], 20)[7:]
    )


def test_sequences_of_all_kinds_are_prompts(model):
    expected = generate(model, [5, 90, 3], 5)
    for ids in ((5, 90, 3), torch.tensor([5, 90, 3]), np.array([5, 90, 3]), iter([5, 90, 3])):
        assert generate(model, ids, 5) == expected
    assert all(type(token) is int for token in expected)


def test_the_prompt_is_not_changed(model):
    ids = [5, 90, 3]
    generate(model, ids, 5)
    assert ids == [5, 90, 3]


def test_up_to_the_last_position():
    model = lively(max_seq_len=16)
    for use_cache in (True, False):
        assert generate(model, [5, 90, 3], 13, use_cache=use_cache) == by_hand(
            model, [5, 90, 3], 13
        )
        assert len(generate(model, [7] * 15, 1, use_cache=use_cache)) == 1


# Sampling


@techniques
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"temperature": 0.7}, marks=pytest.mark.slow),
        pytest.param({"top_k": 10}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.9}, marks=pytest.mark.slow),
        {"temperature": 2.0, "top_k": 40, "top_p": 0.95},
    ],
    ids=str,
)
def test_the_seed_decides_not_the_cache(model, options, technique):
    n = 5 if "triton" in technique else 20
    samplings = [Sampling(**options, seed=seed) for seed in range(2)]
    one, other = (drawn(sampling, n) for sampling in samplings)
    assert one != other
    for sampling in samplings:
        found = TECHNIQUES[technique](model, [5, 90, 3], n, sampling=sampling)
        assert found == drawn(sampling, n)


def test_without_a_seed_answers_differ(model):
    assert generate(model, [5], 30, sampling=Sampling(2.0)) != generate(
        model, [5], 30, sampling=Sampling(2.0)
    )


def test_temperature_zero_is_greedy(model):
    assert generate(model, [5, 90, 3], 20, sampling=Sampling(0, seed=1)) == generate(
        model, [5, 90, 3], 20
    )


# Refusals


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    ("ids", "n", "error", "message"),
    [
        (
            "Hello",
            5,
            TypeError,
            r"prompt_ids is a string; encode it first: tokenizer\.encode\(text\)",
        ),
        (b"Hello", 5, TypeError, "prompt_ids is a string"),
        ([], 5, ValueError, "prompt_ids is empty; give at least one token"),
        ([1, 97], 5, ValueError, "prompt_ids holds 97; ids must be from 0 to 96"),
        ([1, -1], 5, ValueError, "prompt_ids holds -1"),
        ([1, 2.5], 5, TypeError, "prompt_ids must be whole numbers"),
        ([1, "2"], 5, TypeError, "prompt_ids must be whole numbers"),
        ([[1, 2]], 5, TypeError, "prompt_ids must be whole numbers"),
        (torch.tensor([[1, 2]]), 5, TypeError, "prompt_ids must be whole numbers"),
        (torch.tensor([1.0, 2.0]), 5, TypeError, "prompt_ids must be whole numbers"),
        (7, 5, TypeError, "prompt_ids must be whole numbers"),
        ([1], -1, ValueError, "max_new_tokens is -1; it must be a whole number, 0 or more"),
        ([1], 5.0, ValueError, r"max_new_tokens is 5\.0"),
        ([1], True, ValueError, "max_new_tokens is True"),
        ([1], None, ValueError, "max_new_tokens is None"),
        (
            [1] * 10,
            247,
            ValueError,
            "10 prompt tokens and 247 new ones exceed the 256 positions of custom; ask for fewer",
        ),
        ([1] * 257, 0, ValueError, "257 prompt tokens and 0 new ones exceed the 256 positions"),
    ],
    ids=str,
)
def test_refused_requests(model, ids, n, error, message, use_cache):
    with pytest.raises(error, match=message):
        generate(
            model,
            ids,
            n,
            use_cache=use_cache,
            on_token=lambda token: pytest.fail("refused too late"),
        )


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("use_cache", [True, False])
def test_refused_options(model, use_cache, n):
    with pytest.raises(ValueError, match=f"backend is 'fast'; choose one of {', '.join(BACKENDS)}"):
        generate(model, [1], n, backend="fast", use_cache=use_cache)
    for sampling in (0.7, {"temperature": 1.0}, Sampling):
        with pytest.raises(
            TypeError, match=r"sampling is .*; give a minillm\.Sampling, or None for greedy"
        ):
            generate(model, [1], n, sampling=sampling, use_cache=use_cache)
