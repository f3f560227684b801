"""Building the model: every name and shape is checked first, then the tensors are copied in.

Memory: the model itself plus one slice of at most 16 MiB; tensors come row by row.
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.model import Decoder, Linear
from minillm.quantization.grid import QuantizedMatrix
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.quantize import on_grid, weights_only, with_modules
from minillm.tools.checks import brief

SLICE_BYTES = 16 << 20

Shapes = dict[str, tuple[int, ...]]


class Checkpoint(Protocol):
    """A file format: the config, the shape of every tensor under its Hugging Face name, slices."""

    config: ModelConfig
    label: str  # for messages
    shapes: Shapes

    def slices(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> Iterator[Tensor]:
        """These rows of one tensor, in order, each piece at most about `SLICE_BYTES` long.

        rows: all by default, and whole heads of q, k and v. columns: all by default.
        """
        ...

    def grid(self, name: str) -> QuantizedMatrix | None:
        """A matrix in the file's own 4 bits, or None if the file stores it otherwise."""
        ...


def parameter_sources(config: ModelConfig) -> dict[str, Shapes]:
    """For each parameter of `Decoder`, the Hugging Face tensors stacked in it, and their shapes."""
    C, F, D, V = config.d_model, config.d_ff, config.d_head, config.vocab_size
    q, kv = config.n_heads * D, config.n_kv_heads * D
    heads = (("q", q), ("k", kv), ("v", kv))
    sources: dict[str, Shapes] = {"embed.weight": {"model.embed_tokens.weight": (V, C)}}
    for i in range(config.n_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        sources |= {
            ours + "attn_norm": {hf + "input_layernorm.weight": (C,)},
            ours + "qkv.weight": {hf + f"self_attn.{n}_proj.weight": (r, C) for n, r in heads},
            ours + "out.weight": {hf + "self_attn.o_proj.weight": (C, q)},
            ours + "mlp_norm": {hf + "post_attention_layernorm.weight": (C,)},
            ours + "gate_up.weight": {hf + f"mlp.{n}_proj.weight": (F, C) for n in ("gate", "up")},
            ours + "down.weight": {hf + "mlp.down_proj.weight": (C, F)},
        }
        if config.qkv_bias:
            sources[ours + "qkv.bias"] = {hf + f"self_attn.{n}_proj.bias": (r,) for n, r in heads}
        if config.attn_out_bias:
            sources[ours + "out.bias"] = {hf + "self_attn.o_proj.bias": (C,)}
        if config.qk_norm:
            sources |= {ours + f"{n}_norm": {hf + f"self_attn.{n}_norm.weight": (D,)} for n in "qk"}
    sources["norm"] = {"model.norm.weight": (C,)}
    if not config.tie_embeddings:
        sources["head.weight"] = {"lm_head.weight": (V, C)}
    return sources


def build(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, scheme: str | None = None
) -> Decoder:
    """The model with the checkpoint's weights; ValueError for one that does not fit its config.

    scheme: of `minillm.quantize`. A file's own 4-bit numbers are kept for int4.
    """
    config, sources = checkpoint.config, parameter_sources(checkpoint.config)
    model = empty_model(checkpoint, dtype)
    if scheme is None:
        model.to_empty(device=device)
        if config.tie_embeddings:
            model.head.weight = model.embed.weight
    else:  # matrix by matrix, so that they never lie there in 16 bits all at once
        model = with_modules(model, partial(_matrix, checkpoint, sources, device, scheme))
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:  # on the meta device so far
                    module._parameters[name] = nn.Parameter(torch.empty_like(p, device=device))
    parameters = dict(model.named_parameters())
    for ours, parts in sources.items():
        if ours in parameters:
            fill(checkpoint, parameters[ours].data, parts)
    return model.eval().requires_grad_(False)


def empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
    """The checkpoint's model on the meta device: shapes without numbers.

    ValueError for tensors that do not fit the config.
    """
    sources = parameter_sources(checkpoint.config).values()
    _check_tensors(checkpoint, {name: shape for part in sources for name, shape in part.items()})
    with torch.device("meta"):  # no memory, no random numbers
        model = Decoder(checkpoint.config)
    return model.to(dtype)


def fill(
    checkpoint: Checkpoint,
    target: Tensor,
    parts: Shapes,
    rows: list[range] | None = None,
    columns: range | None = None,
) -> None:
    """Copy the tensors `parts` into `target`, one below the other.

    rows: of that stack, in order, if not all are wanted. columns: likewise.
    """
    start = at = 0  # rows of the stack, and of the target
    for name, shape in parts.items():
        end = start + shape[0]
        for wanted in rows or [range(start, end)]:
            mine = range(max(wanted.start, start) - start, min(wanted.stop, end) - start)
            if not mine:
                continue
            for piece in checkpoint.slices(name, mine, columns):
                place = target[at : at + len(piece)]
                place.copy_(piece)
                _check_finite(checkpoint, name, place)
                at += len(piece)
        start = end


def _matrix(
    checkpoint: Checkpoint, sources: dict[str, Shapes], device: torch.device, scheme: str,
    ours: str, linear: Linear,
) -> QuantizedLinear:  # fmt: skip
    """One matrix on its grid: the file's own, if that is 4 bits and 4 are wanted."""
    parts = sources.get(f"{ours}.weight") or sources["embed.weight"]  # the head may be tied
    if scheme == "int4" and ours != "head":
        own = [checkpoint.grid(name) for name in parts]
        if all(own):
            for name, part in zip(parts, own, strict=True):
                _check_finite(checkpoint, name, part.scale)
                _check_finite(checkpoint, name, part.zero)
            fields = ([getattr(part, field) for part in own] for field in ("q", "scale", "zero"))
            own_grid = QuantizedMatrix(*(torch.cat(field).to(device) for field in fields))
            return weights_only(own_grid, linear.bias)
    weight = torch.empty(linear.weight.shape)
    fill(checkpoint, weight, parts)
    return weights_only(on_grid(ours, weight.to(device), scheme), linear.bias)


def _check_finite(checkpoint: Checkpoint, name: str, numbers: Tensor) -> None:
    if not bool(numbers.isfinite().all()):
        raise ValueError(
            f"{checkpoint.label}: {name} holds numbers that are not finite in {numbers.dtype}; "
            "fetch it again, or load it in another dtype."
        )


def _check_tensors(checkpoint: Checkpoint, expected: Shapes) -> None:
    shapes, label = checkpoint.shapes, checkpoint.label
    # A tied head may be stored a second time, and old checkpoints store the rotary frequencies.
    ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq")}
    if checkpoint.config.tie_embeddings:
        ignored.add("lm_head.weight")
    for problem, names in (
        ("lacks", expected.keys() - shapes.keys()),
        ("holds, unexpectedly,", shapes.keys() - expected.keys() - ignored),
    ):
        if names:
            raise ValueError(
                f"{label} does not fit its config: it {problem} {len(names)} tensors, among them "
                f"{brief(min(names))}."
            )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{label} does not fit its config: {name} has shape {brief(shapes[name])}, "
                f"expected {shape}."
            )
