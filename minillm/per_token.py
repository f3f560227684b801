"""The small operations between two matrix products: RMSNorm, rotary positions, SwiGLU.

Sources: Zhang and Sennrich 2019 (RMSNorm); Su et al. 2021 (RoPE); Shazeer 2020 (SwiGLU).
Cost: a few FLOPs for each number, so memory is the bound: what is read and written counts.
These are the definitions, in PyTorch. `kernels/fused.py` has the same operations as one kernel
each, for GPUs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import ModelConfig

_ZERO = torch.zeros((), dtype=torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    C = x.shape[-1]
    one_row = x.numel() == C and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    if one_row and not torch.is_grad_enabled():
        # In 16 bits a CPU makes ten small operations of F.rms_norm. With the root as a Python
        # number two are enough, which takes 3% off a decode step with weights in 4 bits.
        norm = torch.linalg.vector_norm(x, dtype=torch.float32).item()
        return torch.addcmul(_ZERO, x, weight, value=(norm * norm / C + eps) ** -0.5)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + update, and that normalized; `update` is None where there is nothing to add yet."""
    x = x if update is None else x + update
    return x, rms_norm(x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up of (…, 2F), whose first half is gate; returns (…, F)."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((half, half), -1)
    return F.silu(gate) * up


def rope_tables(
    config: ModelConfig, positions: range | Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, 1, D), for T positions given as a range or a tensor (T,).

    They are the same for every head. Pair i of D/2 turns by position * theta^(-2i/D) (Su et al.
    2021, equation 15); its angle is at i and again at i + D/2. The sine carries the sign of the
    rotation: minus for the first half of D, plus for the second.
    """
    pairs = torch.arange(0, config.d_head, 2, device=device, dtype=torch.float32) / config.d_head
    frequencies = 1.0 / config.rope_theta**pairs  # (D/2,)
    if config.rope_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_factors, device=device)
    if isinstance(positions, range):
        positions = torch.arange(positions.start, positions.stop, device=device)
    angles = positions.float()[:, None, None] * frequencies  # (T, 1, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x (B, T, heads, D) by its angle."""
    # The rotation needs the other half of each pair: rolling by D/2 swaps the halves.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
