"""Tensor parallelism: every matrix cut over the ranks, two sums a layer.

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2, for
sequence parallelism.
Cost: a pass over T tokens of width C has an all-reduce of T C numbers after the embedding, after
each attention and after each MLP, and an all-gather of the logits. Each of R ranks reads 1 / R of
the weights.

The decoder and the caches stay as they are: a rank's layers have fewer heads, and the last matrix
of each block also sums over the ranks. So generate, speculation and the engine run unchanged, the
same on every rank: all ranks get the same logits, hence the same tokens.

With sequence_parallel the per-token work between blocks (residual stream, norms) is cut along the
sequence: each rank keeps T / R of the tokens. An all-gather before a block and a reduce-scatter
after it replace the all-reduce: the same bytes where R divides T, and less memory.
Not here: an engine on every rank with a drafter. The engine decides by the clock whether drafting
pays, and clocks differ between ranks; with `minillm.parallel.serving` only rank 0 decides.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cache import Cache
from minillm.model import MATRICES, Decoder, Embedding, Linear
from minillm.parallel.collectives import Group, world_size
from minillm.parallel.plan import Plan, check_groups, check_size, part
from minillm.quantization.grid import QuantizedMatrix
from minillm.quantization.linear import Float8Linear, Int4Linear, Int8Embedding, Int8Linear

Matrix = Linear | Int8Linear | Int4Linear


def tensor_parallel(model: Decoder, *, sequence_parallel: bool = False) -> "ShardedDecoder":
    """This rank's part of `model`, inside torchrun; every rank calls it with the same model.

    It maps token ids to all logits, as the model did; `.group` has the ledger of bytes sent.
    sequence_parallel: keep only this rank's part of the sequence between blocks. Plain, int8, fp8
    and int4 matrices are cut as they are stored.
    ValueError, before any communication, for a number of ranks that cannot share the heads, for
    4-bit groups that straddle a cut, and for other kinds of matrices; then for models that differ
    between ranks. RuntimeError outside torchrun.
    """
    check_size(model.config, world_size())
    check_matrices(model, world_size())
    group = Group.sharing(model, sequence_parallel=sequence_parallel)
    return shard(model, group, sequence_parallel=sequence_parallel)


def shard(model: Decoder, group: Group, *, sequence_parallel: bool = False) -> "ShardedDecoder":
    """`tensor_parallel` over the ranks of an existing group."""
    plan = Plan(model.config, group.size, group.rank)
    sequence = SplitSequence(group) if sequence_parallel else None
    # By the id of a module, what deepcopy puts in its place: no whole matrix is ever copied.
    cuts: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        matrix = name.rpartition(".")[2]
        if matrix in ("qkv", "gate_up"):  # begins a block
            mine = cut(module, plan.rows(matrix))
            cuts[id(module)] = mine if sequence is None else Gathered(mine, sequence)
        elif matrix in ("out", "down"):  # ends a block
            cuts[id(module)] = Summed(cut(module, None, plan.columns(matrix)), group, sequence)
    head = cut(model.head, plan.rows("head"))
    cuts[id(model.head)] = VocabularyHead(head, plan, group)
    cuts[id(model.embed)] = VocabularyEmbedding(
        _embedding(model, head, plan), plan, group, sequence
    )
    sharded = copy.deepcopy(model, cuts)
    for layer in sharded.layers:
        layer.config = plan.layer_config
    sharded.__class__ = ShardedDecoder
    sharded.group, sharded.sequence = group, sequence
    return sharded


class ShardedDecoder(Decoder):
    """A rank's part of a decoder.

    group: the ranks that share it. sequence: how they share a sequence, with sequence_parallel.
    """

    group: Group
    sequence: "SplitSequence | None"

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        if self.sequence is None:
            return super().hidden(tokens, cache)
        self.sequence.length = tokens.shape[-1]
        return self.sequence.gathered(super().hidden(tokens, cache))


class SplitSequence:
    """The current pass's sequence, cut over R ranks: T / R tokens each, rounded up.

    A sequence of fewer tokens than ranks stays whole.
    """

    def __init__(self, group: Group):
        self.group, self.length = group, 0

    @property
    def _whole(self) -> bool:
        return self.length < self.group.size

    @property
    def own_length(self) -> int:
        """The number of tokens that each rank keeps."""
        return self.length if self._whole else -(-self.length // self.group.size)

    def gathered(self, x: Tensor) -> Tensor:
        """This rank's (B, T / R, C) to the whole (B, T, C)."""
        if self._whole:
            return x
        return self.group.all_gather(x, 1)[:, : self.length]

    def summed(self, x: Tensor) -> Tensor:
        """One summand (B, T, C) on each rank to this rank's part (B, T / R, C) of the sum."""
        if self._whole:
            return self.group.all_reduce(x)
        missing = -x.shape[1] % self.group.size
        return self.group.reduce_scatter(F.pad(x, (0, 0, 0, missing)), 1)


class Gathered(nn.Module):
    """Rows of a matrix, with an input that is cut along the sequence."""

    def __init__(self, rows: Matrix, sequence: SplitSequence):
        super().__init__()
        self.inner, self._sequence = rows, sequence

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self._sequence.gathered(x))


