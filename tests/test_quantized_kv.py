"""The KV cache in 8 and 4 bits: by its definition, in every kind of cache, and what it costs."""

import pytest
import torch
from models import lively

from minillm import Engine, EngineConfig, KVCache, QuantizedKVCache, generate, prepack
from minillm.cache import NoCache
from minillm.model import Decoder
from minillm.quantization.kv_cache import QuantizedStorage

BITS = pytest.mark.parametrize("bits", [8, 4])
STEPS = {8: 254, 4: 15}


def test_rows_by_hand():
    """One head of four numbers: 127 is 1.27, and 16 steps reach from -1 to 0.5."""
    model = lively(n_layers=1, n_heads=2, n_kv_heads=1, d_head=4)
    x = torch.tensor([[[[1.27, -0.64, 0.0, 0.02]]]])
    rows = QuantizedStorage(model, (1, 3))
    rows.write(0, (slice(None), slice(1, 2)), x, 2 * x)
    assert rows.k[0, 0, 1, 0].tolist() == [127, -64, 0, 2] == rows.v[0, 0, 1, 0].tolist()
    assert rows.k_scales[0, 0, 1, 0].item() == pytest.approx(0.01, rel=1e-3)
    assert not rows.k[0, 0, 0].any() and not rows.k[0, 0, 2].any()
    x = torch.tensor([[[[-1.0, 0.5, 0.0, -0.9]]]])
    rows = QuantizedStorage(model, (1, 1), bits=4)
    rows.write(0, slice(None), x, x)
    assert rows.k[0, 0, 0, 0].tolist() == [0 | 15 << 4, 10 | 1 << 4]


@BITS
def test_the_error_is_half_a_step(bits):
    """What is read differs from what was written by half a step of its token and head."""
    model = lively(n_layers=2)
    torch.manual_seed(0)
    rows = QuantizedStorage(model, (2, 9), bits=bits)
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
        rows = QuantizedStorage(self.model, (len(k), k.shape[1]), bits=self.bits)
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


@pytest.mark.interpret
@BITS
def test_in_the_engine_with_the_kernel(bits):
    """Quantized pages read by the Triton kernel: the same tokens."""
    model = lively(n_layers=2)
    prompts = [[5, 90, 3, 3, 41, 8, 13], [7, 7, 1]]
    config = EngineConfig(n_blocks=30, block_size=4, kv_dtype=f"int{bits}", backend="triton")
    engine = Engine(model, config)
    ids = [engine.submit(prompt, 6) for prompt in prompts]
    out = engine.run()
    assert [out[i].tokens for i in ids] == [rounded_answer(model, p, 6, bits) for p in prompts]


# Keys per channel


def channel_keys(k: torch.Tensor, bits: int, n_rounded: int) -> torch.Tensor:
    """Keys (B, S, K, D) as KIVI stores them: the first groups of 32 on a grid per channel."""
    k = k.clone()
    for first in range(0, n_rounded, 32):
        group = k[:, first : first + 32].double()
        if bits == 8:
            scale = (group.abs().amax(1, keepdim=True) / 127).half().double()
            found = (group / scale).round() * scale
        else:
            low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
            scale, low = ((high - low) / 15).half().double(), low.half().double()
            found = ((group - low) / scale).round().clamp(0, 15) * scale + low
        k[:, first : first + 32] = found
    return k


