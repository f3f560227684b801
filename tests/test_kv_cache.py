"""The KV cache changes nothing: any way of feeding it gives the logits of one full forward pass."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import lively, tiny_config
from tiers import BACKEND_PARAMETERS
from torch import Tensor

from minillm import Decoder, Engine, EngineConfig, KVCache, PagedKVCache, generate
from minillm.cache import Cache, NoCache
from minillm.kv_cache import KVStorage
from minillm.layers.attention import BACKENDS, attention

SMALL = partial(lively, size=0.1)
MODEL = SMALL()
VOCAB = MODEL.config.vocab_size


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def feed(
    cache: object, tokens: Tensor, chunks: list[int] | None = None, model: Decoder = MODEL
) -> Tensor:
    """Logits (B, T, V) of `tokens` fed in chunks of the given sizes, the last with what is left."""
    parts = tokens.split(chunks or [1] * tokens.shape[1], dim=1)
    return torch.cat([model(part, cache) for part in parts], dim=1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


# The same logits


HERE = [backend for backend in BACKENDS if backend != "triton"]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 3),
    st.sampled_from(HERE),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_any_chunks_give_the_full_forward(chunks, batch_size, backend, seed):
    tokens = ids(batch_size, sum(chunks), seed=seed)
    cache = KVCache(MODEL, batch_size, sum(chunks), backend=backend)
    close(feed(cache, tokens, chunks), MODEL(tokens))
    assert cache.length == sum(chunks)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "chunks", [[1], [9, 1, 1, 1], [1] * 6, [2, 17, 1, 30, 3], [33, 8, 16, 17]], ids=str
)
def test_chunks_through_the_triton_kernels(chunks):
    """Two query heads a key/value head: up to 16 tokens are the decode kernel's."""
    for batch_size in (1, 3):
        tokens, cache = (
            ids(batch_size, sum(chunks)),
            KVCache(MODEL, batch_size, sum(chunks) + 5, backend="triton"),
        )
        close(feed(cache, tokens, chunks), MODEL(tokens))
        assert cache.length == sum(chunks)


@pytest.mark.parametrize("backend", BACKEND_PARAMETERS)
@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 4},
        {"n_kv_heads": 1},
        {"qk_norm": True},
        {"qkv_bias": True, "attn_out_bias": True},
        {"n_layers": 1},
    ],
    ids=str,
)
def test_every_family(changes, backend):
    model, tokens = SMALL(**changes), ids(2, 20)
    close(
        feed(KVCache(model, 2, 20, backend=backend), tokens, [7, 1, 1, 5, 6], model),
        model(tokens, NoCache(backend)),
    )


def test_the_logits_depend_on_the_whole_past():
    """Otherwise the tests here could not fail."""
    tokens = ids(1, 12)
    expected = MODEL(tokens)[0, -1]
    for position in range(11):
        other = tokens.clone()
        other[0, position] = (other[0, position] + 1) % VOCAB
        assert (MODEL(other)[0, -1] - expected).abs().max() > 1e-3


def test_a_batch_is_its_sequences():
    tokens = ids(4, 15)
    together = feed(KVCache(MODEL, 4, 15), tokens, [6, 1, 8])
    alone = [feed(KVCache(MODEL, 1, 15), row[None], [6, 1, 8]) for row in tokens]
    close(together, torch.cat(alone))


