"""GPTQ: round a column, and let the columns after it make up for the error.

Source: Frantar et al. 2022, section 4 and algorithm 1; the formula for the others' correction is
that of Hassibi and Stork 1993 (optimal brain surgeon).
Cost: a Cholesky factorization, K³/3, and N · K² for the corrections.

Rounding each number to its nearest step is best for the number, not for the product. What counts
is Σ (w x - q x)² over the inputs x, that is E M Eᵀ for each row's error E, with M the mean of x xᵀ.
When column j is rounded with an error, that sum is least if the later columns move by

    - error / U[j, j] · U[j, j + 1 :]        U: the upper Cholesky factor of M⁻¹

and all rows share U, since M does not depend on them. A group's scale is found when its first
column is reached, from the columns as they are by then.
"""

import torch
from torch import Tensor

from minillm.quantization.grid import QuantizedMatrix, divisor, int4_steps

DAMPING = 0.01
"""Of the mean of M's diagonal, added to it: columns that were never used leave M singular."""


def gptq(
    weight: Tensor, moments: Tensor, group_size: int, *, bits: int = 4, symmetric: bool = False
) -> QuantizedMatrix:
    """weight (N, K) on a 4-bit grid in groups, with moments (K, K), the mean of x xᵀ."""
    w, U = weight.float().clone(), _factor(moments)
    groups = []
    for start in range(0, w.shape[1], group_size):
        part = slice(start, start + group_size)
        block, u = w[:, part], U[part, part]
        found, middle, low, high = int4_steps(block[:, None], symmetric=symmetric, bits=bits)
        scale, zero, step = found.float(), middle.float(), divisor(found)  # (N, 1) each
        q, errors = torch.empty_like(block, dtype=torch.uint8), torch.empty_like(block)
        for j in range(group_size):
            column = block[:, j : j + 1]
            chosen = (((column - zero) / step).round() + 8).clamp(low, high)
            q[:, j : j + 1] = chosen.to(torch.uint8)
            error = (column - (scale * (chosen - 8) + zero)) / u[j, j]
            errors[:, j : j + 1] = error
            block[:, j + 1 :] -= error * u[j, j + 1 :]  # in place: later columns of w
        w[:, part.stop :] -= errors @ U[part, part.stop :]
        groups.append(QuantizedMatrix(q, found, middle))
    fields = ([getattr(group, field) for group in groups] for field in ("q", "scale", "zero"))
    return QuantizedMatrix(*(torch.cat(field, 1) for field in fields))


def _factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, (K, K)."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(moments)))
    return torch.linalg.cholesky(inverse, upper=True)


def damped(moments: Tensor) -> Tensor:
    """M with something added to its diagonal, so that it can be inverted, even if it is all 0."""
    M = moments.float().clone()
    M.diagonal().add_((DAMPING * M.diagonal().mean()).clamp(min=1e-12))
    return M
