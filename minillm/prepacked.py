"""Prepacked weights: a second layout of the matrices, for faster products on a CPU.

Source: oneDNN's developer guide, "Inner Product" and "Memory Format Propagation": the library picks
the layout of the weights.
Cost: a second copy of the matrices.
Why: in float32 PyTorch multiplies with MKL. For 4 to 64 tokens at once (decoding a batch, verifying
a draft) MKL rearranges the weights at every call, which takes as long as the product. On AMD CPUs
its products of one to three rows also read memory slowly, and with AVX-512 its products of many
rows are less than half as fast as oneDNN's. All matrices of the default model (the head only up to
64 tokens), in milliseconds, on 2 cores:

    tokens                         1     2     3     4     8    16    32    64   512
    AMD Zen 5        plain      33.8  57.4  73.9  51.3  46.0  54.4  80.1   149   649
                     prepacked  15.6  15.5  18.8  16.8  19.6  22.7  31.6  52.1   311
    Intel, AVX-512   plain      21.6  22.6  23.7  38.1  49.5  52.8  61.4  96.1     –
                     prepacked  25.4  26.4  27.8  26.4  30.9  38.9  53.9  86.2     –

So on Intel CPUs, where MKL is at home, float32 products of up to three rows do not use the copy.
Within a model the difference is larger than in this table: a whole step of the default model takes
a fifth longer with it. (A sum in another order gives slightly different numbers, so which layout is
used depends on the CPU's name and on the number of rows, never on a measurement.)

In bfloat16 PyTorch multiplies with oneDNN, which reads row-major weights directly, but more slowly
than its own layout. On 2 cores with AMX:

    tokens                         1     2     3     4     8    16    32    64
    plain                       21.1  21.9  21.9  21.9  22.4  22.4  23.7  28.5
    prepacked                   14.2  14.4  14.4  14.4  14.6  15.1  16.9  19.4

Also tried: W xᵀ instead of x Wᵀ (slower in some places), weights stored transposed (no difference),
MKL's own packing (35.6 at 16 tokens, but each packing fits one number of tokens only).
Not here: GPUs, whose libraries read row-major weights directly; float16.
"""

from functools import cache

import torch
from torch import Tensor

from minillm.cpu_products import onednn_layout, onednn_linear
from minillm.measure import cpu_name, multiplies_bfloat16
from minillm.model import Decoder, Linear, replace_linears

_LAYOUT_FOR = 64  # tokens; oneDNN chooses the layout for them, and it is as good for other numbers


@cache  # a machine with many CPUs has a long list of them to read
def _rows_for_mkl() -> int:
    """Up to so many rows of float32 MKL multiplies faster: it has routines of its own for them."""
    return 3 if "Intel" in cpu_name() else 0


class PrepackedLinear(Linear):
    """A matrix in two layouts: oneDNN's for products, row-major for gradients and where faster."""

    def __init__(self, linear: Linear):
        super().__init__(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias
        weight = linear.weight.detach()  # (out, in)
        self._packed = onednn_layout(weight, _LAYOUT_FOR)
        few_rows = _rows_for_mkl() if weight.dtype == torch.float32 else 0
        self._row_major_up_to = few_rows * linear.in_features  # numbers

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() <= self._row_major_up_to:
            return super().forward(x)
        return onednn_linear(x, self._packed, self.bias)


def prepack(model: Decoder) -> Decoder:
    """A model that shares `model`'s weights and adds a prepacked copy of each matrix.

    The copies are used when gradients are off, on an Intel CPU in float32 for four rows or more.
    Prepack last: the copies do not follow when weights change, and cannot be deep-copied. Modules
    that are not plain `Linear` stay as they are.
    Raises ValueError where it would not help: on a device other than the CPU, in a dtype other than
    float32 and bfloat16, if PyTorch was built without oneDNN, in bfloat16 on a CPU without AVX-512,
    and for a model that is already prepacked.
    """
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            "prepack is for float32 and bfloat16 on a CPU, and the model is "
            f"{model.dtype} on {model.device}; use it as it is."
        )
    if not torch.backends.mkldnn.is_available():
        raise ValueError(
            "prepack needs oneDNN, which this build of PyTorch lacks; use the model as it is."
        )
    if model.dtype == torch.bfloat16 and not multiplies_bfloat16(model.device):
        raise ValueError(
            "prepack in bfloat16 needs a CPU with AVX-512, which this one lacks; use the model as "
            "it is, or load it in float32."
        )
    if any(isinstance(module, PrepackedLinear) for module in model.modules()):
        raise ValueError("The model is already prepacked; use it as it is.")
    # The row-major weights stay the parameters; each copy lies beside them, in no state dict.
    return replace_linears(model, lambda _, linear: PrepackedLinear(linear))