def test_a_cache_longer_than_its_content():
    tokens = ids(1, 10)
    close(feed(KVCache(MODEL, 1, 200), tokens), MODEL(tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model = SMALL().to(dtype)
    tokens, cache = ids(2, 12), KVCache(model, 2, 12)
    logits = feed(cache, tokens, [5, 1, 1, 5], model)
    assert logits.dtype == dtype
    exact = SMALL().to(dtype).float()(tokens)  # the same rounded weights
    error, plain = (logits - exact).abs().max(), (model(tokens) - exact).abs().max()
    assert error <= 2 * plain


def test_parameters_that_can_be_trained(tiny):
    """A fresh Decoder has gradients on; reading from a cache must work nevertheless."""
    tokens = ids(1, 6)
    close(feed(KVCache(tiny, 1, 6), tokens, [3, 1, 1, 1], tiny), tiny(tokens))


# Only k and v of the past are needed


class ListCache(Cache):
    """The protocol by hand: lists of past keys and values, and nothing else."""

    def __init__(self):
        self.past: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def positions(self, n_new):
        return range(self.length, self.length + n_new)

    def attend(self, layer, q, k, v):
        if layer in self.past:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.past[layer], (k, v), strict=True))
        self.past[layer] = k, v
        return attention(q, k, v, backend="reference")

    def advance(self, n_new):
        self.length += n_new


def test_no_query_needs_to_be_cached():
    tokens, cache = ids(2, 14), ListCache()
    close(feed(cache, tokens, [5, 1, 3, 1, 4]), MODEL(tokens))
    numbers = sum(k.numel() + v.numel() for k, v in cache.past.values())
    c = MODEL.config
    assert numbers == 2 * 14 * 2 * c.n_layers * c.n_kv_heads * c.d_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_heads": 4}, {"n_kv_heads": 1, "d_head": 20, "n_layers": 3}], ids=str
)
def test_nbytes_holds_keys_and_values_only(changes, dtype):
    model = Decoder(tiny_config(**changes)).to(dtype)
    c, cache = model.config, KVCache(model, 3, 50)
    assert cache.nbytes == 2 * c.n_layers * 3 * 50 * c.n_kv_heads * c.d_head * dtype.itemsize
    model(ids(3, 7), cache)
    assert cache.nbytes == KVCache(model, 3, 50).nbytes  # reserved, whether used or not


# Rewind


@given(st.integers(1, 10), st.integers(1, 10), st.integers(1, 10), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_what_was_rewound_was_never_there(n_past, n_wrong, n_new, seed):
    tokens = ids(2, n_past + n_wrong + n_new, seed=seed)
    past, wrong, new = tokens.split([n_past, n_wrong, n_new], dim=1)
    cache = KVCache(MODEL, 2, n_past + max(n_wrong, n_new))
    feed(cache, past, [n_past])
    feed(cache, wrong)
    cache.rewind(n_wrong)
    assert cache.length == n_past
    close(feed(cache, new), MODEL(torch.cat((past, new), dim=1))[:, n_past:])


def test_rewind_to_the_beginning_and_by_nothing():
    cache, tokens = KVCache(MODEL, 1, 8), ids(1, 8)
    feed(cache, ids(1, 8, seed=1))
    cache.rewind(0)
    assert cache.length == 8
    cache.rewind(8)
    close(feed(cache, tokens, [8]), MODEL(tokens))


# Refusals, after each of which the cache still works


def still_works(cache: KVCache, tokens: Tensor, n_fed: int) -> None:
    assert cache.length == n_fed
    close(feed(cache, tokens[:, n_fed:]), MODEL(tokens)[:, n_fed:])


def test_overflow_is_refused_before_anything_is_written():
    tokens, cache = ids(1, 8), KVCache(MODEL, 1, 8)
    feed(cache, tokens[:, :5])
    with pytest.raises(
        ValueError,
        match=r"holds 5 of at most 8 tokens; 4 more don't fit\. Make it with a larger max_len",
    ):
        MODEL(ids(1, 4, seed=1), cache)
    still_works(cache, tokens, 5)
    with pytest.raises(ValueError, match="holds 8 of at most 8 tokens; 1 more"):
        MODEL(ids(1, 1), cache)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_another_batch_size_is_refused(batch_size):
    tokens, cache = ids(2, 8), KVCache(MODEL, 2, 8)
    feed(cache, tokens[:, :3])
    with pytest.raises(
        ValueError, match=f"a batch of {batch_size}; this cache was made for a batch of 2"
    ):
        MODEL(ids(batch_size, 2, seed=1), cache)
    still_works(cache, tokens, 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(1, 2), "expected integer ids"),
        (torch.zeros(2, dtype=torch.int64), r"shape \(2,\).*expected integer ids \(B, T\)"),
        (torch.zeros(1, 0, dtype=torch.int64), "tokens is empty"),
    ],
)
def test_bad_tokens_are_refused(bad, message):
    tokens, cache = ids(1, 8), KVCache(MODEL, 1, 8)
    feed(cache, tokens[:, :3])
    with pytest.raises(ValueError, match=message):
        MODEL(bad, cache)
    still_works(cache, tokens, 3)


