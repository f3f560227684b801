"""Prepacked weights: the same numbers, the same model underneath.

And a refusal where they would not help.
"""

import pytest
import torch
from models import tiny_config

from minillm import Decoder, cpu_products, merge_kv_heads, prepack, prepacked
from minillm.measure import multiplies_bfloat16
from minillm.model import Linear
from minillm.prepacked import PrepackedLinear

DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not multiplies_bfloat16(torch.device("cpu")), reason="needs a CPU with AVX-512"
        ),
    ),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (7, 33), (64, 960), (576, 192)])
@pytest.mark.parametrize(
    "shape",
    [(1,), (4,), (1, 16), (2, 7), (64,), (65,), (3, 50), (1, 512)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_product(shape, n_in, n_out, bias, dtype):
    torch.manual_seed(0)
    linear = Linear(n_in, n_out, bias=bias)
    if bias:
        torch.nn.init.normal_(linear.bias)
    linear, x = linear.to(dtype), torch.randn(*shape, n_in).to(dtype)
    packed = PrepackedLinear(linear)
    with torch.inference_mode():
        got = packed(x)
        exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    assert got.shape == exact.shape and got.dtype == dtype
    error = 1e-6 if dtype == torch.float32 else 2**-8
    assert (got - exact).abs().max() <= error * (1 + exact.abs().max())


@pytest.mark.parametrize("cpu", ["AMD EPYC", "Intel(R) Xeon(R) Processor, family 6 model 207"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_prepacked_copy_is_used_unless_gradients_are_wanted(dtype, cpu, monkeypatch):
    """Spoiling that copy must show for any number of tokens, and never with gradients.

    On an Intel CPU in float32, it must not show for up to three.
    """
    monkeypatch.setattr("minillm.prepacked.cpu_name", lambda: cpu)
    monkeypatch.setattr(prepacked, "_rows_for_mkl", prepacked._rows_for_mkl.__wrapped__)
    linear = Linear(16, 16, bias=False).to(dtype)
    packed = PrepackedLinear(linear)
    zeros = torch.zeros(16, 16, dtype=dtype)
    packed._packed = cpu_products.onednn_layout(zeros, 64)
    few = 3 if "Intel" in cpu and dtype == torch.float32 else 0
    with torch.inference_mode():
        used = [not packed(torch.ones(n, 16, dtype=dtype)).any() for n in range(1, 100)]
        assert used == [n > few for n in range(1, 100)]
        assert packed(torch.ones(2, 2, 16, dtype=dtype)).any() == (not used[3])
    packed(torch.ones(8, 16, dtype=dtype)).sum().backward()
    assert linear.weight.grad.abs().sum() > 0


def test_not_contiguous_input():
    linear = Linear(8, 5, bias=False)
    x = torch.randn(8, 12).T
    with torch.inference_mode():
        torch.testing.assert_close(PrepackedLinear(linear)(x), linear(x))


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_are_shared_and_the_model_untouched(tied):
    model = Decoder(tiny_config(tie_embeddings=tied, qkv_bias=True)).eval()
    packed = prepack(model)
    assert all(type(module) is not PrepackedLinear for module in model.modules())
    n_packed = sum(type(module) is PrepackedLinear for module in packed.modules())
    assert n_packed == 4 * model.config.n_layers + 1
    assert not packed.training and packed.config == model.config
    ours, theirs = dict(packed.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(packed(tokens), model(tokens))


def test_other_modules_stay():
    class Doubled(Linear):
        """Stands for a quantized layer, say."""

    model = Decoder(tiny_config())
    model.head = Doubled(24, 97, bias=False)
    assert type(prepack(model).head) is Doubled


def test_refusals(monkeypatch):
    model = Decoder(tiny_config())
    message = r"float32 and bfloat16 on a CPU, and the model is torch\.float16 on cpu"
    with pytest.raises(ValueError, match=message):
        prepack(Decoder(tiny_config()).half())
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: False)
    with pytest.raises(ValueError, match="in bfloat16 needs a CPU with AVX-512"):
        prepack(Decoder(tiny_config()).bfloat16())
    with pytest.raises(ValueError, match="on meta; use it as it is"):
        prepack(Decoder(tiny_config()).to("meta"))
    with pytest.raises(ValueError, match="already prepacked; use it as it is"):
        prepack(prepack(model))
    prepack(merge_kv_heads(model, 1))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs oneDNN"):
        prepack(model)
