"""Calibration: statistics of the inputs of a model's matrices, on sample text.

Source: Frantar et al. 2022 (GPTQ), section 5: layer by layer, so that each knows the errors of
those before it.
Cost: one forward pass over the text; with `moments` also a float32 matrix (in, in) for each matrix
(out, in).
A quantizer that knows the inputs can put its error where they are small.

    collect           what the matrices of the model get
    layer_by_layer    replaces them on the way: what they get from the layers replaced before them

Within a layer all four matrices see the inputs that the original layer gives them, as in the
paper.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.cache import NoCache
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
    with _watched(model, "", moments=moments) as found:
        for tokens in _batches(model, calibration):
            model.hidden(tokens)
    return found


@torch.inference_mode()
def layer_by_layer(
    model: Decoder,
    small: Decoder,
    calibration: Tensor | Iterable[Tensor],
    module: Callable[[str, Linear, Inputs], nn.Module],
    *,
    sequential: bool,
    progress: bool = False,
) -> None:
    """Put `module(name, linear, inputs)` in the place of every Linear in the layers of `small`.

    linear: the one of `model`. inputs: its statistics on the residual stream that the layers of
    `small` before it compute, replaced already, or, unless `sequential`, those of `model`.
    progress: show a bar. Raises what `collect` does.
    Cost: two passes through each layer, unless `sequential` one; the residual stream of all of
    calibration in memory, and the moments of one layer at a time.
    """
    streams = [
        (model.embedded(tokens, NoCache()), small.embedded(tokens, NoCache()))
        for tokens in _batches(model, calibration)
    ]
    ropes = [(rope, small_rope) for (_, rope), (_, small_rope) in streams]
    xs = [small_x if sequential else x for (x, _), (small_x, _) in streams]  # (B, T, C) each
    layers = tqdm(model.layers, desc="layers", mininterval=1, disable=not progress)
    for i, layer in enumerate(layers):
        with _watched(layer, f"layers.{i}.", moments=True) as found:
            outputs = [
                layer(x.to(model.dtype), i, rope, NoCache())
                for x, (rope, _) in zip(xs, ropes, strict=True)
            ]
        for name, linear in layer.named_children():
            full = f"layers.{i}.{name}"
            setattr(small.layers[i], name, module(full, linear, found[full]))
        if sequential:
            outputs = [
                small.layers[i](x.to(small.dtype), i, rope, NoCache())
                for x, (_, rope) in zip(xs, ropes, strict=True)
            ]
        xs = outputs


@contextmanager
def _watched(part: nn.Module, prefix: str, *, moments: bool) -> Iterator[dict[str, Inputs]]:
    """Statistics, by prefix + name, of what the matrices of `part` are given meanwhile.

    ValueError at the end for inputs that are not finite.
    """
    found: dict[str, Inputs] = {}
    hooks = []
    for name, module in part.named_modules():  # hooks see the inputs; the model stays as it is
        if type(module) is Linear and name != "head":
            inputs = found[prefix + name] = _nothing_yet(module, moments)
            hooks.append(module.register_forward_pre_hook(partial(_add, inputs)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    for name, inputs in found.items():  # an overflow of float16, or damaged weights
        if not bool(inputs.largest.isfinite().all()):
            raise ValueError(f"{name} gets inputs that are not finite; load the model in float32.")


def _nothing_yet(linear: Linear, moments: bool) -> Inputs:
    n_in, zeros = linear.in_features, partial(torch.zeros, device=linear.weight.device)
    return Inputs(zeros(n_in), zeros(n_in), zeros(n_in, n_in) if moments else None)


def _add(inputs: Inputs, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    inputs.add(arguments[0])


def _batches(model: Decoder, calibration: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    """The batches (B, T), on the model's device. ValueError if there is none."""
    if isinstance(calibration, Tensor):
        calibration = [calibration]
    if not isinstance(calibration, Iterable):
        raise ValueError(
            f"calibration is {brief(calibration)}; give batches of token ids, tensors (B, T)."
        )
    n = 0
    for tokens in calibration:
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
            raise ValueError(
                f"calibration holds {brief(tokens)}; give batches of token ids, tensors (B, T)."
            )
        yield tokens.to(model.device)
        n += 1
    if not n:
        raise ValueError("calibration is empty; give at least one batch of token ids (B, T).")