@pytest.mark.parametrize("n", [-1, 4, True, 1.0, None])
def test_bad_rewinds_are_refused(n):
    tokens, cache = ids(1, 8), KVCache(MODEL, 1, 8)
    feed(cache, tokens[:, :3])
    with pytest.raises(
        ValueError, match=f"rewind by {n!r} tokens; the cache holds 3, so give 0 to 3"
    ):
        cache.rewind(n)
    still_works(cache, tokens, 3)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "4", None])
def test_bad_sizes_are_refused(bad):
    with pytest.raises(ValueError, match=r"batch_size is .*; it must be a whole number, 1 or more"):
        KVCache(MODEL, bad, 8)
    with pytest.raises(ValueError, match=r"max_len is .*; it must be a whole number, 1 or more"):
        KVCache(MODEL, 1, bad)


def test_the_position_limit():
    model = SMALL(max_seq_len=16)
    tokens = ids(1, 17)
    with pytest.raises(
        ValueError, match="max_len is 17; custom was trained for at most 16 positions"
    ):
        KVCache(model, 1, 17)
    cache = KVCache(model, 1, 16)
    close(feed(cache, tokens[:, :16], [9, 7], model), model(tokens[:, :16]))
    with pytest.raises(
        ValueError, match="17 positions are asked for; custom was trained for at most 16"
    ):
        model(tokens)
    cache = ListCache()  # a cache without a limit of its own
    feed(cache, tokens[:, :16], [16], model)
    with pytest.raises(ValueError, match="17 positions are asked for"):
        model(tokens[:, 16:], cache)


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match=f"backend is 'fast'; choose one of {', '.join(BACKENDS)}"):
        KVCache(MODEL, 1, 8, backend="fast")
    with pytest.raises(ValueError, match="backend is 'fast'"):
        NoCache("fast")


def test_a_cache_of_another_model_is_refused(tiny):
    other = Decoder(tiny_config(n_kv_heads=1))
    with pytest.raises(
        ValueError, match="The cache was made for 2 layers of 1 key/value heads of 8 dimensions in"
    ):
        tiny(torch.tensor([[1, 2]]), KVCache(other, 1, 8))


@pytest.mark.parametrize("changes", [{"n_layers": 3}, {"d_head": 16}, {"n_kv_heads": 4}], ids=str)
def test_depth_and_dtype_must_fit_too(tiny, changes):
    for other in (Decoder(tiny_config(**changes)), Decoder(tiny_config()).bfloat16()):
        cache = KVCache(other, 1, 8)
        with pytest.raises(ValueError, match="custom has 2 layers of 2 key/value heads of 8 dim"):
            tiny(torch.tensor([[1, 2]]), cache)
        assert cache.length == 0 and not cache.storage.k.any()


@pytest.mark.parametrize(("bad", "shown"), [(97, 97), (-1, -1), (2**40, 2**40)])
def test_ids_outside_the_vocabulary(tiny, bad, shown):
    cache = KVCache(tiny, 1, 8)
    for used in (None, cache):
        with pytest.raises(ValueError, match=f"tokens holds the id {shown}; ids must be from 0 to"):
            tiny(torch.tensor([[1, bad, 3]]), used)
    assert cache.length == 0