class Summed(nn.Module):
    """Columns of a matrix: each rank computes one summand of every output, and all are summed."""

    def __init__(self, columns: Matrix, group: Group, sequence: SplitSequence | None):
        super().__init__()
        self.bias, columns.bias = columns.bias, None  # added once, after the sum
        self.inner, self._group, self._sequence = columns, group, sequence

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        sequence = self._sequence
        out = self._group.all_reduce(out) if sequence is None else sequence.summed(out)
        return out if self.bias is None else out + self.bias


class VocabularyHead(nn.Module):
    """Each rank computes the logits of its slice of the vocabulary; all slices are gathered."""

    def __init__(self, rows: Matrix, plan: Plan, group: Group):
        super().__init__()
        self.inner, self._group = rows, group
        self._sizes = [len(part(plan.config.vocab_size, plan.size, r)) for r in range(plan.size)]

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        widest = max(self._sizes)
        logits = F.pad(logits, (0, widest - logits.shape[-1]))  # all ranks must send one shape
        every = self._group.all_gather(logits, -1).split(widest, -1)
        return torch.cat([own[..., :n] for own, n in zip(every, self._sizes, strict=True)], -1)


class VocabularyEmbedding(nn.Module):
    """Rows of the embedding: a rank looks up the tokens it holds, with 0 for others; then a sum."""

    def __init__(self, rows: nn.Module, plan: Plan, group: Group, sequence: SplitSequence | None):
        super().__init__()
        self.inner, self._group, self._sequence = rows, group, sequence
        self._first, self._n = plan.vocabulary.start, len(plan.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        at = tokens - self._first
        mine = (at >= 0) & (at < self._n)
        found = self.inner(at.clamp(0, self._n - 1)) * mine[..., None]  # (B, T, C), 0 if not held
        if self._sequence is not None:
            return self._sequence.summed(found)
        return self._group.all_reduce(found)


def cut(matrix: Matrix, rows: list[range] | None, columns: range | None = None) -> Matrix:
    """A module with copies of these row ranges, concatenated, or of these columns of `matrix`."""

    def of(x: Tensor, unit: int = 1) -> Tensor:
        """unit: consecutive numbers of a row that share one entry of x."""
        if rows is None:
            pieces = [x[:, columns.start // unit : columns.stop // unit]]
        else:
            pieces = [x[r.start : r.stop] for r in rows]
        if x.is_meta:  # for it torch.cat would load torch._dynamo, which takes seconds
            return x.new_empty(sum(map(len, pieces)), *pieces[0].shape[1:])
        return torch.cat(pieces)

    def per_row(x: Tensor | None) -> Tensor | None:
        return x if x is None or rows is None else of(x)

    bias = None if matrix.bias is None else nn.Parameter(per_row(matrix.bias), requires_grad=False)
    if isinstance(matrix, Int4Linear):  # a scale for each group of a row
        whole = matrix.matrix()
        scale, zero = (of(x, whole.group_size) for x in (whole.scale, whole.zero))
        own = QuantizedMatrix(of(whole.q), scale, zero)
        return Int4Linear(own, bias, _input_scale(matrix, columns))
    if isinstance(matrix, Int8Linear):  # a scale for each row
        own = QuantizedMatrix(of(matrix.weight), per_row(matrix.scale))
        return type(matrix)(own, bias, _input_scale(matrix, columns))
    weight = of(matrix.weight.detach())
    with torch.device("meta"):  # no memory for numbers that are replaced at once
        small = Linear(weight.shape[1], weight.shape[0], bias=False)
    small.weight, small.bias = nn.Parameter(weight, requires_grad=False), bias
    return small


def _input_scale(matrix: Int8Linear | Int4Linear, columns: range | None) -> Tensor | None:
    """The scales of the inputs that these columns take."""
    if matrix.input_scale is None or columns is None:
        return matrix.input_scale
    return matrix.input_scale[columns.start : columns.stop]


def _embedding(model: Decoder, head: Matrix, plan: Plan) -> nn.Module:
    """The plan's rows of the embedding: the head's own rows if the two are tied."""
    if isinstance(model.embed, Int8Embedding):
        return Int8Embedding(head)
    weight = head.weight
    if not model.config.tie_embeddings:
        (rows,) = plan.rows("embed")
        weight = nn.Parameter(model.embed.weight[rows.start : rows.stop].clone(), False)
    # The model's own class: nn.Embedding would draw numbers even there, and load torch._dynamo.
    embedding = Embedding(*weight.shape, device="meta")
    embedding.weight = weight
    return embedding


def check_matrices(model: Decoder, size: int) -> None:
    """ValueError if a matrix cannot be cut over `size` ranks."""
    for name, module in model.named_modules():
        matrix = name.rpartition(".")[2]
        if matrix not in MATRICES:
            continue
        if type(module) not in (Linear, Int8Linear, Float8Linear, Int4Linear):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which cannot be cut over ranks; give a "
                "model whose matrices are plain, or stored in int8, fp8 or int4."
            )
        if isinstance(module, Int4Linear):
            check_groups(model.config, size, matrix, module.group_size)
