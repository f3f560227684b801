"""Fewer bits: the grid by its definition, the products, the model, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import entering, inputs_of, lively, tiny_config
from torch import Tensor

from minillm import Decoder, Engine, EngineConfig, costs, generate, prepack, quantize, sparsify
from minillm.cache import NoCache
from minillm.evaluate import difference
from minillm.layers.per_token import rms_norm
from minillm.model import Linear
from minillm.quantization.awq import awq, output_error
from minillm.quantization.calibration import collect
from minillm.quantization.gptq import gptq
from minillm.quantization.grid import (
    QuantizedMatrix,
    pack,
    pack_blocks,
    to_int4,
    to_int8,
    unpack,
    unpack_blocks,
)
from minillm.quantization.linear import (
    MOST_ROWS,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    QuantizedLinear,
)
from minillm.quantization.quantize import model_bytes

SIZES = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_ff": 96}


def numbers(N: int, K: int, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


# The grid


def test_eight_numbers_by_hand():
    """absmax: 12.7 becomes 127; a group's least and largest number become 0 and 15."""
    row = torch.tensor([[0.1, -12.7, 6.35, 0.04, 0.0, 3.2, -3.2, 12.7]])
    matrix = to_int8(row)
    scale = torch.tensor(0.1).bfloat16().item()
    assert matrix.scale.tolist() == [scale]
    assert matrix.q.tolist() == [[round(x / scale) for x in row[0].tolist()]]
    matrix = to_int4(torch.tensor([[0.0, 1.0, 2.0, 15.0]]), 4)
    assert matrix.q.tolist() == [[0, 1, 2, 15]] and matrix.scale.item() == 1
    assert matrix.zero.item() == 8
    matrix = to_int4(torch.tensor([[-7.0, 0.0, 3.4, 7.0]]), 4, symmetric=True)
    assert matrix.q.tolist() == [[1, 8, 11, 15]] and matrix.zero.item() == 0


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99), st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=80)
def test_the_error_is_half_a_step(N, K, seed, size):
    """No number is farther from its place than half a step, and the ends' rounding."""
    w = numbers(N, 32 * K, seed) * size
    for matrix, groups in (
        (to_int8(w), 1),
        (to_int4(w, 32), K),
        (to_int4(w, 32, symmetric=True), K),
    ):
        error = (matrix.dequantized() - w).abs().unflatten(1, (groups, -1)).amax(-1)
        step = matrix.scale.float().reshape(N, -1)
        # Scales and zeros have 8 bits: the farthest number may lie a little beyond the last step.
        largest = w.abs().unflatten(1, (groups, -1)).amax(-1)
        assert (error <= step / 2 + largest / 128).all()


def test_what_is_constant_is_exact():
    for value in (0.0, 0.5, -2.0):
        w = torch.full((3, 64), value)
        for matrix in (to_int8(w), to_int4(w, 32), to_int4(w, 64)):
            assert matrix.dequantized().isfinite().all()
            torch.testing.assert_close(matrix.dequantized(), w, atol=0, rtol=2**-7)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_packing_is_undone(N, K, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (N, 2 * K), dtype=torch.uint8, generator=generator)
    assert pack(q).shape == (N, K) and torch.equal(unpack(pack(q)), q)


def test_a_grid_is_found_again():
    """Numbers that lie on a grid already are quantized to themselves."""
    w = to_int4(numbers(5, 128), 32).dequantized()
    torch.testing.assert_close(to_int4(w, 32).dequantized(), w, atol=1e-2, rtol=0)
    w = to_int8(numbers(5, 128)).dequantized()
    torch.testing.assert_close(to_int8(w).dequantized(), w, atol=1e-2, rtol=0)


# Products


@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS, MOST_ROWS + 1, 70])
@pytest.mark.parametrize("kind", ["int8", "int4", "int4, groups of 64"])
@pytest.mark.parametrize("bias", [True, False])
def test_product(bias, kind, rows):
    """What is stored is what is computed with: bfloat16's rounding is all that differs."""
    w, b = numbers(48, 128), torch.randn(48).bfloat16() if bias else None
    matrix = to_int8(w) if kind == "int8" else to_int4(w, 64 if "64" in kind else 32)
    layer = (Int8Linear if kind == "int8" else Int4Linear)(matrix, b)
    x = torch.randn(2, rows, 128).bfloat16()
    expected = x.double() @ matrix.dequantized().double().T
    expected = expected if b is None else expected + b.double()
    out = layer(x)
    assert out.shape == (2, rows, 48) and out.dtype == torch.bfloat16
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < 0.01
    torch.testing.assert_close(layer.dequantized(), matrix.dequantized(), atol=0.02, rtol=0.01)