# Rows stored otherwise


def test_the_slots_of_a_head_lie_in_one_piece(tiny):
    ids = [5, 90, 3, 41]
    by_head, by_slot = KVCache(tiny, 1, 12), KVCache(tiny, 1, 12, storage=KVStorage)
    assert generate(tiny, ids, 8, cache=by_head) == generate(tiny, ids, 8, cache=by_slot)
    for name in ("k", "v"):
        found, other = getattr(by_head.storage, name), getattr(by_slot.storage, name)
        assert found.transpose(2, 3).is_contiguous() and other.is_contiguous()
        torch.testing.assert_close(found, other)
        assert found.shape == (2, 1, 12, 2, 8) and found.any()


class HalfStorage(KVStorage):
    """Keeps bfloat16 under a float32 model: what is written and read is all that differs."""

    plain = False

    def __init__(self, model, shape):
        super().__init__(model, shape)
        self.layers = [(k.bfloat16(), v.bfloat16()) for k, v in self.layers]

    def write(self, layer, at, k, v):
        super().write(layer, at, k.bfloat16(), v.bfloat16())

    def read(self, layer, at):
        return tuple(x.float() for x in super().read(layer, at))

    def copy(self, source, target):
        for pair in self.layers:
            for x in pair:
                x[target] = x[source]


class RoundedCache(NoCache):
    """The same by another way: every key and value rounded to bfloat16, nothing kept."""

    def attend(self, layer, q, k, v):
        return super().attend(layer, q, k.bfloat16().float(), v.bfloat16().float())


@torch.inference_mode()
def rounded_answer(model: Decoder, ids: list[int], n: int) -> list[int]:
    ids = list(ids)
    for _ in range(n):
        logits = model(torch.tensor([ids]), RoundedCache("reference"))[0, -1]
        ids.append(int(logits.argmax()))
    return ids[-n:]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_other_rows_in_generate_and_in_the_engine(backend):
    model = lively(n_layers=3)
    prompts = [[5, 90, 3, 3, 41, 8, 13][: 3 + i] * (1 + i) for i in range(4)]
    right = [rounded_answer(model, prompt, 20) for prompt in prompts]
    tokens = torch.tensor([prompts[3]])
    with torch.inference_mode():
        rounded, exact = model(tokens, RoundedCache()), model(tokens)
        cache = KVCache(model, 1, 50, storage=HalfStorage, backend=backend)
        torch.testing.assert_close(model(tokens, cache), rounded, atol=1e-5, rtol=1e-5)
    assert cache.storage.layers[0][0].dtype == torch.bfloat16
    assert (rounded - exact).abs().max() > 1e-3, "the rounding shows"
    for prompt, expected in zip(prompts, right, strict=True):
        cache = KVCache(model, 1, len(prompt) + 20, storage=HalfStorage, backend=backend)
        assert generate(model, prompt, 20, cache=cache) == expected
        cache.rewind(19)  # of the last token nothing was ever computed
        assert generate(model, right_end(expected), 19, cache=cache) == expected[1:]
    # Few blocks and small steps: chunks, preemption, shared prefixes, copies on write.
    for options in ({"n_blocks": 100}, {"n_blocks": 14, "max_batch_tokens": 9, "max_seqs": 4}):
        config = EngineConfig(block_size=4, backend=backend, **options)
        engine = HalfEngine(model, config)
        ids = [i for p in prompts for i in engine.submit_samples(p, 20, [None, None])]
        out = engine.run()
        assert [out[i].tokens for i in ids] == [answer for answer in right for _ in range(2)]


class HalfEngine(Engine):
    def _new_cache(self):
        c = self.config
        return PagedKVCache(
            self.model, c.n_blocks, c.block_size, backend=c.backend, storage=HalfStorage
        )


def right_end(answer: list[int]) -> list[int]:
    """What is fed again after rewinding to the first token of an answer."""
    return answer[:1]
