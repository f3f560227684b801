"""Matrices in 8 or 4 bits, multiplied as they are stored: the modules that replace a Linear.

Sources: Dettmers et al. 2022 (LLM.int8()), section 3.1; Micikevicius et al. 2022 (FP8 formats for
deep learning), section 3, for e4m3.
Cost: a product with few input rows reads the matrix once, so its bytes set its time. Activations
stay in bfloat16. No chip multiplies int8 with 16-bit floats, so the weights are converted to
bfloat16 in registers, on their way into the product.

    Int8Linear     one byte per number, one scale per row
    Float8Linear   the same with 8-bit floats: 4 bits of exponent, 3 of mantissa
    Int4Linear     two numbers per byte, a scale and a zero per group

On a CPU the products are PyTorch's (`minillm.cpu_products`). They are fast for a few rows of
bfloat16, and a hundred times slower with float32, which is therefore refused. On a GPU
`kernels/few_rows.py` multiplies up to 64 rows; more are multiplied in 16 bits.
Not here: rounding the activations as well (`minillm.quantization.w8a8`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cpu_products import (
    bfloat16_linear,
    int4_layout,
    int4_weight_linear,
    int8_weight_linear,
)
from minillm.kernels.availability import on_device_of, why_not_here
from minillm.quantization import grid
from minillm.quantization.grid import QuantizedMatrix

MOST_ROWS = 16
"""On a CPU, inputs of more rows than this are multiplied with an int8 matrix in bfloat16."""


class CompactLinear(nn.Module):
    """What replaces a Linear and stores its matrix in fewer bytes."""

    stored: str  # how, in words


class QuantizedLinear(CompactLinear, ABC):
    """(x · input_scale) Wᵀ + bias for a quantized W (out, in). It stays on the device of W.

    input_scale (in,): multiplies the columns of x first, if given.
    """

    input_scale: Tensor | None

    def __init__(
        self, matrix: QuantizedMatrix, bias: Tensor | None = None, input_scale: Tensor | None = None
    ):
        super().__init__()
        self.out_features, self.in_features = matrix.q.shape
        bias = None if bias is None else bias.detach().bfloat16()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        if input_scale is None:
            self.input_scale = None
        else:
            self.register_buffer("input_scale", input_scale.bfloat16())

    @abstractmethod
    def dequantized(self) -> Tensor:
        """The matrix (out, in) that the product uses, in float32."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x (rows, in) in bfloat16 to (rows, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in) in bfloat16 to (…, out); TypeError for another dtype."""
        if x.dtype != torch.bfloat16:
            raise TypeError(
                f"A quantized model computes in bfloat16, and got {x.dtype}; leave its dtype as it "
                "is."
            )
        shape = x.shape
        if self.input_scale is not None:
            x = x * self.input_scale
        x = x.reshape(-1, shape[-1]).contiguous()  # (rows, in), as the kernels read it
        if x.is_cuda:
            with on_device_of(x):
                out = self.product(x)
        else:  # no context manager: it costs as much as a small operation
            out = self.product(x)
        if self.bias is not None:
            out += self.bias
        return out.view(*shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        # `model.float()` and the like change nothing here. Another device is refused: the order in
        # which an int4 matrix is packed depends on it.
        found = fn(self.weight)
        if (found.device, found.dtype) != (self.weight.device, self.weight.dtype):
            raise ValueError(
                f"A quantized model stays on the device and in the dtype that it was made for, "
                f"{self.weight.device} here; quantize the original there."
            )
        return self

    def few_rows(self, x: Tensor) -> bool:
        """Whether the Triton kernel can compute this product."""
        if not x.is_cuda or why_not_here(x, "few_rows", "") is not None:
            return False
        from minillm.kernels.few_rows import MAX_ROWS

        return len(x) <= MAX_ROWS


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy that starts at a multiple of 64 bytes, as `int8_weight_linear` needs it.

    Tensors that were read from a file can start anywhere.
    """
    return x if x.data_ptr() % 64 == 0 else x.clone()


class Int8Linear(QuantizedLinear):
    """One byte per number, one scale per row."""

    stored = "int8 weights"

    def __init__(
        self, matrix: QuantizedMatrix, bias: Tensor | None = None, input_scale: Tensor | None = None
    ):
        super().__init__(matrix, bias, input_scale)
        self.register_buffer("weight", _aligned(matrix.q))
        self.register_buffer("scale", matrix.scale)

    def dequantized(self) -> Tensor:
        return QuantizedMatrix(self.weight, self.scale).dequantized()

    def product(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) <= MOST_ROWS and self.in_features % 16 == 0:
            return int8_weight_linear(_aligned(x), self.weight, self.scale)
        if self.few_rows(x):
            from minillm.kernels.few_rows import few_rows_linear

            return few_rows_linear(x, self.weight, self.scale)
        return self.in_16_bits(x)

    def in_16_bits(self, x: Tensor) -> Tensor:
        """The product with a copy of the matrix in floats, made for this call."""
        return bfloat16_linear(x, self.weight) * self.scale


class Float8Linear(Int8Linear):
    """One 8-bit float (e4m3) per number, one scale per row. On a CPU it saves memory, not time."""

    stored = "float8 weights"

    def product(self, x: Tensor) -> Tensor:
        if self.few_rows(x) and torch.cuda.get_device_capability(x.device) >= (8, 9):
            return super().product(x)
        return self.in_16_bits(x)


class Int4Linear(QuantizedLinear):
    """Two numbers per byte, a scale and a zero per group."""

    stored = "int4 weights, int8 head"

    def __init__(
        self, matrix: QuantizedMatrix, bias: Tensor | None = None, input_scale: Tensor | None = None
    ):
        super().__init__(matrix, bias, input_scale)
        assert matrix.zero is not None
        if matrix.q.device.type == "cpu" and len(matrix.q) % 16:
            raise ValueError(
                f"A matrix of {len(matrix.q)} rows cannot be multiplied in 4 bits on a CPU, which "
                "needs a multiple of 16 rows; use int8."
            )
        self.group_size = matrix.group_size
        if matrix.q.device.type == "cpu":  # in the order that PyTorch's product reads
            packed = int4_layout(matrix.q)
            self.register_buffer("weight", packed)
            both = torch.stack((matrix.scale, matrix.zero), -1)  # (out, in / group, 2)
            self.register_buffer("scale_zero", both.transpose(0, 1).contiguous())
            # Looking up a buffer costs a microsecond, and a decode step has 120 products.
            self._operands = self.weight, self.group_size, self.scale_zero
        else:
            self.register_buffer("weight", grid.pack_blocks(matrix.q))
            self.register_buffer("scale", matrix.scale)
            self.register_buffer("zero", matrix.zero)

    def dequantized(self) -> Tensor:
        if self.weight.device.type == "cpu":
            # Times the identity: each output is one number of the matrix, rounded to bfloat16.
            eye = torch.eye(self.in_features, dtype=torch.bfloat16)
            return self.product(eye).T.float()
        return self.matrix().dequantized()

    def matrix(self) -> QuantizedMatrix:
        """The stored numbers and scales, exactly, in the plain order."""
        if self.weight.device.type != "cpu":
            return QuantizedMatrix(grid.unpack_blocks(self.weight), self.scale, self.zero)
        scale, zero = self.scale_zero.transpose(0, 1).unbind(-1)
        q = torch.empty(self.out_features * self.in_features, dtype=torch.uint8)
        q[_packed_order(self.out_features, self.in_features)] = _nibbles(self.weight)
        return QuantizedMatrix(q.view(self.out_features, -1), scale.contiguous(), zero.contiguous())

    def product(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return int4_weight_linear(x, *self._operands)
        if self.few_rows(x):
            from minillm.kernels.few_rows import few_rows_linear

            return few_rows_linear(x, self.weight, self.scale, self.zero)
        return F.linear(x, self.dequantized().to(x.dtype))


def _nibbles(packed: Tensor) -> Tensor:
    return grid.unpack(packed.flatten())


@lru_cache(maxsize=8)
def _packed_order(n_out: int, n_in: int) -> Tensor:
    """For each place of `int4_layout`'s bytes, which number of a matrix (out, in) it stores.

    The order depends on the CPU, so it is measured: each number's own index is packed, 4 bits of it
    at a time, and read back.
    """
    index = torch.arange(n_out * n_in)
    found = torch.zeros_like(index)
    for shift in range(0, (n_out * n_in - 1).bit_length(), 4):
        digits = (index >> shift & 15).view(n_out, n_in)
        found |= _nibbles(int4_layout(digits)).long() << shift
    return found


class Int8Embedding(nn.Module):
    """An embedding tied to an int8 head: it looks up the rows of the head."""

    def __init__(self, head: Int8Linear):
        super().__init__()
        self.register_buffer("weight", head.weight)
        self.register_buffer("scale", head.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].to(self.scale.dtype) * self.scale[tokens][..., None]
