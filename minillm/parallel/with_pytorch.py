"""The production way: both cuts with PyTorch's own tools, to compare with `tensor`, `pipeline`.

Sources: PyTorch's documentation of torch.distributed.tensor.parallel and
torch.distributed.pipelining; Shoeybi et al. 2019, section 3; Huang et al. 2019, section 2.3.
Cost: the ranks send the same as in `minillm.parallel.tensor` and `minillm.parallel.pipeline`. On a
CPU a DTensor adds overhead to every matrix product. A pipeline runs an extra micro-batch for every
new shape of the tokens, to learn the shapes that ranks will send, and each rank keeps the inputs
and outputs of all its micro-batches until the next call.

A DTensor is one tensor on several ranks: sharded along a dimension, replicated, or a partial sum. A
style says how a module's weights, input and output are laid out; PyTorch inserts the collectives.
It knows nothing of heads, so the rows of a fused matrix must first be put in the ranks' order.
Not here: quantized matrices, sequence parallelism, a ledger; a cache in the pipeline, so no
generation.
"""

import copy
import dataclasses

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from minillm.cache import NoCache
from minillm.layers.per_token import rms_norm
from minillm.model import Decoder, Layers, Linear, check_plain, replace_linears
from minillm.parallel.collectives import Group, world_size
from minillm.parallel.plan import Plan, check_size, check_stages, part
from minillm.tools.checks import check_whole


def dtensor_parallel(model: Decoder) -> Decoder:
    """This rank's part of `model`, in DTensors; every rank makes the same call, inside torchrun.

    It maps token ids to all logits on each rank, as `tensor_parallel` does. `model` stays as it is.
    Tied embeddings stay tied: both are cut along the vocabulary.
    ValueError for a number of ranks that cannot share the heads or the MLP, for matrices that are
    not plain, and for models that differ between ranks. RuntimeError outside torchrun.
    """
    config, size = model.config, world_size()
    check_size(config, size)
    if config.d_ff % size:
        raise ValueError(
            f"{size} ranks cannot share the MLP's d_ff = {config.d_ff} evenly; start a number of "
            "ranks that divides it, or use tensor_parallel, which cuts unevenly."
        )
    check_plain(model, "cut")
    group = Group.sharing(model)
    plans = [Plan(config, size, rank) for rank in range(size)]
    sharded = replace_linears(model, lambda name, linear: _in_rank_order(name, linear, plans))
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.qkv": ColwiseParallel(),
        "layers.*.out": RowwiseParallel(),
        "layers.*.gate_up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    mesh = init_device_mesh(model.device.type, (size,))
    # None: each rank cuts its own copy; otherwise rank 0 would send the others their parts.
    parallelize_module(sharded, mesh, styles, src_data_rank=None)
    if config.tie_embeddings:
        sharded.head.weight = sharded.embed.weight
    # PyTorch cuts d_ff evenly, where the plan may cut between groups of 32.
    mine = dataclasses.replace(plans[group.rank].layer_config, d_ff=config.d_ff // size)
    for layer in sharded.layers:
        layer.config = mine
        layer.out.__class__ = layer.down.__class__ = _Columns
    # A sum may still be in flight when its reader starts: PyTorch's operations wait, kernels don't.
    sharded.fast = False
    return sharded


def _in_rank_order(name: str, linear: Linear, plans: list[Plan]) -> Linear:
    """qkv and gate_up with the rows of rank 0 first, then those of rank 1; other matrices as is.

    A key/value head is repeated for every rank that reads it.
    """
    matrix, size, d_ff = name.rpartition(".")[2], len(plans), plans[0].config.d_ff
    if matrix == "qkv":
        rows = [r for plan in plans for r in plan.rows("qkv")]
    elif matrix == "gate_up":  # cut evenly, which the plan's own rows may not be
        cuts = [part(d_ff, size, rank) for rank in range(size)]
        rows = [range(f + cut.start, f + cut.stop) for cut in cuts for f in (0, d_ff)]
    else:
        return linear
    at = torch.tensor([i for r in rows for i in r], device=linear.weight.device)
    with torch.device("meta"):
        ordered = Linear(linear.in_features, len(at), bias=linear.bias is not None)
    for key, values in linear.named_parameters():
        setattr(ordered, key, nn.Parameter(values.detach()[at], requires_grad=False))
    return ordered


class _Columns(Linear):
    """Columns of a matrix. In inference mode DTensor would plan its product again in each call."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # ten times as fast
            return super().forward(x)


def pytorch_pipeline(model: Decoder, n_microbatches: int) -> "PytorchPipeline":
    """This rank's stage of `model`; every rank makes the same call, inside torchrun.

    ValueError for more ranks than layers and for models that differ between ranks.
    RuntimeError outside torchrun.
    """
    check_stages(len(model.layers), world_size())
    check_whole("n_microbatches", n_microbatches)
    return PytorchPipeline(model, Group.sharing(model), n_microbatches)


class PytorchPipeline:
    """This rank's stage, and the schedule that all ranks follow."""

    def __init__(self, model: Decoder, group: Group, n_microbatches: int):
        self.group, self.n_microbatches = group, n_microbatches
        stage = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # shares the weights
        stage.__class__ = _Part
        mine = part(len(model.layers), group.size, group.rank)
        stage.layers = Layers(stage.layers[i] for i in mine)
        if group.rank > 0:  # its input is the residual stream already
            stage.embed = nn.Identity()
        if group.rank < group.size - 1:  # only the last rank computes logits
            stage.head = None
        self._part = stage
        self._shape: torch.Size | None = None

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor | None:
        """Token ids (B, T), in micro-batches, to logits (B, T, V): on the last rank, else None.

        ValueError, on every rank, for tokens that the model cannot take, and unless the number of
        micro-batches divides B.
        """
        m, first = self.n_microbatches, self.group.rank == 0
        self._part.check(tokens, m)
        if tokens.shape != self._shape:  # a stage receives into buffers of one shape
            stage = PipelineStage(self._part, self.group.rank, self.group.size, self._part.device)
            self._schedule, self._shape = ScheduleGPipe(stage, m), tokens.shape
        return self._schedule.eval(tokens) if first else self._schedule.eval()


class _Part(Decoder):
    """Some of a decoder's layers, without a cache."""

    def forward(self, x: Tensor) -> Tensor:
        """Ids (B, T) or residual stream (B, T, C) to residual stream or logits (B, T, V)."""
        x = self.embed(x)
        x = self.layers(x, self._rope(range(x.shape[1])), NoCache(), self.fast)
        if self.head is None:
            return x
        return self.head(rms_norm(x, self.norm, self.config.norm_eps))

    def check(self, tokens: Tensor, n_microbatches: int) -> None:
        """ValueError for a shape or ids that the pipeline cannot take."""
        longest = self.config.max_seq_len
        fits = tokens.dim() == 2 and tokens.numel() and tokens.shape[1] <= longest
        if not fits or len(tokens) % n_microbatches:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}; give (B, T), B a multiple of the "
                f"{n_microbatches} micro-batches and T at most {longest}."
            )
        self._check_ids(tokens)
