"""GPTQ: round one column, then adjust the later columns to cancel its error.

Source: Frantar et al. 2022, section 4 and algorithm 1; the correction of the later columns is from
Hassibi and Stork 1993 (optimal brain surgeon).
Cost, for a matrix (out, in): 4 in³ / 3 FLOPs for U (two Cholesky factorizations and an inverse),
and out · in² for the corrections.

Rounding to the nearest step is best for each weight, not for the product. What counts is
Σ (w x - q x)² over the inputs x, which is E M Eᵀ for the error E of a row, with M the mean of x xᵀ.
After column j is rounded, E[j] is fixed, and that sum is least if the later columns move by

    - error / U[j, j] · U[j, j + 1 :]        U: the upper Cholesky factor of M⁻¹

For two columns: E M Eᵀ = a E₀² + 2 b E₀ E₁ + c E₁² is least at E₁ = - b / c · E₀, and with
M⁻¹ = (c, -b; -b, a) / (a c - b²) that factor - b / c is U[0, 1] / U[0, 0].
All rows share U, since M does not depend on them. The scale of a group is chosen when its first
column is reached, from the columns as corrected so far.
M is collected layer by layer: `calibration.layer_by_layer`.
"""

import torch
from torch import Tensor

from minillm.quantization.grid import QuantizedMatrix, divisor, int4_steps

DAMPING = 0.01
"""Share of the mean of M's diagonal that is added to it: columns whose input is always 0 make M
singular."""


def gptq(
    weight: Tensor, moments: Tensor, group_size: int, *, bits: int = 4, symmetric: bool = False
) -> QuantizedMatrix:
    """weight (out, in) in 4 bits by groups, for moments (in, in), the mean of x xᵀ."""
    w, U = weight.float().clone(), _factor(moments)
    groups = []
    for start in range(0, w.shape[1], group_size):
        part = slice(start, start + group_size)
        matrix, errors = _round_group(w[:, part], U[part, part], symmetric=symmetric, bits=bits)
        # The columns after the group are corrected once per group: algorithm 1, last line.
        w[:, part.stop :] -= errors @ U[part, part.stop :]
        groups.append(matrix)
    return QuantizedMatrix(
        torch.cat([group.q for group in groups], 1),
        torch.cat([group.scale for group in groups], 1),
        torch.cat([group.zero for group in groups], 1),
    )


def _round_group(
    block: Tensor, u: Tensor, *, symmetric: bool, bits: int
) -> tuple[QuantizedMatrix, Tensor]:
    """Round a group of columns, block (out, group_size), which is corrected in place.

    u is their part of U. Returns also the errors (out, group_size), each divided by u[j, j].
    """
    stored_scale, stored_zero, low, high = int4_steps(
        block[:, None], symmetric=symmetric, bits=bits
    )
    scale, zero, step = stored_scale.float(), stored_zero.float(), divisor(stored_scale)  # (out, 1)
    q, errors = torch.empty_like(block, dtype=torch.uint8), torch.empty_like(block)
    for j in range(block.shape[1]):
        column = block[:, j : j + 1]
        chosen = (((column - zero) / step).round() + 8).clamp(low, high)
        q[:, j : j + 1] = chosen.to(torch.uint8)
        error = (column - (scale * (chosen - 8) + zero)) / u[j, j]
        errors[:, j : j + 1] = error
        block[:, j + 1 :] -= error * u[j, j + 1 :]  # a view of w: its later columns change
    return QuantizedMatrix(q, stored_scale, stored_zero), errors


def _factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of M⁻¹, (in, in)."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(moments)))
    return torch.linalg.cholesky(inverse, upper=True)


def damped(moments: Tensor) -> Tensor:
    """M with a little added to its diagonal, so that it can be inverted even if it is all 0."""
    M = moments.float().clone()
    M.diagonal().add_((DAMPING * M.diagonal().mean()).clamp(min=1e-12))
    return M
