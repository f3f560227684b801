"""W8A8: activations in 8 bits as well, so that whole numbers are multiplied with whole numbers.

Sources: Dettmers et al. 2022 (LLM.int8()), sections 2.1 and 3; Xiao et al. 2023 (SmoothQuant),
sections 3 and 4, equations 3 and 4.
Cost: twice the FLOPs of 16 bits where the chip has an int8 product (VNNI or AMX on a CPU, the
matrix units of a GPU), so it helps a prefill, which weights alone do not. Each product first rounds
its input, which costs a pass over it.

    y = s_x · s_w · (q_x q_wᵀ)        q: int8, sums in int32; s_w one scale for each row of W

The trouble is s_x. A few columns of the activations (outliers) are up to hundreds of times as large
as the others; with one scale for all of x, most of it is then rounded to 0, 1 and -1.

    one scale a row of x ("token")   outliers of one token no longer hurt the others
    llm_int8                         outlier columns are taken out and multiplied in bfloat16
    smoothquant                      columns divided by s, W's multiplied by it: some of the range
                                     moves to the weights, which have room

A scale for all of x, and outliers that are looked for in each x, make a token's result depend on
the tokens beside it. So only a scale for each row, with known outliers, gives a request the same
answer in any batch.
`_int_mm` is PyTorch's int8 product; on a GPU it wants more than 16 rows, and gets zeros. On a CPU
without an int8 product float32 takes its place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm import cpu_products
from minillm.quantization.calibration import Inputs
from minillm.quantization.grid import QuantizedMatrix, divisor, to_int8
from minillm.quantization.linear import Int8Linear

THRESHOLD = 6.0
"""From this magnitude on a number is an outlier (Dettmers et al. 2022, section 3.2)."""
PER = ("token", "tensor")


class W8A8Linear(Int8Linear):
    """Weights and activations in int8. per: whether each row of x has a scale, or all x one."""

    stored = "int8 weights and activations"

    def __init__(
        self,
        matrix: QuantizedMatrix,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        *,
        per: str = "token",
    ):
        super().__init__(matrix, bias, input_scale)
        self.per = per

    def product(self, x: Tensor) -> Tensor:
        q, scale = rounded(x, self.per)
        return (int8_product(q, self.weight) * self.scale.float()).mul_(scale).to(x.dtype)


class OutlierLinear(W8A8Linear):
    """LLM.int8(): columns of x that hold a magnitude of `threshold` are multiplied in bfloat16.

    outliers (n,) and their weights (N, n), if they are known beforehand; else the columns are
    looked for in each x, and their weights are those of the int8 matrix.
    """

    stored = "int8 weights and activations, outliers in bfloat16"

    def __init__(
        self,
        matrix: QuantizedMatrix,
        bias: Tensor | None = None,
        *,
        threshold: float = THRESHOLD,
        outliers: Tensor | None = None,
        outlier_weight: Tensor | None = None,
    ):
        super().__init__(matrix, bias)
        self.threshold = threshold
        self.register_buffer("outliers", outliers)
        self.register_buffer("outlier_weight", outlier_weight)

    @classmethod
    def with_known(
        cls, weight: Tensor, bias: Tensor | None, inputs: Inputs, threshold: float
    ) -> "OutlierLinear":
        """W (N, K) without the columns that are outliers on calibration text, and those apart."""
        outliers = (inputs.largest >= threshold).nonzero()[:, 0]
        rest = to_int8(weight.index_fill(1, outliers, 0))
        kept = weight[:, outliers].bfloat16()
        return cls(rest, bias, threshold=threshold, outliers=outliers, outlier_weight=kept)

    def dequantized(self) -> Tensor:
        weight = super().dequantized()
        if self.outliers is not None:
            weight[:, self.outliers] = self.outlier_weight.float()
        return weight

    def product(self, x: Tensor) -> Tensor:
        columns, w = self.outliers, self.outlier_weight
        if columns is None:
            columns = (x.abs().amax(0) >= self.threshold).nonzero()[:, 0]
            w = self.weight[:, columns].to(x.dtype) * self.scale[:, None]
        if not len(columns):
            return super().product(x)
        return super().product(x.index_fill(1, columns, 0)) + F.linear(x[:, columns], w)


def rounded(x: Tensor, per: str = "token") -> tuple[Tensor, Tensor]:
    """x (M, K) as int8, with its scales (M, 1) or (1, 1) in float32."""
    largest = x.abs().amax(1, keepdim=True).float()
    scale = (largest if per == "token" else largest.amax(0, keepdim=True)) / 127
    return (x / divisor(scale)).round_().to(torch.int8), scale


def int8_product(q: Tensor, weight: Tensor) -> Tensor:
    """q (M, K) times weight (N, K), both int8: (M, N), summed exactly in int32."""
    M = len(q)
    if q.is_cuda:
        q = F.pad(q, (0, 0, 0, max(0, 32 - M)))
    elif not cpu_products.has_int8():
        # Here `_int_mm` multiplies number by number. A sum of 1,024 products is at most 2²⁴, so
        # products in float32 are exact, too, and far faster.
        parts = zip(q.split(1024, 1), weight.split(1024, 1), strict=True)
        return sum((a.float() @ w.float().T).int() for a, w in parts)
    return cpu_products.int8_matmul(q, weight)[:M]


def smoothing(weight: Tensor, inputs: Inputs, alpha: float) -> Tensor:
    """What SmoothQuant multiplies the columns of x with, and divides those of W by, (K,).

    1 / s with s = max|x|^α / max|w|^(1 - α) for each column: with α = 1 all of the activations'
    range moves to the weights, with 0 the weights' moves to the activations.
    """
    x, w = inputs.largest.clamp(min=1e-5), weight.float().abs().amax(0).clamp(min=1e-5)
    return (w ** (1 - alpha) / x**alpha).bfloat16()