def test_float32_activations_are_refused():
    """On a CPU they would take a loop a hundred times slower."""
    layer = Int8Linear(to_int8(numbers(8, 64)))
    with pytest.raises(TypeError, match=r"computes in bfloat16, and got torch\.float32; leave"):
        layer(torch.randn(1, 64))


@pytest.mark.parametrize("K, at", [(64, 1), (64, 8), (100, 0), (8, 0), (33, 5)])
@pytest.mark.parametrize("rows", [1, 4, MOST_ROWS])
def test_int8_at_any_address_and_width(rows, K, at):
    """As tensors from a file lie: PyTorch's product crashes at odd addresses and widths."""

    def moved(x: Tensor) -> Tensor:
        memory = x.new_empty(x.numel() + at)[at:].view(x.shape)
        return memory.copy_(x)

    matrix, x = to_int8(numbers(24, K)), numbers(rows, K, seed=1).bfloat16()
    layer = Int8Linear(QuantizedMatrix(moved(matrix.q), matrix.scale))
    expected = x.float() @ matrix.dequantized().T
    torch.testing.assert_close(layer(moved(x)).float(), expected, rtol=0.02, atol=0.1)


def test_tied_rows_are_looked_up():
    head = Int8Linear(to_int8(numbers(97, 64)))
    rows = Int8Embedding(head)(torch.tensor([[3, 96, 3]]))
    torch.testing.assert_close(
        rows.float(), head.dequantized()[torch.tensor([[3, 96, 3]])], atol=0, rtol=2**-7
    )


# The model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [("int8", {}), ("int4", {}), ("int4", {"symmetric": True})])
def test_logits_are_those_of_the_dequantized_model(options, tied):
    """The model in float32 with the same dequantized matrices, in bfloat16's tolerance."""
    scheme, more = options
    model = lively(size=0.02, tie_embeddings=tied, qkv_bias=True, **SIZES)
    before = {name: p.clone() for name, p in model.named_parameters()}
    small = quantize(model, scheme, **more)
    exact = lively(size=0.02, tie_embeddings=tied, qkv_bias=True, **SIZES)
    for name, module in small.named_modules():
        if isinstance(module, QuantizedLinear):
            exact.get_submodule(name).weight.data = module.dequantized()
    if tied:
        exact.embed.weight = exact.head.weight
    ids = torch.arange(30)[None] * 7 % 97
    with torch.inference_mode():
        mine, theirs = small(ids).float(), exact(ids)
    assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()
    assert small.dtype == torch.bfloat16 and isinstance(small.head, Int8Linear)
    assert isinstance(small.layers[0].down, Int8Linear if scheme == "int8" else Int4Linear)
    for name, p in model.named_parameters():  # the original is untouched
        assert torch.equal(p, before[name]) and p.dtype == torch.float32


def test_the_original_may_still_be_trained():
    """Also if it is in bfloat16 already, so that no number has to be converted."""
    model = Decoder(tiny_config(**SIZES, tie_embeddings=False)).bfloat16()
    quantize(model, "int8")
    assert all(p.requires_grad for p in model.parameters())


