"""W8A8: weights and activations in 8 bits, so that the product is one of whole numbers.

Sources: Dettmers et al. 2022 (LLM.int8()), sections 2.1 and 3; Xiao et al. 2023 (SmoothQuant),
sections 3 and 4, equations 3 and 4.
Cost: twice the FLOP/s of 16 bits where the chip has an int8 product (VNNI or AMX on a CPU, the
matrix units of a GPU). That speeds up a prefill, which rounding only the weights does not. Each
product first rounds its input: one more pass over it.

    y = s_x · s_w · (q_x q_wᵀ)        q: int8, sums in int32; s_w: one scale per row of W

The trouble is s_x. A few columns of the activations, the outliers, are up to hundreds of times as
large as the others. With one scale for all of x, most of x is then rounded to 0, 1 and -1.

    one scale per row of x ("token")   outliers of one token no longer hurt the others
    llm_int8                           outlier columns are multiplied separately, in bfloat16
    smoothquant                        columns of x divided by s, columns of W multiplied by s: some
                                       of the range moves to the weights, which have room

With one scale for all of x, or outliers that are searched for in each x, a token's result depends
on the other tokens of its batch. Only one scale per row, with outliers known beforehand, gives a
request the same answer in any batch.
SmoothQuant's paper folds 1 / s into the norm before, at no cost; here each matrix multiplies its
own input.
PyTorch's int8 product needs more than 16 rows on a GPU; shorter inputs are zero-padded. On a CPU
without int8 instructions the product is computed in float32, exactly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm import cpu_products
from minillm.quantization.calibration import Inputs
from minillm.quantization.grid import QuantizedMatrix, divisor, to_int8
from minillm.quantization.linear import Int8Linear

THRESHOLD = 6.0
"""Numbers of at least this magnitude are outliers (Dettmers et al. 2022, section 3.2)."""
PER = ("token", "tensor")


class W8A8Linear(Int8Linear):
    """Weights and activations in int8. per: "token" or "tensor", see `rounded`."""

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
        q, scale = rounded(x, self.per)  # (rows, in), and (rows, 1) or (1, 1)
        return (int8_product(q, self.weight) * self.scale.float()).mul_(scale).to(x.dtype)


class OutlierLinear(W8A8Linear):
    """LLM.int8(): columns of x with a magnitude of `threshold` or more are multiplied in bfloat16.

    outliers (n,): those columns, if known beforehand, with their weights outlier_weight (out, n).
    Otherwise they are searched for in each x, and their weights come from the int8 matrix.
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
        """For weight (out, in), with the outlier columns of the calibration text in bfloat16."""
        outliers = (inputs.largest >= threshold).nonzero()[:, 0]
        rest = to_int8(weight.index_fill(1, outliers, 0))  # so they don't stretch the rows' scales
        kept = weight[:, outliers].bfloat16()
        return cls(rest, bias, threshold=threshold, outliers=outliers, outlier_weight=kept)

    def dequantized(self) -> Tensor:
        weight = super().dequantized()
        if self.outliers is not None:
            weight[:, self.outliers] = self.outlier_weight.float()
        return weight

    def product(self, x: Tensor) -> Tensor:
        columns, w = self.outliers, self.outlier_weight  # (n,), (out, n)
        if columns is None:
            columns = (x.abs().amax(0) >= self.threshold).nonzero()[:, 0]
            w = self.weight[:, columns].to(x.dtype) * self.scale[:, None]
        if not len(columns):
            return super().product(x)
        rest = super().product(x.index_fill(1, columns, 0))
        return rest + cpu_products.bfloat16_linear(x[:, columns], w)


def rounded(x: Tensor, per: str = "token") -> tuple[Tensor, Tensor]:
    """x (rows, in) as int8, and its scales in float32.

    per: "token" for one scale per row (rows, 1), "tensor" for one in all (1, 1).
    """
    largest = x.abs().amax(1, keepdim=True).float()
    scale = (largest if per == "token" else largest.amax(0, keepdim=True)) / 127
    return (x / divisor(scale)).round_().to(torch.int8), scale


def int8_product(q: Tensor, weight: Tensor) -> Tensor:
    """q (rows, in) times weight (out, in), both int8: (rows, out), summed exactly in int32."""
    n_rows = len(q)
    if q.is_cuda:
        q = F.pad(q, (0, 0, 0, max(0, 32 - n_rows)))
    elif not cpu_products.has_int8():
        # There PyTorch multiplies number by number. float32 is far faster, and exact as well: a sum
        # of 1,024 products of int8 is below 2²⁴.
        parts = zip(q.split(1024, 1), weight.split(1024, 1), strict=True)
        return sum((a.float() @ w.float().T).int() for a, w in parts)
    return cpu_products.int8_matmul(q, weight)[:n_rows]


def smoothing(weight: Tensor, inputs: Inputs, alpha: float) -> Tensor:
    """1 / s (in,): the columns of x are multiplied by it, those of weight (out, in) divided.

    s = max|x|^alpha / max|w|^(1 - alpha) for each column (equation 4). alpha = 1 moves all of the
    activations' range to the weights, alpha = 0 all of the weights' range to the activations.
    """
    x, w = inputs.largest.clamp(min=1e-5), weight.float().abs().amax(0).clamp(min=1e-5)
    return (w ** (1 - alpha) / x**alpha).bfloat16()
