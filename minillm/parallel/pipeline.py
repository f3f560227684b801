"""Pipeline parallelism: each rank has some of the layers; micro-batches keep all ranks busy.

Sources: Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021, section 2.2, for the bubble,
and section 3 for tensor parallelism inside each stage.
Cost: a rank sends B T C numbers for each pass over (B, T) tokens. With R ranks and m micro-batches
that take equally long, a share (R - 1) / (m + R - 1) of the time is idle: the bubble.

A rank's part is a decoder with fewer layers, and its cache holds only those. Three modules connect
the parts, so the decoder stays as it is: the embedding of the later ranks receives the residual
stream, the layers of the earlier ranks send it, and the head broadcasts the last rank's logits. So
generate, speculation and the engine run the same on every rank; with one sequence at a time, all
ranks but one are idle. `Stage.generate` keeps several micro-batches in flight. (With
sequence_parallel each stage also ends with an all-gather, which only the last one needs.)
Not here: drafters that read the target's hidden states, which only the last rank has; backward
passes.
"""

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minillm.cache import Cache
from minillm.kv_cache import KVCache
from minillm.model import Decoder, Layer, Layers
from minillm.parallel.collectives import Group, patient_group, world_size
from minillm.parallel.plan import check_size, check_stages, part
from minillm.parallel.tensor import ShardedDecoder, check_matrices, shard
from minillm.sampling import greedy
from minillm.tools.checks import check_request, check_whole


@dataclass(frozen=True)
class Span:
    """When a rank's layers began and ended their work on one micro-batch, in seconds."""

    microbatch: int
    start: float
    end: float


class Stage:
    """This rank's part of a pipeline.

    model: a decoder for `minillm.generate`, speculation and the engine; every rank makes the same
    calls. group: the ranks of the pipeline. tensor_group: the ranks that share this stage, if there
    are several. spans: when this rank's layers worked during the last `forward` or `generate`.
    """

    def __init__(
        self, model: Decoder, group: Group, n_microbatches: int, tensor_group: Group | None = None
    ):
        self.group, self.n_microbatches, self.tensor_group = group, n_microbatches, tensor_group
        self._wire = Wire(group)
        self.model = _stage_model(model, group, self._wire)
        self.spans: list[Span] = []

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor | None:
        """Token ids (B, T), in micro-batches, to logits (B, T, V): on the last rank, else None.

        ValueError for fewer sequences than micro-batches.
        """
        self.spans, logits = [], []
        for i, rows in enumerate(self._microbatches(tokens)):
            hidden = self.model.hidden(rows)  # receives, computes, sends
            if self._wire.is_last:
                logits.append(self.model.head.inner(hidden))
            self._note(i)
        self._wire.flush()
        return torch.cat(logits) if logits else None

    @torch.inference_mode()
    def generate(self, prompts: Tensor, max_new_tokens: int) -> Tensor:
        """The greedy continuations (B, max_new_tokens) of prompts (B, T), on every rank.

        Each micro-batch has its own cache. While one waits for its token to return from the last
        rank to the first, the others are computed.
        """
        for prompt in prompts.tolist():
            check_request(self.model.config, prompt, max_new_tokens, ())
        given = list(self._microbatches(prompts))
        room = prompts.shape[1] + max_new_tokens
        caches = [KVCache(self.model, len(rows), room) for rows in given]
        produced = prompts.new_zeros(len(prompts), max_new_tokens)
        columns = produced.tensor_split(self.n_microbatches)  # views
        self.spans = []
        for step in range(max_new_tokens):
            for i, cache in enumerate(caches):
                if step:  # only the first rank needs the tokens; the others need their number
                    given[i] = columns[i][:, step - 1 : step].contiguous()
                    if self._wire.is_first:
                        given[i] = self._wire.receive_token(given[i])
                hidden = self.model.hidden(given[i], cache)
                if self._wire.is_last:
                    # (B, 1, C) in one piece: else the head is read once for each sequence
                    last = hidden[:, -1:].contiguous()
                    token = greedy(self.model.head.inner(last))  # (B, 1)
                    columns[i][:, step : step + 1] = token
                    if step < max_new_tokens - 1:
                        self._wire.send_token(token)
                self._note(i)
        self._wire.flush()
        return self.group.broadcast(produced, self.group.size - 1)

    def _microbatches(self, tokens: Tensor) -> tuple[Tensor, ...]:
        if len(tokens) < self.n_microbatches:
            raise ValueError(
                f"{len(tokens)} sequences cannot be cut into {self.n_microbatches} micro-batches; "
                "give more sequences or fewer micro-batches."
            )
        return tokens.tensor_split(self.n_microbatches)

    def _note(self, microbatch: int) -> None:
        self.spans.append(Span(microbatch, self._wire.began, _now(self.model.device)))