def n_rounded(length: int) -> int:
    """Keys that are rounded after so many tokens: whole groups but for the last of them."""
    return max(0, length // 32 - 1) * 32


@BITS
@pytest.mark.parametrize("pieces", [[102], [1] * 102, [63, 1, 1, 37], [32, 32, 38], [5, 92, 5]])
def test_keys_per_channel(pieces, bits):
    """However the tokens come: a pass reads rounded what was there, and its own keys as given."""
    model = lively(n_layers=1)
    torch.manual_seed(1)
    k, v = torch.randn(2, 2, 102, 2, 8) * torch.logspace(-2, 1, 8)
    cache = QuantizedKVCache(model, 2, 102, bits=bits, keys="channel")
    per_token = QuantizedStorage(model, (2, 102), bits=bits)
    per_token.write(0, slice(None), k, v)
    start = 0
    for n in pieces:
        at, before = (slice(None), slice(start, start + n)), n_rounded(start)
        cache.storage.write(0, at, k[at], v[at])
        start += n
        for n_read in (before, n_rounded(start)):  # in the pass, and after it
            keys, values = cache.storage.read(0, (slice(None), slice(start)))
            expected = channel_keys(k[:, :start], bits, n_read)
            torch.testing.assert_close(keys, expected, atol=1e-4, rtol=1e-3)
            assert torch.equal(keys[:, n_read:], k[:, n_read:start])
        assert torch.equal(values, per_token.read(0, slice(None))[1][:, :start])


@BITS
def test_a_pass_with_keys_per_channel_is_causal(bits):
    """What comes later in a pass changes nothing for the tokens before it."""
    model = lively(n_layers=2, max_seq_len=256)
    tokens = torch.randint(0, 97, (1, 150), generator=torch.Generator().manual_seed(3))
    other = tokens.clone()
    other[:, 90:] = 96 - other[:, 90:]
    first, second = (
        model(t, QuantizedKVCache(model, 1, 150, bits=bits, keys="channel"))
        for t in (tokens, other)
    )
    assert torch.equal(first[:, :90], second[:, :90])
    assert not torch.equal(first[:, 90:], second[:, 90:])


@BITS
@pytest.mark.parametrize("length", [60, 64, 75, 95])
@torch.inference_mode()
def test_rejected_tokens_leave_no_trace(length, bits):
    """A rewind of up to 32 tokens, whatever they were, large ones too, across groups or not."""
    model = lively(n_layers=3, max_seq_len=256)
    torch.manual_seed(2)
    tokens, next_ones = torch.randint(0, 97, (1, length)), torch.randint(0, 97, (1, 9))
    for back in (1, 5, 32):
        logits = []
        for seed in (3, 4):
            cache = QuantizedKVCache(model, 1, 200, bits=bits, keys="channel")
            model(tokens, cache)
            rejected = torch.randint(
                0, 97, (1, back), generator=torch.Generator().manual_seed(seed)
            )
            model(rejected, cache)
            if seed == 4:
                cache.storage.newest[:, :, length - cache.storage._first[0] :] *= 1000
            cache.rewind(back)
            kept = cache.storage.read(1, (slice(None), slice(length)))[0]
            logits.append((kept, model(next_ones, cache)))
        for one, same in zip(*logits, strict=True):
            assert torch.equal(one, same)
        if n_rounded(length + back) == n_rounded(length):  # as if nothing had been there
            fresh = QuantizedKVCache(model, 1, 200, bits=bits, keys="channel")
            model(tokens, fresh)
            assert torch.equal(model(next_ones, fresh), logits[0][1])


@BITS
@torch.inference_mode()
def test_rewinding_far_with_keys_per_channel(bits):
    """Into a group that was rounded: what is left of it is off by a step of the grid at most."""
    model = lively(n_layers=3, max_seq_len=256)
    torch.manual_seed(2)
    tokens, other = torch.randint(0, 97, (2, 1, 110))
    cache = QuantizedKVCache(model, 1, 200, bits=bits, keys="channel")
    model(tokens, cache)
    before = cache.storage.read(1, (slice(None), slice(110)))[0][:, :45]
    cache.rewind(65)  # 45 tokens are left, 13 of them in a group that was rounded
    model(other[:, :60], cache)
    after = cache.storage.read(1, (slice(None), slice(105)))[0][:, :45]
    assert cache.length == 105
    step = (before.amax() - before.amin()) / STEPS[bits]
    assert (after - before).abs().max() <= step
    assert torch.equal(after[:, :32], before[:, :32])


def test_channels_lose_less_where_one_is_large():
    """Per token, one channel a hundred times as large dominates the scale of the others."""
    model = lively(n_layers=1)
    k = torch.randn(1, 64, 2, 8, generator=torch.Generator().manual_seed(0))
    k[..., 3] *= 100
    error = {}
    for keys in ("token", "channel"):
        cache = QuantizedKVCache(model, 1, 64, bits=4, keys=keys)
        at = (slice(None), slice(0, 64))
        cache.storage.write(0, at, k, k)
        cache.storage.read(0, at)  # what the pass reads; then what later ones do
        found = cache.storage.read(0, at)[0][:, :32]
        error[keys] = float((found - k[:, :32])[..., :3].abs().mean())
    assert error["channel"] < 0.1 * error["token"]


def test_generating_with_keys_per_channel():
    """Across two groups, in one piece and with a rewind in the middle of the newest."""
    model = lively(n_layers=2, max_seq_len=256)
    expected = generate(model, [3, 4, 5], 90, cache=QuantizedKVCache(model, 1, 93, keys="channel"))
    cache = QuantizedKVCache(model, 1, 200, keys="channel")
    assert generate(model, [3, 4, 5], 90, cache=cache) == expected
    cache.rewind(10)  # 82 tokens are left, 50 of them in full
    assert generate(model, expected[79:80], 10, cache=cache) == expected[80:]


def test_bytes_per_channel():
    """For each group of 32 tokens a scale a channel, and two groups in full."""
    model = lively(d_model=64, n_heads=2, n_kv_heads=2, d_head=64).bfloat16()
    L, B, S, K, D = 2, 3, 128, 2, 64
    numbers = L * B * S * K * D
    expected = 2 * numbers + 2 * numbers // D + 2 * numbers // 32 + 2 * L * B * 64 * K * D
    assert QuantizedKVCache(model, B, S, keys="channel").nbytes == expected


def test_bytes():
    """With D = 64: 66 and 36 bytes for 128 of bfloat16."""
    model = lively(d_model=64, n_heads=2, n_kv_heads=2, d_head=64).bfloat16()
    plain = KVCache(model, 3, 10).nbytes
    assert QuantizedKVCache(model, 3, 10).nbytes * 128 == plain * 66
    assert QuantizedKVCache(model, 3, 10, bits=4).nbytes * 128 == plain * 36


@pytest.mark.slow
def test_greedy_tokens_agree_on_the_default_model(default):
    """At each step of a plain answer: the likeliest token, with the cache so far quantized."""
    model, tokenizer = prepack(default[0]), default[1]
    agree, total = {8: 0, 4: 0}, 0
    for text in ("The three laws of robotics are", "Once upon a time, a small"):
        ids = tokenizer.encode(text)
        answer = generate(model, ids, 60)
        whole = torch.tensor([ids + answer[:-1]])
        for bits in agree:
            cache = QuantizedKVCache(model, 1, whole.shape[1], bits=bits)
            with torch.inference_mode():
                likeliest = model(whole, cache)[0, len(ids) - 1 :].argmax(-1).tolist()
            agree[bits] += sum(a == b for a, b in zip(likeliest, answer, strict=True))
        total += len(answer)
    assert agree[8] / total >= 0.95 and agree[4] / total >= 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: QuantizedKVCache(m, 1, 4, bits=3), "bits is 3; choose 8 or 4"),
        (
            lambda m: QuantizedKVCache(m, 1, 4, keys="head"),
            "keys is 'head'; choose token or channel",
        ),
        (
            lambda m: Engine(m, EngineConfig(n_blocks=4, kv_dtype="int2")),
            "kv_dtype is 'int2'; choose None, 'int8' or 'int4'",
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
        QuantizedStorage(Odd(), (1, 1), bits=4)
