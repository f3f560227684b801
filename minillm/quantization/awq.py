"""AWQ: scale up the columns that matter before rounding.

Source: Lin et al. 2023, section 3.2 and equation 4.
Cost: 20 trial quantizations of each matrix, and one multiplication of the input afterwards.

The rounding error of a column depends on its group's step size, not on its own numbers. Multiply
the column by s > 1 before rounding and divide by s afterwards: the error is s times smaller. The
group's step grows only if the column was among its largest. So columns with large inputs are scaled
up:

    x Wᵀ = (x / s) (W s)ᵀ        s = (mean |x|)^a, for the a from 0 to 0.95 with the least error

The paper folds 1 / s into the norm or the matrix before, where it costs nothing at run time. Here
each matrix multiplies its own input, so that every matrix of every model can have its s.
Not here: the search for a clipping threshold in each group, which the paper's code adds.
"""

from torch import Tensor

from minillm.quantization.calibration import Inputs
from minillm.quantization.grid import QuantizedMatrix, to_int4

STEPS = 20


def awq(
    weight: Tensor, inputs: Inputs, group_size: int, *, bits: int = 4, symmetric: bool = False
) -> tuple[QuantizedMatrix, Tensor]:
    """weight (out, in) scaled by s and rounded to 4 bits, and the input's factor 1 / s (in,)."""
    best = None
    for i in range(STEPS):
        s = (inputs.mean.clamp(min=1e-4) ** (i / STEPS)).clamp(min=1e-4)  # equation 4, a = i / 20
        # 1 / s is stored in bfloat16. Rounded before it is used, it cancels exactly.
        input_scale = ((s.max() * s.min()).sqrt() / s).bfloat16().float()  # (in,)
        matrix = to_int4(weight.float() / input_scale, group_size, bits=bits, symmetric=symmetric)
        found = output_error(matrix.dequantized() * input_scale - weight.float(), inputs.moments)
        if best is None or found < best[0]:
            best = found, matrix, input_scale
    return best[1], best[2]


def output_error(error: Tensor, moments: Tensor) -> float:
    """Squared error of the outputs for E (out, in), as a mean over inputs: the trace of E M Eᵀ."""
    return float(((error @ moments) * error).sum())
