"""Calibration: statistics of the inputs of a model's matrices, on sample text.

Cost: one forward pass over the text; with `moments` also a float32 matrix (in, in) for each matrix
(out, in).
A quantizer that knows the inputs can put its error where they are small.
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
    """Statistics of the n input rows x (in,) that a matrix (out, in) was multiplied with.

    largest (in,): the largest magnitude in each column. mean (in,): the mean magnitude.
    moments (in, in): the mean of x xᵀ, or None if it was not asked for.
    """

    largest: Tensor
    mean: Tensor
    moments: Tensor | None
    n: int = 0

    def add(self, x: Tensor) -> None:
        """Add the rows x (…, in)."""
        x = x.detach().flatten(0, -2).float()
        total = self.n + len(x)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        # Running means: mean += (sum of the new rows - their number · mean) / number of all rows.
        self.mean += (x.abs().sum(0) - len(x) * self.mean) / total
        if self.moments is not None:
            self.moments += (x.T @ x - len(x) * self.moments) / total
        self.n = total


@torch.inference_mode()
def collect(
    model: Decoder, calibration: Tensor | Iterable[Tensor], *, moments: bool = True
) -> dict[str, Inputs]:
    """Statistics of the inputs of every Linear except the head, by name.

    calibration: a batch of token ids (B, T), or several. Raises ValueError if there is none, and
    for inputs that are not finite.
    """
    if isinstance(calibration, Tensor):
        calibration = [calibration]
    if not isinstance(calibration, Iterable):
        raise ValueError(
            f"calibration is {brief(calibration)}; give batches of token ids, tensors (B, T)."
        )
    found: dict[str, Inputs] = {}
    hooks = []
    for name, module in model.named_modules():  # hooks see the inputs; the model stays as it is
        if type(module) is Linear and name != "head":
            found[name] = _nothing_yet(module, moments)
            hooks.append(module.register_forward_pre_hook(partial(_add, found[name])))
    try:
        _run(model, calibration)
    finally:
        for hook in hooks:
            hook.remove()
    for name, inputs in found.items():  # an overflow of float16, or damaged weights
        if not bool(inputs.largest.isfinite().all()):
            raise ValueError(f"{name} gets inputs that are not finite; load the model in float32.")
    return found


def _nothing_yet(linear: Linear, moments: bool) -> Inputs:
    n_in, zeros = linear.in_features, partial(torch.zeros, device=linear.weight.device)
    return Inputs(zeros(n_in), zeros(n_in), zeros(n_in, n_in) if moments else None)


def _run(model: Decoder, calibration: Iterable[Tensor]) -> None:
    """The forward passes, one per batch, while the hooks watch."""
    n = 0
    for tokens in calibration:
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
            raise ValueError(
                f"calibration holds {brief(tokens)}; give batches of token ids, tensors (B, T)."
            )
        model.hidden(tokens.to(model.device))
        n += 1
    if not n:
        raise ValueError("calibration is empty; give at least one batch of token ids (B, T).")


def _add(inputs: Inputs, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    inputs.add(arguments[0])
