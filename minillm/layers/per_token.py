"""The small operations between two matrix products: RMSNorm, rotary positions, SwiGLU.

Sources: Zhang and Sennrich 2019 (RMSNorm); Su et al. 2021 (RoPE); Shazeer 2020 (SwiGLU).
Cost: a few FLOPs for each number, so memory is the bound: what is read and written counts.
These are the definitions. `layers/fast.py` has them in fewer operations, for a CPU and a GPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up of (…, 2F), whose first half is gate; returns (…, F)."""
    gate, up = gate_up.chunk(2, dim=-1)
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
