"""Quantization: a model with its matrices stored, and multiplied, in 8 or 4 bits.

Sources: Dettmers et al. 2022 (LLM.int8()), sections 2 and 3; Frantar et al. 2022 (GPTQ), section 5,
for groups.
Cost: decode reads the weights once per token, so a quarter of the bytes gives up to four times the
tokens per second. `grid` has the rounding, `linear` the products.

    int8          weights only, one scale per row
    fp8           the same with 8-bit floats
    int4          weights only, groups of 32, 64 or 128 numbers with a scale and a zero
    gptq          the same grid; later columns cancel the rounding errors of earlier ones (`gptq`)
    awq           the same grid; columns that matter are scaled up before rounding (`awq`)
    w8a8          int8 weights and activations (`w8a8`)
    llm_int8      w8a8 with the activations' outliers in bfloat16
    smoothquant   w8a8 with some of the activations' range moved to the weights

The head is always int8, weights only: its rows decide between tokens, and the vocabulary is a large
part of a small model. An embedding tied to it looks up the same int8 rows.
Norms, an untied embedding and the activations stay in bfloat16.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from minillm.model import Decoder, Linear, check_plain, replace_linears
from minillm.quantization import grid
from minillm.quantization.awq import awq
from minillm.quantization.calibration import Inputs, collect, layer_by_layer
from minillm.quantization.gptq import gptq
from minillm.quantization.grid import GROUP_SIZES, QuantizedMatrix
from minillm.quantization.linear import (
    CompactLinear,
    Float8Linear,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    QuantizedLinear,
)
from minillm.quantization.w8a8 import PER, THRESHOLD, OutlierLinear, W8A8Linear, smoothing
from minillm.tools.checks import brief

_GROUPED = ("group_size", "symmetric", "bits")
SCHEMES = {
    "int8": (), "fp8": (), "int4": _GROUPED,
    "gptq": (*_GROUPED, "calibration", "sequential", "progress"),
    "awq": (*_GROUPED, "calibration"), "w8a8": ("per",), "llm_int8": ("threshold", "calibration"),
    "smoothquant": ("alpha", "per", "calibration"),
}  # fmt: skip
"""The options of each scheme."""
_CALIBRATED = ("gptq", "awq", "smoothquant")


@dataclass(frozen=True)
class Options:
    """The options of a scheme; `quantize` explains them."""

    group_size: int = 32
    symmetric: bool = False
    bits: int = 4
    per: str = "token"
    threshold: float = THRESHOLD
    alpha: float = 0.5
    calibration: Tensor | Iterable[Tensor] | None = None
    sequential: bool = True
    progress: bool = False


def quantize(model: Decoder, scheme: str, **options: Any) -> Decoder:
    """A new model with its matrices stored in fewer bits; `model` is untouched.

    scheme and its options:
    int4, gptq, awq: group_size, 32, 64 or 128; symmetric, whether the grid is centred on 0; bits,
    how many of the 4 stored bits are used, 2 to 4.
    w8a8, smoothquant: per, "token" or "tensor": which activations share a scale. With "tensor" a
    token's result depends on the other tokens of the batch, later ones included.
    smoothquant: alpha, from 0 to 1, how much of the activations' range moves to the weights.
    llm_int8: threshold, the least magnitude of an outlier.
    gptq, awq and smoothquant need calibration: a batch of token ids, a tensor (B, T), or several.
    It is optional for llm_int8: the outlier columns are then known beforehand, and their weights
    stored in bfloat16.
    gptq: sequential, whether each layer is calibrated on what the quantized layers before it give,
    as in the paper. False leaves that out: every layer sees the inputs of the original model, in
    half the time, and does not know the errors that reach it. progress, whether to show a bar.
    Raises ValueError for an unknown scheme or option, a group size that does not divide a matrix's
    columns, missing calibration, numbers that are not finite, matrices that are not plain `Linear`,
    and, for 4 bits on a CPU, rows that are not a multiple of 16.
    """
    given = _checked(scheme, options)
    check_plain(model, "quantize")
    if scheme == "gptq":
        return _layer_by_layer(model, given)
    inputs: dict[str, Inputs] = {}
    if given.calibration is not None:
        inputs = collect(model, given.calibration, moments=scheme == "awq")
    return with_modules(
        model, lambda name, linear: _module(scheme, given, name, linear, inputs.get(name))
    )


def _layer_by_layer(model: Decoder, given: Options) -> Decoder:
    module = partial(_module, "gptq", given)  # (name, linear, inputs)
    for name, linear in model.layers.named_modules(prefix="layers"):
        if isinstance(linear, Linear):
            check_groups(name, linear.weight, given.group_size)  # before hours of calibration
    small = with_modules(
        model, lambda name, linear: module(name, linear, None) if name == "head" else linear
    )
    layer_by_layer(
        model, small, given.calibration, module,
        sequential=given.sequential, progress=given.progress,
    )  # fmt: skip
    return small


def _module(
    scheme: str, given: Options, name: str, linear: Linear, inputs: Inputs | None
) -> QuantizedLinear:
    """The module that replaces `linear`. inputs: its statistics, if there is calibration."""
    weight, bias = linear.weight.detach(), linear.bias  # (out, in), (out,) or None
    if scheme in ("int8", "int4") or name == "head":
        return weights_only(on_grid(name, weight, scheme, given), bias)
    if scheme == "fp8":
        return Float8Linear(grid.to_float8(weight), bias)
    if scheme == "w8a8":
        return W8A8Linear(grid.to_int8(weight), bias, per=given.per)
    if scheme == "llm_int8" and inputs is None:
        return OutlierLinear(grid.to_int8(weight), bias, threshold=given.threshold)
    assert inputs is not None  # `_checked` asked for calibration
    if scheme == "llm_int8":
        return OutlierLinear.with_known(weight, bias, inputs, given.threshold)
    if scheme == "smoothquant":
        input_scale = smoothing(weight, inputs, given.alpha)  # (in,), 1 / s
        return W8A8Linear(  # (x / s) (W s)ᵀ
            grid.to_int8(weight / input_scale.float()), bias, input_scale, per=given.per
        )
    check_groups(name, weight, given.group_size)
    size, bits, symmetric = given.group_size, given.bits, given.symmetric
    if scheme == "gptq":
        matrix = gptq(weight, inputs.moments, size, bits=bits, symmetric=symmetric)
        return Int4Linear(matrix, bias)
    matrix, input_scale = awq(weight, inputs, size, bits=bits, symmetric=symmetric)
    return Int4Linear(matrix, bias, input_scale)


def _checked(scheme: str, options: dict[str, Any]) -> Options:
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise ValueError(f"scheme is {brief(scheme)}; choose one of {', '.join(SCHEMES)}.")
    for name in options:
        if name not in SCHEMES[scheme]:
            known = ", ".join(SCHEMES[scheme]) or "none"
            raise ValueError(f"Scheme {scheme} has no option {name}; it has {known}.")
    given = Options(**options)
    if type(given.group_size) is not int or given.group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {brief(given.group_size)}; choose one of 32, 64 and 128.")
    if type(given.bits) is not int or given.bits not in (2, 3, 4):
        raise ValueError(f"bits is {brief(given.bits)}; choose 2, 3 or 4.")
    for name in ("symmetric", "sequential", "progress"):
        if type(getattr(given, name)) is not bool:
            raise ValueError(f"{name} is {brief(getattr(given, name))}; choose True or False.")
    if given.per not in PER:
        raise ValueError(f"per is {brief(given.per)}; choose {' or '.join(PER)}.")
    for name, value, least, most in (
        ("alpha", given.alpha, 0, 1),
        ("threshold", given.threshold, 0, float("inf")),
    ):
        # type(), since True is an int to isinstance; a NaN fails the comparison.
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError(f"{name} is {brief(value)}; choose a number from {least} to {most}.")
    if scheme in _CALIBRATED and given.calibration is None:
        raise ValueError(
            f"Scheme {scheme} needs calibration: batches of token ids, tensors (B, T)."
        )
    return given


def check_groups(name: str, weight: Tensor, group_size: int) -> None:
    """ValueError unless `in` of a matrix (out, in) is a multiple of group_size."""
    n_columns = weight.shape[1]
    if n_columns % group_size:
        smaller = [str(size) for size in GROUP_SIZES if n_columns % size == 0]
        advice = f"take group_size {' or '.join(smaller)}" if smaller else "take int8"
        raise ValueError(
            f"{name} has {n_columns} columns, which groups of {group_size} do not divide; {advice}."
        )


def on_grid(
    name: str, weight: Tensor, scheme: str, options: Options | None = None
) -> QuantizedMatrix:
    """The matrix weight (out, in) in int8 or int4; ValueError if groups don't divide its rows."""
    options = options or Options()
    if scheme == "int8" or name == "head":
        return grid.to_int8(weight)
    check_groups(name, weight, options.group_size)
    return grid.to_int4(weight, options.group_size, symmetric=options.symmetric, bits=options.bits)