def test_a_quantized_model_generates_and_serves():
    """Cached as uncached, alone as in a batch."""
    small = quantize(lively(size=0.1, **SIZES), "int4")
    prompt = [1, 2, 3, 4, 5]
    expected = generate(small, prompt, 8)
    engine = Engine(small, EngineConfig(n_blocks=20))
    ids = [engine.submit(prompt, 8), engine.submit([9, 9], 8)]
    assert engine.run()[ids[0]].tokens == expected


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "w8a8", "llm_int8"])
def test_a_prompt_in_chunks(scheme):
    """A step whose logits nobody wants gives the head no rows."""
    small = quantize(lively(size=0.1, **SIZES), scheme)
    prompt = [(7 * i) % 97 for i in range(30)]
    engine = Engine(small, EngineConfig(n_blocks=20, max_batch_tokens=8, max_seqs=4))
    number = engine.submit(prompt, 4)
    done = engine.run()[number]
    assert done.error is None and len(done.tokens) == 4


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_rows_that_lie_apart(scheme):
    small = quantize(lively(size=0.1, **SIZES), scheme)
    hidden = small.hidden(torch.arange(12).view(2, 6))
    assert torch.equal(small.head(hidden[:, -1]), small.head(hidden[:, -1].contiguous()))
    layer, x = small.layers[0].qkv, torch.randn(2, 3, 64).bfloat16()[:, 1]
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_a_quantized_model_stays_where_it_was_made():
    small = quantize(lively(**SIZES), "int4")
    assert small.to("cpu") is small
    with pytest.raises(
        ValueError, match=r"stays on the device .* for, cpu here; quantize the orig"
    ):
        small.to("meta")


def test_bytes():
    """Everything counts once: 8.0 bits and a scale a row, or 5 bits, with norms and embedding."""
    model = Decoder(tiny_config(vocab_size=300, **SIZES, tie_embeddings=True))
    n = 2
    shapes = [(128, 64), (64, 64), (192, 64), (64, 96)]  # qkv, out, gate_up, down
    matrices = n * sum(N * K for N, K in shapes)
    assert model_bytes(model) == 4 * (matrices + 300 * 64 + 64 * (2 * n + 1))
    rows, norms = n * sum(N for N, _ in shapes), 2 * 64 * (2 * n + 1)
    head = 300 * 64 + 2 * 300
    assert model_bytes(quantize(model, "int8")) == matrices + 2 * rows + head + norms
    assert model_bytes(quantize(model, "int4")) == matrices * 5 // 8 + head + norms
    untied = Decoder(tiny_config(vocab_size=300, **SIZES, tie_embeddings=False))
    assert model_bytes(quantize(untied, "int8")) == (
        matrices + 2 * rows + head + norms + 2 * 300 * 64
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("scheme", "group_size"), [("int8", 32), ("int4", 32), ("int4", 64)])
def test_the_bytes_that_costs_predicts(scheme, group_size, tied):
    sizes = SIZES | {"d_ff": 128}
    model = lively(**sizes, tie_embeddings=tied, qkv_bias=True, qk_norm=True)
    options = {"group_size": group_size} if scheme == "int4" else {}
    predicted = costs.quantized_bytes(model.config, scheme, group_size)
    assert model_bytes(quantize(model, scheme, **options)) == predicted


def test_bytes_that_cannot_be_predicted():
    with pytest.raises(ValueError, match="dtype is 'int2'; choose int8 or int4"):
        costs.quantized_bytes(tiny_config(), "int2")
    with pytest.raises(ValueError, match="a matrix of 96 columns, which groups of 64 do not"):
        costs.quantized_bytes(tiny_config(**SIZES), "int4", 64)


# Rounding that knows the inputs


