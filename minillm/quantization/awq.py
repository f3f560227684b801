"""AWQ: make the columns that matter larger before they are rounded.

Source: Lin et al. 2023, section 3.2 and equation 4.
Cost: 20 trial quantizations of each matrix, and one multiplication of the input afterwards.

A column's error is that of its group's step, whatever the column holds. Multiplied by s > 1, its
numbers are s times as large and the error, divided by s again, s times as small; the group's step
grows only if the column was among its largest. So columns with large inputs are scaled up:

    x Wᵀ = (x / s) (W s)ᵀ        s = (mean |x|)^α, for the α from 0 to 0.95 with the least error
"""

from torch import Tensor

from minillm.quantization.calibration import Inputs
from minillm.quantization.grid import QuantizedMatrix, to_int4

STEPS = 20


def awq(
    weight: Tensor, inputs: Inputs, group_size: int, *, bits: int = 4, symmetric: bool = False
) -> tuple[QuantizedMatrix, Tensor]:
    """W s on a 4-bit grid, and what the input is multiplied with, 1 / s (K,)."""
    best = None
    for i in range(STEPS):
        s = (inputs.mean.clamp(min=1e-4) ** (i / STEPS)).clamp(min=1e-4)
        # What the input is multiplied with is rounded first, so that W is scaled by its inverse.
        input_scale = ((s.max() * s.min()).sqrt() / s).bfloat16().float()
        grid = to_int4(weight.float() / input_scale, group_size, bits=bits, symmetric=symmetric)
        found = output_error(grid.dequantized() * input_scale - weight.float(), inputs.moments)
        if best is None or found < best[0]:
            best = found, grid, input_scale
    return best[1], best[2]


def output_error(error: Tensor, moments: Tensor) -> float:
    """Mean of the squared errors that E (N, K) makes in the outputs: the trace of E M Eᵀ."""
    return float(((error @ moments) * error).sum())
