"""2:4 sparsity: the mask and the stored form by definition, the choice, the model, the refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import entering, lively
from torch import Tensor

from minillm import Engine, EngineConfig, generate, prepack, quantize
from minillm.layers.per_token import rms_norm
from minillm.model import Decoder
from minillm.quantization import sparsity
from minillm.quantization.awq import output_error
from minillm.quantization.calibration import collect
from minillm.quantization.grid import to_int8
from minillm.quantization.quantize import model_bytes
from minillm.quantization.sparsity import SparseLinear, compress, least_squares, mask_2_4, sparsify

SIZES = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_ff": 96}
IDS = torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(0))
WANDA = {"method": "wanda", "calibration": IDS}
METHODS = {"magnitude": {}, "wanda": WANDA, "solved": WANDA | {"recover": True}}


def numbers(N: int, K: int, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def matrices(model: Decoder) -> dict[str, torch.nn.Module]:
    return {name: m for name, m in model.named_modules() if name.count(".") == 2}


def with_large_columns() -> Decoder:
    """A model whose norms make every fifth input of qkv and gate_up ten times as large."""
    model = lively(size=0.1, qkv_bias=True, **SIZES)
    for layer in model.layers:
        layer.attn_norm[::5] *= 10
        layer.mlp_norm[::5] *= 10
    return model


def test_eight_numbers_by_hand():
    """Places 1 and 3, then 0 and 1: of equal numbers the first ones."""
    row = torch.tensor([[1.0, -4.0, 2.0, 3.0, 5.0, 5.0, 5.0, 5.0]])
    mask = mask_2_4(row.abs())
    assert mask.tolist() == [[False, True, False, True, True, True, False, False]]
    stored = compress(row, mask)
    assert stored.values.tolist() == [[-4, 3, 5, 5]]
    assert stored.indices.tolist() == [[1 | 3 << 2 | 0 << 4 | 1 << 6]]
    assert stored.dense().tolist() == [[0, -4, 0, 3, 5, 5, 0, 0]]


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 99), st.booleans())
@settings(deadline=None, max_examples=50)
def test_two_of_four_and_the_largest(N, K, seed, ties):
    scores = numbers(N, 4 * K, seed)
    scores = scores.round() if ties else scores
    mask = mask_2_4(scores)
    assert (mask.view(-1, 4).sum(1) == 2).all()
    kept, others = scores[mask].view(-1, 2), scores[~mask].view(-1, 2)
    assert (kept.amin(1) >= others.amax(1)).all()


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
@settings(deadline=None, max_examples=20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_what_is_stored_is_found_again_to_the_bit(dtype, N, K, seed):
    weight = numbers(N, 8 * K, seed) * 20
    weight[:, ::3] *= -0.0  # zeros of both signs are numbers like any other
    weight, mask = weight.to(dtype), mask_2_4(numbers(N, 8 * K, seed + 1))
    stored = compress(weight, mask)
    assert stored.values.dtype == dtype and stored.indices.dtype == torch.uint8
    assert stored.values.shape == (N, 4 * K) and stored.indices.shape == (N, K)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    expected = torch.where(mask, weight, torch.zeros_like(weight))
    assert torch.equal(stored.dense().view(bits), expected.view(bits))
    assert stored.nbytes / weight.nbytes == {1: 5 / 8, 2: 9 / 16, 4: 17 / 32}[dtype.itemsize]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("int8", [True, False])
def test_product(int8, bias, dtype):
    w, mask = numbers(24, 64).to(dtype), mask_2_4(numbers(24, 64, 1))
    b, x = torch.randn(24).to(dtype) if bias else None, torch.randn(2, 5, 64).to(dtype)
    matrix = to_int8(w * mask)
    stored, scale = (matrix.q, matrix.scale) if int8 else (w, None)
    layer = SparseLinear(compress(stored, mask), scale, b)
    expected = matrix.dequantized() if int8 else w.float() * mask
    assert (layer.out_features, layer.in_features) == (24, 64)
    assert torch.equal(layer.dense(), expected) and layer.dense().dtype == torch.float32
    assert torch.equal(layer(x), F.linear(x, expected.to(dtype), b))
    assert not any(isinstance(value, Tensor) for value in vars(layer).values())


def test_torchs_own_product_is_taken_where_there_is_one(monkeypatch):
    """A stand-in for a GPU: the form is made once, and counts in place of ours."""
    made = []

    def form(dense: Tensor) -> Tensor:
        made.append(dense)
        dense.packed, dense.meta = dense[:, :36], None  # values and places in one
        return dense

    w, mask, x = numbers(32, 64), mask_2_4(numbers(32, 64, 1)), torch.randn(2, 3, 64)
    assert not sparsity.torch_multiplies(w[:, ::2].bfloat16())  # no GPU here
    monkeypatch.setattr(sparsity, "torch_multiplies", lambda values: True)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", form)
    layer = SparseLinear(compress(w, mask), bias=torch.ones(32))
    for _ in range(2):
        torch.testing.assert_close(layer(x), F.linear(x, w * mask, torch.ones(32)))
    assert len(made) == 1 and layer.values is made[0].packed and layer.indices is None
    assert torch.equal(layer.dense(), w * mask)


def correlated(n: int, K: int, seed: int = 0) -> Tensor:
    """Inputs whose columns go together."""
    return numbers(n, K // 4, seed) @ numbers(K // 4, K, seed + 1) + numbers(n, K, seed + 2) / 2


@pytest.mark.parametrize("damping", [0, 0.01])
def test_least_squares_find_the_optimum(damping, monkeypatch):
    """Row by row on the inputs themselves, to which damping adds K rows that hold w in place."""
    w, x, mask = numbers(12, 32), correlated(200, 32), mask_2_4(numbers(12, 32, 7))
    monkeypatch.setattr("minillm.quantization.gptq.DAMPING", damping)
    monkeypatch.setattr(sparsity, "SOLVED_BYTES", 5 * 2 * 32 * 32)  # 5 rows at once
    moments = x.T @ x / 200
    solved = least_squares(w, mask, moments)
    held = (200 * damping * moments.diagonal().mean()).sqrt() * torch.eye(32)
    rows = torch.cat((x, held)).double()
    for found, row, kept in zip(solved, w.double(), mask, strict=True):
        best = torch.linalg.lstsq(rows[:, kept], (rows @ row)[:, None]).solution[:, 0]
        torch.testing.assert_close(found[kept], best.float(), atol=1e-3, rtol=1e-3)
        assert (found[~kept] == 0).all()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 90), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_least_squares_are_never_worse(N, K, n, seed):
    """Also with fewer inputs than columns, and columns that are never used, or none of them."""
    w, x, mask = numbers(N, 8 * K, seed), correlated(n, 8 * K, seed), mask_2_4(numbers(N, 8 * K))
    x[:, ::5] = 0
    solved = least_squares(w, mask, x.T @ x / n)
    lost, left = ((x @ (w - v).T).square().sum() for v in (w * mask, solved))
    assert solved.isfinite().all() and left <= lost * 1.001
    for moments in (torch.eye(8 * K), torch.zeros(8 * K, 8 * K)):  # nothing to make up for
        assert torch.equal(least_squares(w, mask, moments), w * mask)


def test_wanda_weighs_columns_and_least_squares_make_up():
    inputs = collect(model := with_large_columns(), IDS)
    sparse = {method: sparsify(model, sequential=False, **options)
              for method, options in METHODS.items()}  # fmt: skip
    for name, linear in matrices(model).items():
        magnitude, wanda, solved = (
            output_error(s.get_submodule(name).dense() - linear.weight, inputs[name].moments)
            for s in sparse.values()
        )
        if name.endswith(("qkv", "gate_up")):  # where the large columns are
            assert wanda < 0.8 * magnitude
        assert solved < 0.8 * wanda
    x = rms_norm(model.embed(IDS), model.layers[0].attn_norm, model.config.norm_eps).flatten(0, 1)
    scores = {"magnitude": model.layers[0].qkv.weight.abs()}
    scores["wanda"] = scores["magnitude"] * torch.linalg.vector_norm(x, dim=0)
    for method, score in scores.items():
        assert torch.equal(sparse[method].layers[0].qkv.dense() != 0, mask_2_4(score))


def test_each_layer_is_calibrated_on_the_pruned_ones_before_it(capfd):
    """Layer 1 on what layer 0, pruned, feeds it, by hand; and not so in one pass."""
    model = with_large_columns()
    sparse = sparsify(model, method="wanda", calibration=IDS, progress=True)
    assert "layers: 100%" in capfd.readouterr().err
    for options, first in (({}, sparse), ({"sequential": False}, model)):
        (stream,) = entering(first.layers[1], lambda first=first: first.hidden(IDS))
        x = rms_norm(stream, model.layers[1].attn_norm, model.config.norm_eps).flatten(0, 1)
        weight = model.layers[1].qkv.weight
        expected = mask_2_4(weight.abs() * torch.linalg.vector_norm(x, dim=0))
        found = sparsify(model, method="wanda", calibration=IDS, **options).layers[1].qkv.dense()
        assert torch.equal(found != 0, expected)


@pytest.mark.parametrize("values", [None, "int8"])
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_dense_model(method, values):
    """A dense model with these matrices says the same; the original is untouched."""
    model, exact = with_large_columns(), with_large_columns()
    before = {name: p.clone() for name, p in model.named_parameters()}
    sparse = sparsify(model, values=values, **METHODS[method])
    for name, layer in matrices(sparse).items():
        assert layer.values.dtype == (torch.float32 if values is None else torch.int8)
        assert ((layer.dense().view(-1, 4) != 0).sum(1) <= 2).all()
        exact.get_submodule(name).weight.data = layer.dense()
        if method != "solved":  # what is kept is what it was, but for half a step
            w = model.get_submodule(name).weight
            error = (layer.dense() - w * (layer.dense() != 0)).abs().max()
            assert error <= (0 if values is None else w.abs().max() / 200)
    with torch.inference_mode():
        torch.testing.assert_close(sparse(IDS), exact(IDS), atol=1e-5, rtol=1e-5)
    assert sparse.head.weight is model.head.weight and sparse.embed.weight is model.embed.weight
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items())


@pytest.mark.parametrize("values", [None, "int8"])
def test_bytes(values):
    """9/16 of the matrices in bfloat16, or 5/8 of a byte a number and a scale a row."""
    model = lively(qkv_bias=True, tie_embeddings=False, **SIZES).bfloat16()
    dense = {name: layer.weight for name, layer in matrices(model).items()}
    sparse = sparsify(model, values=values)
    size, rows = sum(w.numel() for w in dense.values()), sum(len(w) for w in dense.values())
    stored = 2 * size * 9 // 16 if values is None else size * 5 // 8 + 2 * rows
    assert model_bytes(sparse) == model_bytes(model) - 2 * size + stored
    assert sparse(IDS).dtype == sparse.dtype == torch.bfloat16


@pytest.mark.parametrize("values", [None, "int8"])
def test_a_sparse_model_generates_and_serves(values):
    """Cached as uncached, alone as in a batch."""
    sparse = sparsify(lively(size=0.1, **SIZES), values=values)
    prompt = [1, 2, 3, 4, 5]
    expected = generate(sparse, prompt, 8)
    assert expected == generate(sparse, prompt, 8, use_cache=False)
    engine = Engine(sparse, EngineConfig(n_blocks=20))
    ids = [engine.submit(prompt, 8), engine.submit([9, 9], 8)]
    assert engine.run()[ids[0]].tokens == expected


def test_refusals():
    model = lively(**SIZES)
    for options, message in (
        ({"method": "random"}, "method is 'random'; choose one of magnitude, wanda"),
        ({"values": "int4"}, "values is 'int4'; give 'int8', or None for the model's dtype"),
        ({"method": "wanda"}, "Method wanda needs calibration: batches of token ids"),
        ({"recover": True}, "recover=True needs calibration: batches of token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsify(model, **options)
    not_finite, overflow = lively(**SIZES), lively(**SIZES)
    not_finite.layers[1].out.weight[3, 5] = math.nan
    overflow.embed.weight[:] = math.inf
    for bad, message in (
        (sparsify(model), "not a plain Linear but a SparseLinear already; sparsify the model that"),
        (quantize(model, "int8"), "but a Int8Linear already; sparsify the model that this one"),
        (
            prepack(model),
            r"layers\.0\.qkv is not a plain Linear but a PrepackedLinear already; sparsify",
        ),
        (lively(d_ff=36), r"layers\.0\.down has 36 columns; 2:4 sparsity stores multiples of 8"),
        (not_finite, r"layers\.1\.out holds numbers that are not finite; load the model again"),
        (overflow, r"layers\.0\.qkv gets inputs that are not finite; load the model in float32"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsify(bad, **WANDA)


def test_matrices_that_are_refused():
    with pytest.raises(
        ValueError, match=r"shape \(2, 6\); give a matrix whose rows have a multiple of 4"
    ):
        mask_2_4(numbers(2, 6))
    with pytest.raises(ValueError, match="has 12 columns; 2:4 sparsity stores multiples of 8"):
        compress(numbers(2, 12), mask_2_4(numbers(2, 12)))
    wrong = torch.tensor([[1, 1, 1, 0, 1, 0, 0, 0]])
    for mask in (wrong.bool(), wrong[:, :4].bool(), mask_2_4(numbers(1, 8)).int()):
        with pytest.raises(ValueError, match=r"mask is not 2:4 and bool \(1, 8\); make it with"):
            compress(numbers(1, 8), mask)
