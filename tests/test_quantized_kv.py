"""The KV cache in 8 and 4 bits: by its definition, in every kind of cache, and what it costs."""

import pytest
import torch
from models import lively

from minillm import Engine, EngineConfig, KVCache, QuantizedKVCache, generate
from minillm.cache import NoCache
from minillm.model import Decoder
from minillm.quantized_kv import QuantizedRows

BITS = pytest.mark.parametrize("bits", [8, 4])
STEPS = {8: 254, 4: 15}


def test_rows_by_hand():
    """One head of four numbers: 127 is 1.27, and 16 steps reach from -1 to 0.5."""
    model = lively(n_layers=1, n_heads=2, n_kv_heads=1, d_head=4)
    x = torch.tensor([[[[1.27, -0.64, 0.0, 0.02]]]])
    rows = QuantizedRows(model, (1, 3))
    rows.write(0, (slice(None), slice(1, 2)), x, 2 * x)
    assert rows.k[0, 0, 1, 0].tolist() == [127, -64, 0, 2] == rows.v[0, 0, 1, 0].tolist()
    assert rows.k_scales[0, 0, 1, 0].item() == pytest.approx(0.01, rel=1e-3)
    assert not rows.k[0, 0, 0].any() and not rows.k[0, 0, 2].any()
    x = torch.tensor([[[[-1.0, 0.5, 0.0, -0.9]]]])
    rows = QuantizedRows(model, (1, 1), bits=4)
    rows.write(0, slice(None), x, x)
    assert rows.k[0, 0, 0, 0].tolist() == [0 | 15 << 4, 10 | 1 << 4]


@BITS
def test_the_error_is_half_a_step(bits):
    """What is read differs from what was written by half a step of its token and head."""
    model = lively(n_layers=2)
    torch.manual_seed(0)
    rows = QuantizedRows(model, (2, 9), bits=bits)
    k, v = torch.randn(2, 2, 9, 2, 8) * torch.logspace(-3, 2, 9)[None, None, :, None, None]
    rows.write(1, slice(None), k, v)
    for x, found in zip((k, v), rows.read(1, slice(None)), strict=True):
        reach = x.amax(-1) - x.amin(-1) if bits == 4 else 2 * x.abs().amax(-1)
        allowed = (reach / STEPS[bits] / 2 + x.abs().amax(-1) * 2**-9)[..., None]
        assert ((found - x).abs() <= allowed).all()
    assert not rows.read(0, slice(None))[0].any()  # the other layer is empty


class RoundedCache(NoCache):
    """The same by another way: every key and value put on its grid, nothing kept."""

    def __init__(self, model: Decoder, bits: int):
        super().__init__("reference")
        self.model, self.bits = model, bits

    def attend(self, layer, q, k, v):
        rows = QuantizedRows(self.model, (len(k), k.shape[1]), bits=self.bits)
        rows.write(layer, slice(None), k, v)
        return super().attend(layer, q, *rows.read(layer, slice(None)))


@torch.inference_mode()
def rounded_answer(model: Decoder, ids: list[int], n: int, bits: int) -> list[int]:
    ids = list(ids)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]), RoundedCache(model, bits))[0, -1].argmax()))
    return ids[-n:]


@BITS
def test_in_generate_and_in_the_engine(bits):
    """With rewinding, chunks, preemption, shared prefixes and copies on write."""
    model = lively(n_layers=3)
    prompts = [[5, 90, 3, 3, 41, 8, 13][: 3 + i] * (1 + i) for i in range(4)]
    right = [rounded_answer(model, prompt, 12, bits) for prompt in prompts]
    tokens = torch.tensor([prompts[3]])
    with torch.inference_mode():
        difference = (model(tokens, RoundedCache(model, bits)) - model(tokens)).abs().max()
    assert difference > 1e-3, "the rounding shows"
    for prompt, expected in zip(prompts, right, strict=True):
        cache = QuantizedKVCache(model, 1, len(prompt) + 12, bits=bits)
        assert generate(model, prompt, 12, cache=cache) == expected
        cache.rewind(11)
        assert generate(model, expected[:1], 11, cache=cache) == expected[1:]
    for options in ({"n_blocks": 100}, {"n_blocks": 14, "max_batch_tokens": 9, "max_seqs": 4}):
        config = EngineConfig(block_size=4, kv_dtype=f"int{bits}", **options)
        engine = Engine(model, config)
        ids = [i for p in prompts for i in engine.submit_samples(p, 12, [None, None])]
        out = engine.run()
        assert [out[i].tokens for i in ids] == [answer for answer in right for _ in range(2)]


def test_bytes():
    """With D = 64: 66 and 36 bytes for 128 of bfloat16."""
    model = lively(d_model=64, n_heads=2, n_kv_heads=2, d_head=64).bfloat16()
    plain = KVCache(model, 3, 10).nbytes
    assert QuantizedKVCache(model, 3, 10).nbytes * 128 == plain * 66
    assert QuantizedKVCache(model, 3, 10, bits=4).nbytes * 128 == plain * 36


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "least"), [(8, 0.95), (4, 0.5)])
def test_greedy_tokens_agree_on_the_default_model(default, bits, least):
    """At each step of a plain answer: the likeliest token, with the cache so far quantized."""
    model, tokenizer = default
    agree = total = 0
    for text in ("The three laws of robotics are", "Once upon a time, a small"):
        ids = tokenizer.encode(text)
        answer = generate(model, ids, 60)
        whole = torch.tensor([ids + answer[:-1]])
        cache = QuantizedKVCache(model, 1, whole.shape[1], bits=bits)
        with torch.inference_mode():
            likeliest = model(whole, cache)[0, len(ids) - 1 :].argmax(-1).tolist()
        agree += sum(a == b for a, b in zip(likeliest, answer, strict=True))
        total += len(answer)
    assert agree / total >= least


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: QuantizedKVCache(m, 1, 4, bits=3), "bits is 3; choose 8 or 4"),
        (
            lambda m: Engine(m, EngineConfig(n_blocks=4, kv_dtype="int2")),
            "kv_dtype is 'int2'; choose None, 'int8' or 'int4'",
        ),
        (
            lambda m: Engine(m, EngineConfig(n_blocks=4, kv_dtype="int8"), rows=QuantizedRows),
            "rows and kv_dtype",
        ),
    ],
)
def test_refusals(tiny, make, message):
    with pytest.raises(ValueError, match=message):
        make(tiny)


def test_an_odd_head_does_not_fit_two_to_a_byte():
    class Odd:
        kv_shape = (1, 1, 7)

    message = "4 bits need an even head dimension, and this model has 7"
    with pytest.raises(ValueError, match=message):
        QuantizedRows(Odd(), (1, 1), bits=4)
