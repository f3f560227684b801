"""What the tests of the kernels compare with.

Attention as one formula in any precision, and flash-attn's criterion.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

FLOOR = 1e-5
"""What flash-attn's tests also allow, on top of twice plain PyTorch's error.

In float32 that error may happen to be nearly 0.
"""

Gradients = tuple[Tensor, Tensor, Tensor]


def inputs(
    T: int, S: int, H: int, K: int, D: int, *,
    B: int = 2, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q (B, T, H, D), k and v (B, S, K, D), and a gradient of the output; all normal."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, D), (B, S, K, D), (B, S, K, D), (B, T, H, D))
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v, each step in the dtype of the inputs, shared heads repeated."""
    T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(G, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if causal:
        query, key = torch.arange(T, device=q.device)[:, None], torch.arange(S, device=q.device)
        scores = scores.masked_fill(key - query > S - T, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def log_sum_exp(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """(B, H, T), in float64."""
    T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k = q.double(), k.double().repeat_interleave(G, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1) & causal
    return scores.masked_fill(hidden, -torch.inf).logsumexp(-1)


def formula_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> Gradients:
    """dQ, dK, dV by autograd through the formula, in the dtype of the inputs."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(formula(*leaves, causal, scale), leaves, grad)


def double(*tensors: Tensor) -> list[Tensor]:
    return [x.double() for x in tensors]


def at_most_twice(
    name: str, actual: Tensor, plain: Tensor, exact: Tensor, floor: float = FLOOR
) -> None:
    """The criterion: the largest error against float64 is at most twice that of the formula.

    The formula is computed in the dtype of the inputs. floor: an error that is always allowed.
    """
    assert actual.shape == exact.shape and actual.dtype == plain.dtype, name
    assert actual.isfinite().all(), f"{name} is not finite"
    error, allowed = ((x.double() - exact).abs().max().item() for x in (actual, plain))
    assert error <= 2 * allowed + floor, (
        f"{name}: error {error:.2e}, that of plain PyTorch {allowed:.2e}"
    )


def check_output(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """`attend(q, k, v, causal, scale)` by the criterion; returns its output."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = attend(q, k, v, causal, scale)
    plain, exact = (formula(*xs, causal, scale) for xs in ((q, k, v), double(q, k, v)))
    at_most_twice("output", out, plain, exact)
    return out


def check_gradients(
    gradients: Gradients, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float,
    floor: float = FLOOR,
) -> None:  # fmt: skip
    plain, exact = (
        formula_gradients(*xs, causal, scale) for xs in ((q, k, v, grad), double(q, k, v, grad))
    )
    for name, *three in zip(("dQ", "dK", "dV"), gradients, plain, exact, strict=True):
        at_most_twice(name, *three, floor)


def oracle(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """One query of one head at a time; no mask: the keys it may not see are not there."""
    q, k, v = (t.double().numpy() for t in (q, k, v))
    (B, T, H, _), S, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out = np.empty_like(q)
    for b in range(B):
        for t in range(T):
            for h in range(H):
                visible = S - T + t + 1 if causal else S
                scores = k[b, :visible, h // group] @ q[b, t, h] * scale
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights @ v[b, :visible, h // group] / weights.sum()
    return torch.from_numpy(out)
