"""Calibration: what the matrices of a model are multiplied with, on text that it may meet.

Cost: one forward pass over the text, and, where `moments` are wanted, a K × K matrix of float32 for
each matrix of K columns.
Quantization that knows its inputs can put its error where they are small.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minillm.model import Decoder, Linear
from minillm.tools.checks import brief


@dataclass
class Inputs:
    """Of one matrix (N, K): statistics of the n rows x (K,) that it was multiplied with.

    largest (K,): the largest magnitude in each column. mean (K,): the mean magnitude.
    moments (K, K): the mean of x xᵀ, or None if nobody asked for it.
    """

    largest: Tensor
    mean: Tensor
    moments: Tensor | None
    n: int = 0

    def add(self, x: Tensor) -> None:
        """More rows, (…, K)."""
        x = x.detach().flatten(0, -2).float()
        total = self.n + len(x)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.mean += (x.abs().sum(0) - len(x) * self.mean) / total
        if self.moments is not None:
            self.moments += (x.T @ x - len(x) * self.moments) / total
        self.n = total


@torch.inference_mode()
def collect(
    model: Decoder, calibration: Tensor | Iterable[Tensor], *, moments: bool = True
) -> dict[str, Inputs]:
    """The inputs of every Linear but the head by its name.

    calibration: a batch of token ids (B, T), or several. ValueError if there is none, and for
    inputs that are not finite.
    """
    if isinstance(calibration, Tensor):
        calibration = [calibration]
    if not isinstance(calibration, Iterable):
        raise ValueError(
            f"calibration is {brief(calibration)}; give batches of token ids, tensors (B, T)."
        )
    found: dict[str, Inputs] = {}
    hooks = []
    for name, module in model.named_modules():
        if type(module) is Linear and name != "head":
            zeros = partial(torch.zeros, device=module.weight.device)
            K = module.in_features
            found[name] = Inputs(zeros(K), zeros(K), zeros(K, K) if moments else None)
            hooks.append(module.register_forward_pre_hook(partial(_add, found[name])))
    try:
        n = 0
        for tokens in calibration:
            if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
                raise ValueError(
                    f"calibration holds {brief(tokens)}; give batches of token ids, tensors (B, T)."
                )
            model.hidden(tokens.to(model.device))
            n += 1
    finally:
        for hook in hooks:
            hook.remove()
    if not n:
        raise ValueError("calibration is empty; give at least one batch of token ids (B, T).")
    for name, inputs in found.items():
        if not bool(inputs.largest.isfinite().all()):
            raise ValueError(f"{name} gets inputs that are not finite; load the model in float32.")
    return found


def _add(inputs: Inputs, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    inputs.add(arguments[0])
