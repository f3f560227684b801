"""The layers in fewer operations: the same sums, for the last few per cent of a decode step.

`Layer.forward` in `model.py` is the definition. Here stands what pays beside it, with one switch,
`Decoder.fast`:

    on a GPU   the operations between two products are one kernel each (`kernels/fused.py`); what a
               block computes is added where the next norm reads it, and k and v go straight to
               their slots in the cache
    on a CPU   one row in bfloat16, which is what a decode step with quantized weights has: a norm
               in two operations, which F.rms_norm makes ten of in 16 bits

What it is worth: without the switch a decode step takes 1.08 times as long, with weights in 4 bits
as in bfloat16 (two threads of an AMD EPYC with AVX2, November 2026; the median of 11 pairs). On a
GPU it has not been measured.
Not here: gradients.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minillm.kernels.availability import on_device_of, why_not_here
from minillm.layers.per_token import apply_rope, rms_norm, swiglu

if TYPE_CHECKING:
    from minillm.cache import Cache
    from minillm.model import Layer


class Operations(NamedTuple):
    """What stands between two matrix products."""

    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    rope_and_write: Callable[..., Tensor] | None = None  # None: the cache stores k and v itself


def operations(x: Tensor, wanted: bool | None) -> Operations | None:
    """Those for a residual stream like x (B, T, C), or None for the definition.

    wanted: `Decoder.fast`. ValueError if that is True and the kernels can't run.
    """
    if wanted is False:
        return None
    if wanted is None and not x.is_cuda:  # on a CPU: one row in bfloat16, no gradients
        one_row = x.numel() == x.shape[-1] and x.dtype == torch.bfloat16
        return ONE_ROW if one_row and not torch.is_grad_enabled() else None
    # On a GPU, or in Triton's interpreter: the kernels, where they take the input.
    why_not = why_not_here(x, "Decoder.fast = True", "leave it at None")
    if why_not is None and torch.is_grad_enabled():
        why_not = (
            "Decoder.fast = True is for inference: the kernels have no gradients; leave it at "
            "None, or call the model under torch.inference_mode()."
        )
    if why_not is None:
        from minillm.kernels import fused

        return Operations(fused.add_rms_norm, fused.silu_mul, fused.rope_and_write)
    if wanted:
        raise ValueError(why_not)
    return None


def run(
    layers: "Iterable[Layer]",
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: "Cache",
    ops: Operations,
) -> Tensor:
    """The residual stream x (B, T, C) through the layers, as `Layer.forward` defines each."""
    update = None  # (B, T, C), what the last block computed: the next norm adds it to x
    with on_device_of(x):
        for i, layer in enumerate(layers):
            x, update = _layer(layer, x, update, i, rope, cache, ops)
        return x if update is None else x + update


def _layer(
    layer: "Layer",
    x: Tensor,
    update: Tensor | None,
    i: int,
    rope: tuple[Tensor, Tensor],
    cache: "Cache",
    ops: Operations,
) -> tuple[Tensor, Tensor]:
    H, K, D = layer.config.n_heads, layer.config.n_kv_heads, layer.config.d_head
    eps = layer.config.norm_eps
    x, normed = ops.add_rms_norm(x, update, layer.attn_norm, eps)  # (B, T, C) each
    qkv = layer.qkv(normed).view(len(x), -1, H + 2 * K, D)
    qk, v = qkv.split_with_sizes((H + K, K), -2)  # (B, T, heads, D)
    if layer.q_norm is not None:
        q, k = qk.split_with_sizes((H, K), -2)
        qk = torch.cat((rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)), -2)
    slots = cache.slots(i) if ops.rope_and_write is not None else None
    if slots is not None:
        attended = cache.attend_written(i, ops.rope_and_write(qk, v, rope, slots))
    else:
        attended = cache.attend(i, *apply_rope(qk, *rope).split_with_sizes((H, K), -2), v)
    x, normed = ops.add_rms_norm(x, layer.out(attended.flatten(-2)), layer.mlp_norm, eps)
    return x, layer.down(ops.swiglu(layer.gate_up(normed)))


_ZERO = torch.zeros((), dtype=torch.bfloat16)


def _add_rms_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + update for one row of C numbers, and its norm, whose root is a Python number."""
    x = x if update is None else x + update
    norm = torch.linalg.vector_norm(x, dtype=torch.float32).item()
    root = (norm * norm / x.shape[-1] + eps) ** -0.5
    return x, torch.addcmul(_ZERO, x, weight, value=root)


ONE_ROW = Operations(_add_rms_norm, swiglu)
