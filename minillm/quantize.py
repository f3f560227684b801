"""Quantization: a model whose matrices are stored in 8 or 4 bits and computed from as they are.

Sources: Dettmers et al. 2022 (LLM.int8()), section 2; Frantar et al. 2022 (GPTQ), section 2, for
groups.
Cost: decode reads the weights once a token, so a quarter of the bytes is up to four times the
tokens per second; the arithmetic stays in bfloat16. What is lost is in `minillm.grid`.

    int8   weights only, one scale a row
    int4   weights only, groups of 32, 64 or 128 numbers with a scale and a zero
    gptq   the same grid, its errors made up for by the columns after (`minillm.gptq`)
    awq    the same grid, with the columns that matter enlarged before (`minillm.awq`)

The head is always int8: its rows decide between tokens, and a vocabulary is a large part of a small
model. An embedding tied to it shares its int8 rows, and is looked up from them. Norms and an
embedding of its own stay in bfloat16. Activations are bfloat16 as well: on a CPU the products of
PyTorch are fast with them, and a hundred times slower with float32.
On a GPU `kernels/few_rows.py` multiplies up to 64 rows; more are multiplied in 16 bits.
Not here: quantized activations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm import grid
from minillm.awq import awq
from minillm.calibration import collect
from minillm.checks import brief
from minillm.gptq import gptq
from minillm.grid import GROUP_SIZES, Grid
from minillm.kernels import on_device_of, why_not_here
from minillm.model import Decoder, Linear, replace_linears

_GROUPED = ("group_size", "symmetric", "bits")
SCHEMES = {
    "int8": (), "int4": _GROUPED, "gptq": (*_GROUPED, "calibration"),
    "awq": (*_GROUPED, "calibration"),
}  # fmt: skip
"""Each with its options."""
MOST_ROWS = 16
"""On a CPU, with more rows than this an int8 matrix is multiplied in bfloat16."""


class QuantizedLinear(nn.Module, ABC):
    """(x · columns) Wᵀ + bias for W (N, K) on a grid. Made for the device that the grid is on.

    columns (K,): what each column of x is multiplied with first, if anything.
    """

    def __init__(self, matrix: Grid, bias: Tensor | None = None, columns: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = matrix.q.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("columns", None if columns is None else columns.bfloat16())

    @abstractmethod
    def dequantized(self) -> Tensor:
        """The matrix (N, K) that is computed with, in float32."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x (M, K) bfloat16 to (M, N)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            raise TypeError(
                f"A quantized model computes in bfloat16, and got {x.dtype}; leave its dtype as it "
                "is."
            )
        rows = x.reshape(-1, self.in_features)
        rows = rows if self.columns is None else rows * self.columns
        with on_device_of(x):
            out = self.product(rows)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def few_rows(self, x: Tensor) -> bool:
        """Whether the Triton kernel takes this product."""
        from minillm.kernels.few_rows import MAX_ROWS

        return len(x) <= MAX_ROWS and why_not_here(x, "few_rows", "") is None


class Int8Linear(QuantizedLinear):
    """One byte a number, one scale a row."""

    def __init__(self, matrix: Grid, bias: Tensor | None = None, columns: Tensor | None = None):
        super().__init__(matrix, bias, columns)
        self.register_buffer("weight", matrix.q)
        self.register_buffer("scale", matrix.scale)

    def dequantized(self) -> Tensor:
        return Grid(self.weight, self.scale).dequantized()

    def product(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) <= MOST_ROWS:
            return torch._weight_int8pack_mm(x, self.weight, self.scale)
        if x.is_cuda and self.few_rows(x):
            from minillm.kernels.few_rows import few_rows_linear

            return few_rows_linear(x, self.weight, self.scale)
        return F.linear(x, self.weight.to(x.dtype)) * self.scale