def weights_only(matrix: QuantizedMatrix, bias: Tensor | None) -> QuantizedLinear:
    """The module for a matrix in int8 or int4."""
    return (Int8Linear if matrix.zero is None else Int4Linear)(matrix, bias)


def with_modules(model: Decoder, module: Callable[[str, Linear], nn.Module]) -> Decoder:
    """A new model: `module(name, linear)` replaces every Linear, the rest is in bfloat16.

    A Linear that is returned itself stays as it is.
    """
    quantized = replace_linears(model, module)
    if model.config.tie_embeddings:
        quantized.embed = Int8Embedding(quantized.head)
    for part in quantized.modules():
        if type(part) is Linear:
            continue
        for name, p in list(part.named_parameters(recurse=False)):
            # A new Parameter even in bfloat16: the original's may require gradients.
            setattr(part, name, nn.Parameter(p.detach().bfloat16(), requires_grad=False))
    return quantized


def stored_as(model: Decoder) -> str:
    """How the matrices are stored, in words: "int4 weights, int8 head", or their dtype."""
    matrix = model.layers[0].down
    if isinstance(matrix, CompactLinear):
        return matrix.stored
    return f"{model.dtype} weights".removeprefix("torch.")


def decode_bytes(model: Decoder, context: int) -> int:
    """Bytes that one decoded token reads: all matrices and norms, and `context` cached tokens.

    `costs.decode_bytes` for what a model really stores. An untied embedding is left out: only one
    of its rows is read.
    """
    L, K, D = model.kv_shape
    tied = model.config.tie_embeddings
    embedding = 0 if tied else model_bytes(model.embed)
    return model_bytes(model) - embedding + 2 * L * K * D * context * model.norm.itemsize


def model_bytes(model: nn.Module) -> int:
    """Bytes that a model stores, scales and zeros included; shared tensors count once."""
    storages = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