def _now(device: torch.device) -> float:
    """The time, after all work given to a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Wire:
    """From one rank to the next: sending does not block, receiving does. (NCCL may differ.)"""

    def __init__(self, group: Group):
        self.group = group
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        self.began = 0.0  # when the last input had arrived
        self._back = patient_group()  # tokens go back on their own group, apart from the stream
        self._sending: list[tuple[dist.Work, Tensor]] = []  # tensors must live until they are sent

    def send(self, x: Tensor) -> None:
        """Send x to the next rank."""
        self._send(x.contiguous(), self.group.rank + 1, self.group.process_group)

    def receive(self, x: Tensor) -> Tensor:
        """Receive from the previous rank, into x."""
        rank = self.group.global_rank(self.group.rank - 1)
        dist.recv(x, rank, group=self.group.process_group)
        self.began = _now(x.device)
        return x

    def send_token(self, tokens: Tensor) -> None:
        """Send from the last rank to the first."""
        if self.group.size > 1:
            self._send(tokens.cpu(), 0, self._back)

    def receive_token(self, tokens: Tensor) -> Tensor:
        """Receive what `send_token` sent; `tokens` has its shape."""
        if self.group.size == 1:
            return tokens
        found = tokens.cpu()
        dist.recv(found, self.group.global_rank(self.group.size - 1), group=self._back)
        return found.to(tokens.device)

    def _send(self, x: Tensor, rank: int, group: "dist.ProcessGroup | None") -> None:
        self.group.note("send", x.nbytes)
        self._sending = [(work, t) for work, t in self._sending if not work.is_completed()]
        work = dist.isend(x, self.group.global_rank(rank), group=group)
        self._sending.append((work, x))

    def flush(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []


class Received(nn.Module):
    """In place of the embedding: the residual stream (B, T, C) of the previous rank."""

    def __init__(self, model: Decoder, wire: Wire):
        super().__init__()
        self._width, self._wire = model.config.d_model, wire
        self._sequence = model.sequence if isinstance(model, ShardedDecoder) else None
        self.register_buffer("_like", model.norm.new_empty(0))  # device and dtype of the stream

    def forward(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        T = T if self._sequence is None else self._sequence.own_length
        return self._wire.receive(self._like.new_empty(B, T, self._width))


class Embedded(nn.Module):
    """The embedding of the first rank; it also notes when the pass began."""

    def __init__(self, embed: nn.Module, wire: Wire):
        super().__init__()
        self.inner, self._wire = embed, wire

    def forward(self, tokens: Tensor) -> Tensor:
        self._wire.began = _now(tokens.device)
        return self.inner(tokens)


class SendingLayers(Layers):
    """The layers of any rank but the last: their output goes to the next rank."""

    def __init__(self, layers: Iterable[Layer], wire: Wire):
        super().__init__(layers)
        self._wire = wire

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Cache,
        faster: bool | None = None,
    ) -> Tensor:
        x = super().forward(x, rope, cache, faster)
        self._wire.send(x)
        return x


class LastLogits(nn.Module):
    """The head: the last rank computes the logits and broadcasts them."""

    def __init__(self, head: nn.Module | None, vocabulary: int, wire: Wire):
        super().__init__()
        self.inner, self._vocabulary, self._wire = head, vocabulary, wire

    def forward(self, x: Tensor) -> Tensor:
        self._wire.flush()
        if self.inner is not None:
            logits = self.inner(x).contiguous()
        else:
            logits = x.new_empty(*x.shape[:-1], self._vocabulary)  # the broadcast fills it
        return self._wire.group.broadcast(logits, self._wire.group.size - 1)


def pipeline_parallel(
    model: Decoder, *, n_microbatches: int, tp: int = 1, sequence_parallel: bool = False
) -> Stage:
    """This rank's stage of `model`, inside torchrun; every rank calls it with the same model.

    tp: ranks that share each stage by tensor parallelism; sequence_parallel: as in
    `minillm.parallel.tensor`, for these.
    ValueError, before any communication, for more stages than layers and for a tp that does not
    fit; then for models that differ between ranks. RuntimeError outside torchrun.
    """
    n_stages = _count_stages(model, tp)
    check_whole("n_microbatches", n_microbatches)
    Group.sharing(model, tp=tp, sequence_parallel=sequence_parallel, n_microbatches=n_microbatches)
    tensor_group, pipeline_group = Group.tensor_and_pipeline(n_stages)
    if tp == 1:
        return Stage(model, pipeline_group, n_microbatches)
    sharded = shard(model, tensor_group, sequence_parallel=sequence_parallel)
    return Stage(sharded, pipeline_group, n_microbatches, tensor_group)


def _count_stages(model: Decoder, tp: int) -> int:
    """The number of stages of `tp` ranks each; ValueError for numbers that do not fit."""
    check_size(model.config, tp)
    if tp > 1:
        check_matrices(model, tp)
    size = world_size()
    if size % tp:
        raise ValueError(f"{size} ranks cannot be cut into stages of {tp}; start a multiple of it.")
    check_stages(len(model.layers), size // tp)
    return size // tp


def _stage_model(model: Decoder, group: Group, wire: Wire) -> Decoder:
    """A copy of `model` with this rank's layers, which shares the weights."""
    mine = part(len(model.layers), group.size, group.rank)
    shared = {id(p): p for p in model.parameters()}
    stage = copy.deepcopy(model, shared)
    layers = [stage.layers[i] for i in mine]
    stage.layers = Layers(layers) if wire.is_last else SendingLayers(layers, wire)
    head = stage.head if wire.is_last else None
    stage.head = LastLogits(head, model.config.vocab_size, wire)
    stage.embed = Embedded(stage.embed, wire) if wire.is_first else Received(stage, wire)
    return stage