def correlated(n: int, K: int) -> Tensor:
    """Inputs whose columns go together, a few of them ten times as large as the others."""
    torch.manual_seed(0)
    x = torch.randn(n, K // 4) @ torch.randn(K // 4, K) + 0.3 * torch.randn(n, K)
    x[:, ::17] *= 10
    return x


def test_statistics_of_the_inputs():
    x = correlated(333, 32)
    inputs = inputs_of(x)
    torch.testing.assert_close(inputs.largest, x.abs().amax(0))
    torch.testing.assert_close(inputs.mean, x.abs().mean(0))
    torch.testing.assert_close(inputs.moments, x.T @ x / 333, atol=1e-3, rtol=1e-4)


def test_what_is_collected_is_what_the_matrices_get():
    model, batches = lively(**SIZES), [torch.arange(20)[None], torch.arange(30, 44).view(2, 7)]
    found = collect(model, batches)
    assert found.keys() == {n for n, m in model.named_modules() if isinstance(m, Linear)} - {"head"}
    with torch.inference_mode():
        first = rms_norm(model.embed(batches[0]), model.layers[0].attn_norm, 1e-5)
    assert found["layers.0.qkv"].n == 34
    assert (found["layers.0.qkv"].largest >= first.abs().amax((0, 1)) - 1e-6).all()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_gptq_and_awq_lose_less_than_rounding(bits, symmetric):
    """On the inputs that they know; what they store is a grid of so many steps."""
    w, x = numbers(24, 128), correlated(1000, 128)
    inputs, options = inputs_of(x), {"bits": bits, "symmetric": symmetric}
    wanted = x @ w.T

    def error(matrix: Tensor) -> float:
        return float((x @ matrix.T - wanted).square().mean())

    rounded = to_int4(w, 32, **options)
    solved = gptq(w, inputs.moments, 32, **options)
    scaled, columns = awq(w, inputs, 32, **options)
    assert error(solved.dequantized()) < 0.5 * error(rounded.dequantized())
    assert error(scaled.dequantized() * columns) < error(rounded.dequantized())
    for matrix in (rounded, solved, scaled):
        assert len(matrix.q.unique()) <= (2**bits - 1 if symmetric else 2**bits)
        assert matrix.q.shape == (24, 128) and matrix.scale.shape == (24, 4)
    assert output_error(rounded.dequantized() - w, inputs.moments) == pytest.approx(
        1000 / 1000 * float((x @ (rounded.dequantized() - w).T).square().sum() / 1000), rel=1e-3
    )


def test_gptq_without_correlation_is_rounding():
    """If no column says anything about another, no error can be made up for."""
    w = numbers(8, 64)
    assert torch.equal(gptq(w, torch.eye(64), 32).q, to_int4(w, 32).q)


def test_gptq_bears_columns_that_are_never_used():
    x = correlated(500, 64)
    x[:, 10:20] = 0
    matrix = gptq(numbers(8, 64), inputs_of(x).moments, 32)
    assert matrix.dequantized().isfinite().all()


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_models_with_calibration(scheme):
    """The matrices are those that the scheme makes, and computed with as they are stored."""
    model = lively(size=0.05, **SIZES)
    batches = [torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(0))]
    one_pass = {"sequential": False} if scheme == "gptq" else {}
    small = quantize(model, scheme, calibration=batches[0], group_size=32, **one_pass)
    inputs = collect(model, batches)["layers.1.down"]
    w, layer = model.layers[1].down.weight, small.layers[1].down
    matrix, columns = (
        (gptq(w, inputs.moments, 32), None) if scheme == "gptq" else awq(w, inputs, 32)
    )
    torch.testing.assert_close(layer.dequantized(), matrix.dequantized(), atol=0.01, rtol=0.01)
    x = torch.randn(1, 3, 96).bfloat16()
    scaled = x.float() if columns is None else x.float() * columns
    expected = scaled @ matrix.dequantized().T
    assert (layer(x).float() - expected).abs().max() < 0.02 * expected.abs().max()
    rounded = quantize(model, "int4")
    kl = {s: difference(m, model, batches[0][0].tolist()).kl for s, m in
          ((scheme, small), ("int4", rounded))}  # fmt: skip
    assert kl[scheme] < kl["int4"]


def test_gptq_knows_the_errors_of_the_layers_before(capfd):
    """Each layer on the stream of the quantized ones before it, by hand; the model is untouched."""
    model = lively(size=0.05, n_layers=3, **SIZES)
    before = {name: p.clone() for name, p in model.named_parameters()}
    batches = [torch.randint(0, 97, (2, n), generator=torch.Generator().manual_seed(n))
               for n in (40, 25)]  # fmt: skip
    small = quantize(model, "gptq", bits=2, calibration=iter(batches), progress=True)
    assert "3/3" in capfd.readouterr().err
    for i, layer in enumerate(model.layers):
        streams = entering(small.layers[i], lambda: [small.hidden(batch) for batch in batches])
        ropes = [model._rope(range(batch.shape[1])) for batch in batches]
        inputs = entering(layer.down, lambda layer=layer, ropes=ropes, streams=streams: [
            layer(x.float(), 0, rope, NoCache()) for x, rope in zip(streams, ropes, strict=True)
        ])  # fmt: skip
        x = torch.cat([x.flatten(0, 1) for x in inputs])
        expected = gptq(layer.down.weight, x.T @ x / len(x), 32, bits=2).dequantized()
        same = (small.layers[i].down.dequantized() - expected).abs() < 1e-2 * expected.abs().max()
        assert same.float().mean() > 0.99  # a number in the middle of two steps may go either way
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


