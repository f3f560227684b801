"""Building the model: every name and shape is checked first, then the tensors are copied in.

Memory: the model itself plus one slice of at most `SLICE_BYTES`; tensors are read in rows.
"""

from collections.abc import Iterable, Iterator
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
    label: str  # its path, for messages
    shapes: Shapes

    def slices(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> Iterator[Tensor]:
        """Rows of one tensor, in order, in pieces of at most about `SLICE_BYTES`.

        rows: all by default; for q, k and v they must be whole heads. columns: all by default.
        """
        ...

    def stored_in_4_bits(self, name: str) -> QuantizedMatrix | None:
        """A matrix in the file's own 4 bits; None if the file stores it in another format."""
        ...


def parameter_sources(config: ModelConfig) -> dict[str, Shapes]:
    """For each parameter of `Decoder`: the Hugging Face tensors stacked in it, and their shapes."""
    C, F, D, V = config.d_model, config.d_ff, config.d_head, config.vocab_size
    q, kv = config.n_heads * D, config.n_kv_heads * D
    heads = (("q", q), ("k", kv), ("v", kv))  # rows of W_q, W_k and W_v
    sources: dict[str, Shapes] = {"embed.weight": {"model.embed_tokens.weight": (V, C)}}
    for i in range(config.n_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        # q, k and v are one matrix here, and so are gate and up.
        sources |= {
            ours + "attn_norm": {hf + "input_layernorm.weight": (C,)},
            ours + "qkv.weight": {hf + f"self_attn.{n}_proj.weight": (r, C) for n, r in heads},
            ours + "out.weight": {hf + "self_attn.o_proj.weight": (C, q)},
            ours + "mlp_norm": {hf + "post_attention_layernorm.weight": (C,)},
            ours + "gate_up.weight": {hf + f"mlp.{n}_proj.weight": (F, C) for n in ("gate", "up")},
            ours + "down.weight": {hf + "mlp.down_proj.weight": (C, F)},
        }
        # What only some models have
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

    scheme: "int8" or "int4" of `minillm.quantize`. For int4 a file's own 4-bit numbers are kept.
    """
    config, sources = checkpoint.config, parameter_sources(checkpoint.config)
    model = empty_model(checkpoint, dtype)
    if scheme is not None:
        # Matrix by matrix, so that the whole model is never in memory in 16 bits
        model = with_modules(model, partial(_quantized, checkpoint, sources, device, scheme))
    _allocate(model, device)
    if scheme is None and config.tie_embeddings:
        model.head.weight = model.embed.weight  # separated now
    # Quantized matrices are no parameters: they have their numbers already.
    parameters = dict(model.named_parameters())
    for ours, parts in sources.items():
        if ours in parameters:
            fill(checkpoint, parameters[ours].data, parts)
    return model.eval().requires_grad_(False)


def empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
    """The checkpoint's model on the meta device: shapes without numbers.

    Raises ValueError for tensors that do not fit the config.
    """
    sources = parameter_sources(checkpoint.config).values()
    _check_tensors(checkpoint, {name: shape for part in sources for name, shape in part.items()})
    with torch.device("meta"):  # no memory, no random numbers
        model = Decoder(checkpoint.config)
    return model.to(dtype)


def _allocate(model: Decoder, device: torch.device) -> None:
    """Give memory on `device` to the parameters, which are on the meta device so far."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(empty_on(p, device)))


def empty_on(x: Tensor, device: torch.device) -> Tensor:
    """Memory for the numbers of a tensor on the meta device.

    torch.empty_like would first load torch's symbolic shapes, which takes a second.
    """
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def fill(
    checkpoint: Checkpoint,
    target: Tensor,
    parts: Shapes,
    rows: list[range] | None = None,
    columns: range | None = None,
) -> None:
    """Copy the tensors `parts`, stacked by rows, into `target`.

    rows: the rows of that stack to copy, in order; all by default. columns: likewise.
    """
    start = at = 0  # row of the stack where a tensor starts; next row of the target
    for name, shape in parts.items():
        end = start + shape[0]
        for wanted in rows or [range(start, end)]:
            # The wanted rows that are in this tensor, counted from its first row
            own = range(max(wanted.start, start) - start, min(wanted.stop, end) - start)
            if not own:
                continue
            for piece in checkpoint.slices(name, own, columns):
                place = target[at : at + len(piece)]
                place.copy_(piece)  # converts to the target's dtype
                _check_finite(checkpoint, name, place)
                at += len(piece)
        start = end


def _quantized(
    checkpoint: Checkpoint, sources: dict[str, Shapes], device: torch.device, scheme: str,
    ours: str, linear: Linear,
) -> QuantizedLinear:  # fmt: skip
    """One quantized matrix; it keeps the file's own 4 bits if 4 are wanted."""
    parts = sources.get(f"{ours}.weight") or sources["embed.weight"]  # the head may be tied
    if scheme == "int4" and ours != "head":  # the head is always int8
        own = [checkpoint.stored_in_4_bits(name) for name in parts]
        if all(own):
            return weights_only(_stacked(checkpoint, parts, own, device), linear.bias)
    weight = torch.empty(linear.weight.shape)  # (out, in) in float32
    fill(checkpoint, weight, parts)
    return weights_only(on_grid(ours, weight.to(device), scheme), linear.bias)


def _stacked(
    checkpoint: Checkpoint, names: Iterable[str], parts: list[QuantizedMatrix], device: torch.device
) -> QuantizedMatrix:
    """4-bit matrices, one below the other."""
    for name, part in zip(names, parts, strict=True):
        _check_finite(checkpoint, name, part.scale)
        _check_finite(checkpoint, name, part.zero)
    return QuantizedMatrix(
        q=torch.cat([part.q for part in parts]).to(device),
        scale=torch.cat([part.scale for part in parts]).to(device),
        zero=torch.cat([part.zero for part in parts]).to(device),
    )


def _check_finite(checkpoint: Checkpoint, name: str, numbers: Tensor) -> None:
    # One pass and no temporary tensors: where there is a NaN it is both the least and the largest.
    if not bool(torch.stack(numbers.aminmax()).isfinite().all()):
        raise ValueError(
            f"{checkpoint.label}: {name} holds numbers that are not finite in {numbers.dtype}; "
            "fetch it again, or load it in another dtype."
        )


def _check_tensors(checkpoint: Checkpoint, expected: Shapes) -> None:
    shapes, label = checkpoint.shapes, checkpoint.label
    # Names. A copy of a tied head may be stored, and old checkpoints store the rotary frequencies.
    ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq")}
    if checkpoint.config.tie_embeddings:
        ignored.add("lm_head.weight")
    missing = expected.keys() - shapes.keys()
    others = shapes.keys() - expected.keys() - ignored
    said = [
        f"{verb} {len(names)} tensors, among them {brief(min(names))}"
        for verb, names in (("lacks", missing), ("unexpectedly holds", others))
        if names
    ]
    if said:
        raise ValueError(
            f"{label} does not fit its config: it {' and '.join(said)}{_advice(missing, others)}."
        )
    # Shapes
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{label} does not fit its config: {name} has shape {brief(shapes[name])}, "
                f"expected {shape}."
            )


def _advice(missing: set[str], others: set[str]) -> str:
    """How the names would fit, if only what stands before them is different."""
    if not missing or not others:
        return ""
    name = min(missing)
    longer = min((other for other in others if other.endswith(f".{name}")), default=None)
    if longer is not None:  # as torch.compile and wrappers of several GPUs save it
        return f"; they would fit without {brief(longer.removesuffix(name))}, so rename them"
    if name.removeprefix("model.") in others:  # the body was saved without the head
        return "; they would fit with 'model.' before them, so rename them"
    return ""