class Int4Linear(QuantizedLinear):
    """Two numbers a byte, a scale and a zero for each group."""

    def __init__(self, matrix: Grid, bias: Tensor | None = None, columns: Tensor | None = None):
        super().__init__(matrix, bias, columns)
        assert matrix.zero is not None
        self.group_size = matrix.group_size
        if matrix.q.device.type == "cpu":  # in the order in which PyTorch's product reads them
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(matrix.q.int(), 1)
            self.register_buffer("weight", packed)
            both = torch.stack((matrix.scale, matrix.zero), -1)  # (N, K / group, 2)
            self.register_buffer("scale_zero", both.transpose(0, 1).contiguous())
        else:
            self.register_buffer("weight", grid.pack(matrix.q))
            self.register_buffer("scale", matrix.scale)
            self.register_buffer("zero", matrix.zero)

    def dequantized(self) -> Tensor:
        if self.weight.device.type == "cpu":
            # A product with the identity gives each number once, and nothing is rounded but it.
            eye = torch.eye(self.in_features, dtype=torch.bfloat16)
            return self.product(eye).T.float()
        return Grid(grid.unpack(self.weight), self.scale, self.zero).dequantized()

    def product(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return torch.ops.aten._weight_int4pack_mm_for_cpu(
                x, self.weight, self.group_size, self.scale_zero
            )
        if self.few_rows(x):
            from minillm.kernels.few_rows import few_rows_linear

            return few_rows_linear(x, self.weight, self.scale, self.zero)
        return F.linear(x, self.dequantized().to(x.dtype))


class Int8Embedding(nn.Module):
    """Rows of an int8 head, looked up: tied, as the model had them."""

    def __init__(self, head: Int8Linear):
        super().__init__()
        self.register_buffer("weight", head.weight)
        self.register_buffer("scale", head.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].to(self.scale.dtype) * self.scale[tokens][..., None]


def quantize(model: Decoder, scheme: str, **options: Any) -> Decoder:
    """A new model with its matrices stored in fewer bits; `model` is untouched.

    scheme: "int8", "int4", "gptq" or "awq". Options of all but int8: group_size, 32, 64 or 128;
    symmetric, whether the grid is centred on 0; bits, 2 to 4, of the 4 that are stored. gptq and
    awq need calibration: a batch of token ids, a tensor (B, T), or several.
    Raises ValueError for an unknown scheme or option, a group size that does not divide a matrix's
    columns, missing calibration, numbers that are not finite, and a model quantized already.
    """
    given = _checked(scheme, options)
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError("The model is quantized already; quantize the one that it was made from.")
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not bool(module.weight.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite; load the model again.")
    inputs = None if given.calibration is None else collect(model, given.calibration)

    def matrix(name: str, linear: Linear) -> tuple[Grid, Tensor | None]:
        weight = linear.weight.detach()
        if scheme in ("int8", "int4") or name == "head":
            return on_grid(name, weight, scheme, given), None
        assert inputs is not None
        _check_groups(name, weight, given)
        options = {"bits": given.bits, "symmetric": given.symmetric}
        if scheme == "gptq":
            return gptq(weight, inputs[name].moments, given.group_size, **options), None
        return awq(weight, inputs[name], given.group_size, **options)

    return with_matrices(model, matrix)


@dataclass(frozen=True)
class Options:
    """Of a scheme, see `quantize`."""

    group_size: int = 32
    symmetric: bool = False
    bits: int = 4
    calibration: Tensor | Iterable[Tensor] | None = None


def _checked(scheme: str, options: dict[str, Any]) -> Options:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {brief(scheme)}; choose one of {', '.join(SCHEMES)}.")
    for name in options:
        if name not in SCHEMES[scheme]:
            known = ", ".join(SCHEMES[scheme]) or "none"
            raise ValueError(f"Scheme {scheme} has no option {name}; it has {known}.")
    given = Options(**options)
    if given.group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {brief(given.group_size)}; choose one of 32, 64 and 128.")
    if given.bits not in (2, 3, 4):
        raise ValueError(f"bits is {brief(given.bits)}; choose 2, 3 or 4.")
    if "calibration" in SCHEMES[scheme] and given.calibration is None:
        raise ValueError(
            f"Scheme {scheme} needs calibration: batches of token ids, tensors (B, T)."
        )
    return given


def _check_groups(name: str, weight: Tensor, options: Options) -> None:
    if weight.shape[1] % options.group_size:
        raise ValueError(
            f"{name} has {weight.shape[1]} columns, which groups of {options.group_size} do not "
            "divide; choose a smaller group_size."
        )


def on_grid(name: str, weight: Tensor, scheme: str, options: Options | None = None) -> Grid:
    """A matrix (N, K) of that name, rounded; ValueError if groups don't divide K."""
    options = options or Options()
    if scheme == "int8" or name == "head":
        return grid.to_int8(weight)
    _check_groups(name, weight, options)
    return grid.to_int4(weight, options.group_size, symmetric=options.symmetric, bits=options.bits)


def with_matrices(
    model: Decoder, matrix: Callable[[str, Linear], tuple[Grid, Tensor | None]]
) -> Decoder:
    """A model with a quantized module in place of every Linear, and the rest in bfloat16.

    matrix(name, linear): the grid, and what its input is multiplied with (K,), or None.
    """

    def replacement(name: str, linear: Linear) -> nn.Module:
        found, columns = matrix(name, linear)
        bias = None if linear.bias is None else linear.bias.detach().bfloat16()
        return (Int8Linear if found.zero is None else Int4Linear)(found, bias, columns)

    quantized = replace_linears(model, replacement)
    if model.config.tie_embeddings:
        quantized.embed = Int8Embedding(quantized.head)
    for module in quantized.modules():
        for name, p in module._parameters.items():
            if p is not None and p.dtype != torch.bfloat16:
                module._parameters[name] = nn.Parameter(p.detach().bfloat16(), requires_grad=False)
    return quantized.requires_grad_(False)


def stored_as(model: Decoder) -> str:
    """In words: "int4 weights (head int8)", or the dtype of the weights."""
    kinds = {type(layer.down) for layer in model.layers}
    if kinds == {Int4Linear}:
        return "int4 weights, int8 head"
    return (
        "int8 weights" if kinds == {Int8Linear} else f"{model.dtype} weights".removeprefix("torch.")
    )


def decode_bytes(model: Decoder, context: int) -> int:
    """Bytes that one decoded token reads: all matrices and norms, and `context` cached tokens.

    `costs.decode_bytes` for what a model really stores. Of an embedding of its own it is one row,
    which is left out.
    """
    L, K, D = model.kv_shape
    tied = model.config.tie_embeddings
    embedding = 0 if tied else model_bytes(model.embed)
    return model_bytes(model) - embedding + 2 * L * K * D * context * model.norm.itemsize


def model_bytes(model: nn.Module) -> int:
    """Bytes of all that a model stores, scales and zeros included; what is shared counts once."""
    storages = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
