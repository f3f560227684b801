"""Pipeline parallelism: each rank has some of the layers; micro-batches keep several ranks busy.

Sources: Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021, section 2.2, for the bubble.
Cost: a rank sends B T C numbers for each pass over (B, T) tokens. With p ranks and m micro-batches
that take equally long, a share (p - 1) / (m + p - 1) of the time is idle: the bubble.

A rank's part is a decoder with fewer layers, and its cache holds only those. Three modules connect
the parts, so the decoder stays as it is: the embedding of the later ranks receives the residual
stream, the last layer of the earlier ranks sends it, and the head hands the last rank's logits to
all. So generate, speculation and the engine run on every rank alike.
Not here: drafters that read the target's states, which only the last rank has; an engine with a
drafter (see `minillm.parallel.tensor`).
"""

import copy
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minillm.checks import check_whole
from minillm.model import Decoder, Layer
from minillm.parallel.collectives import Group, world_size
from minillm.parallel.plan import part


@dataclass(frozen=True)
class Span:
    """A rank at work on one micro-batch: its layers began and ended, in seconds."""

    microbatch: int
    start: float
    end: float


def bubble_share(p: int, m: int) -> float:
    """(p - 1) / (m + p - 1): the idle share of p ranks with m micro-batches."""
    return (p - 1) / (m + p - 1)


def check_stages(n_layers: int, size: int) -> None:
    """ValueError for more ranks than layers."""
    if size > n_layers:
        raise ValueError(f"{size} ranks cannot share {n_layers} layers; start at most {n_layers}.")


class Stage:
    """This rank's part of a pipeline.

    model: a decoder for generate, speculation and the engine, which every rank calls alike.
    spans: when the layers of this rank worked in the last `forward`.
    """

    def __init__(self, model: Decoder, group: Group, n_microbatches: int):
        self.group, self.n_microbatches = group, n_microbatches
        self._wire = Wire(group)
        self.model = _stage_model(model, group, self._wire)
        self.spans: list[Span] = []

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor | None:
        """Token ids (B, T) in micro-batches: logits (B, T, V) on the last rank, None on others.

        ValueError for fewer sequences than micro-batches.
        """
        if len(tokens) < self.n_microbatches:
            raise ValueError(
                f"{len(tokens)} sequences cannot be cut into {self.n_microbatches} micro-batches; "
                "give more sequences or fewer micro-batches."
            )
        self.spans = []
        logits = []
        for i, rows in enumerate(tokens.tensor_split(self.n_microbatches)):
            hidden = self.model.hidden(rows)
            if self._wire.is_last:
                logits.append(self.model.head.last(hidden))
            self.spans.append(Span(i, self._wire.began, time.perf_counter()))
        self._wire.flush()
        return torch.cat(logits) if logits else None


class Wire:
    """From one rank to the next: sending does not wait, receiving does."""

    def __init__(self, group: Group):
        self.group = group
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        self.began = 0.0  # when the last input was there
        self._sending: list[tuple[dist.Work, Tensor]] = []  # tensors must live until they are sent

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        self.group.note("send", x.nbytes)
        self._sending = [(work, t) for work, t in self._sending if not work.is_completed()]
        self._sending.append((dist.isend(x, self.group.rank + 1), x))

    def receive(self, x: Tensor) -> Tensor:
        dist.recv(x, self.group.rank - 1)
        self.began = time.perf_counter()
        return x

    def flush(self) -> None:
        """Wait until all is sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []


class Received(nn.Module):
    """In place of the embedding: the residual stream (B, T, C) of the rank before."""

    def __init__(self, width: int, like: Tensor, wire: Wire):
        super().__init__()
        self._width, self._wire = width, wire
        self.register_buffer("_like", like.new_empty(0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self._wire.receive(self._like.new_empty(*tokens.shape, self._width))


class Embedded(nn.Module):
    """The embedding of the first rank, which notes when it began."""

    def __init__(self, embed: nn.Module, wire: Wire):
        super().__init__()
        self.embed, self._wire = embed, wire

    def forward(self, tokens: Tensor) -> Tensor:
        self._wire.began = time.perf_counter()
        return self.embed(tokens)


class Sending(nn.Module):
    """The last layer of a rank that is not the last: its output goes to the next rank."""

    def __init__(self, layer: Layer, wire: Wire):
        super().__init__()
        self.layer, self.config, self._wire = layer, layer.config, wire

    def forward(self, x: Tensor, update: Tensor | None, *rest: object) -> tuple[Tensor, None]:
        x, update = self.layer(x, update, *rest)
        x = x + update
        self._wire.send(x)
        return x, None


class LastLogits(nn.Module):
    """The head: computed by the last rank, handed to all."""

    def __init__(self, head: nn.Module | None, vocabulary: int, wire: Wire):
        super().__init__()
        self.last, self._vocabulary, self._wire = head, vocabulary, wire

    def forward(self, x: Tensor) -> Tensor:
        self._wire.flush()
        if self.last is not None:
            logits = self.last(x).contiguous()
        else:
            logits = x.new_empty(*x.shape[:-1], self._vocabulary)
        return self._wire.group.broadcast(logits, self._wire.group.size - 1)


def pipeline_parallel(model: Decoder, *, n_microbatches: int) -> Stage:
    """This rank's stage of `model`, inside torchrun; every rank calls it with the same model.

    ValueError for more ranks than layers (before any rank is asked) and for models that differ
    between the ranks. RuntimeError outside torchrun.
    """
    check_stages(len(model.layers), world_size())
    check_whole("n_microbatches", n_microbatches)
    return Stage(model, Group.sharing(model), n_microbatches)


def _stage_model(model: Decoder, group: Group, wire: Wire) -> Decoder:
    mine = part(len(model.layers), group.size, group.rank)
    shared = {id(p): p for p in model.parameters()}
    stage = copy.deepcopy(model, shared)
    layers = [stage.layers[i] for i in mine]
    if not wire.is_last:
        layers[-1] = Sending(layers[-1], wire)
    stage.layers = nn.ModuleList(layers)
    head = stage.head if wire.is_last else None
    stage.head = LastLogits(head, model.config.vocab_size, wire)
    if wire.is_first:
        stage.embed = Embedded(stage.embed, wire)
    else:
        stage.embed = Received(model.config.d_model, model.norm, wire)
    return stage