# What is refused


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("int3", {}, "scheme is 'int3'; choose one of int8, fp8, int4, gptq, awq, w8a8, "),
        ("int8", {"bits": 4}, "Scheme int8 has no option bits; it has none"),
        ("int4", {"groups": 4}, "Scheme int4 has no option groups; it has group_size, symmetric"),
        ("int4", {"bits": 5}, "bits is 5; choose 2, 3 or 4"),
        ("gptq", {}, "Scheme gptq needs calibration: batches of token ids"),
        ("awq", {"calibration": []}, "calibration is empty; give at least one batch"),
        ("gptq", {"calibration": [[1, 2]]}, "calibration holds .*give batches of token ids"),
        (
            "gptq",
            {"calibration": torch.ones(2, 9).long(), "sequential": 1},
            "sequential is 1; choose",
        ),
        ("awq", {"sequential": True}, "Scheme awq has no option sequential; it has group_size"),
        ("gptq", {"calibration": torch.full((1, 9), 97)}, "holds the id 97; ids must be from 0"),
        ("gptq", {"calibration": 5}, "calibration is 5; give batches of token ids"),
        ("awq", {"calibration": torch.zeros(0, 4, dtype=torch.int64)}, "calibration holds"),
        (["int8"], {}, "scheme is .*; choose one of int8"),
        ("int4", {"group_size": 32.0}, "group_size is 32.0; choose one of"),
        ("int4", {"symmetric": "no"}, "symmetric is 'no'; choose True or False"),
        ("int4", {"group_size": 33}, "group_size is 33; choose one of 32, 64 and 128"),
        ("int4", {"group_size": 64}, "groups of 64 do not divide; take group_size 32"),
    ],
)
def test_refusals(scheme, options, message):
    model = lively(**SIZES)
    with pytest.raises(ValueError, match=message):
        quantize(model, scheme, **options)


def test_rows_that_come_in_sixteens():
    model = lively(d_model=32, n_heads=3, n_kv_heads=1, d_head=8, d_ff=32)
    with pytest.raises(ValueError, match="40 rows cannot be multiplied in 4 bits on a CPU, which"):
        quantize(model, "int4")


def test_inputs_that_are_not_finite_and_inputs_that_are_zero():
    model, ids = lively(**SIZES), torch.arange(20)[None]
    model.layers[0].attn_norm.zero_()
    for scheme in ("gptq", "awq", "smoothquant"):
        logits = quantize(model, scheme, calibration=ids)(ids)
        assert logits.isfinite().all()
    model.embed.weight[3] = math.inf
    with pytest.raises(ValueError, match=r"qkv gets inputs that are not finite; load the model in"):
        quantize(model, "smoothquant", calibration=ids)


def test_not_twice_and_not_what_is_not_a_number():
    model = lively(**SIZES)
    for other in (quantize(model, "int8"), sparsify(model), prepack(model)):
        kind = type(other.layers[0].qkv).__name__
        message = rf"layers\.0\.qkv is not a plain Linear but a {kind} already; quantize the model"
        with pytest.raises(ValueError, match=message):
            quantize(other, "int4")
    model.layers[1].out.weight[3, 5] = math.nan
    with pytest.raises(ValueError, match=r"layers\.1\.out holds numbers that are not finite"):
        quantize(model, "int8")


def test_the_grid_is_what_the_few_rows_kernel_reads():
    """q, scale and zero in the order that `kernels/few_rows.py` has in its docstring."""
    matrix = to_int4(numbers(6, 64), 32)
    by_hand = torch.empty(6, 64)
    packed = pack_blocks(matrix.q)
    assert torch.equal(unpack_blocks(packed), matrix.q)
    for n in range(6):
        for k in range(64):
            byte = int(packed[n, k // 32 * 16 + k % 16])
            q = byte & 15 if k % 32 < 16 else byte >> 4
            by_hand[n, k] = float(matrix.scale[n, k // 32]) * (q - 8) + float(
                matrix.zero[n, k // 32]
            )
    assert torch.equal(by_hand, matrix.dequantized())
    assert QuantizedMatrix(matrix.q, matrix.scale, matrix.zero).group_size == 32
