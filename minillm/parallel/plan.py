"""Which part of every matrix a rank holds: heads, columns of the MLP and tokens of the vocabulary.

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3.
Cost: each of R ranks holds about 1 / R of the parameters, and all norms.

    qkv, gate_up    rows: whole heads; the same rows of gate and of up
    out, down       columns: those that multiply the output of this rank's rows
    embed, head     rows: a slice of the vocabulary

The output of a rank's rows is read only by the same rank's columns, so an attention block or an MLP
needs one sum over the ranks, at its end. No tensors here.
"""

import dataclasses
from dataclasses import dataclass

from minillm.config import ModelConfig
from minillm.tools.checks import check_whole


def part(n: int, size: int, rank: int) -> range:
    """The rank's share of n items; the first ranks get one more if `size` does not divide n."""
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def fitting_sizes(config: ModelConfig) -> list[int]:
    """The numbers of ranks that can share the model's heads.

    All ranks have equally many query heads, and the key/value heads that these read. With more
    ranks than key/value heads, several ranks hold the same one.
    """
    H, K = config.n_heads, config.n_kv_heads
    return [R for R in range(1, H + 1) if H % R == 0 and (K % R == 0 or R % K == 0)]


def check_size(config: ModelConfig, size: int) -> None:
    """ValueError for a number of ranks that cannot share the model."""
    check_whole("the number of ranks", size)
    sizes = fitting_sizes(config)
    if size not in sizes:
        raise ValueError(
            f"{size} ranks cannot share the {config.n_heads} query heads and {config.n_kv_heads} "
            f"key/value heads of {config.name} evenly; start {' or '.join(map(str, sizes))}."
        )


def check_stages(n_layers: int, size: int) -> None:
    """ValueError for more pipeline stages than layers."""
    if size > n_layers:
        raise ValueError(f"{size} ranks cannot share {n_layers} layers; start at most {n_layers}.")


def bubble_share(R: int, m: int) -> float:
    """(R - 1) / (m + R - 1): the idle share of R ranks in a pipeline with m micro-batches."""
    return (R - 1) / (m + R - 1)


@dataclass(frozen=True)
class Plan:
    """What rank `rank` of `size` holds."""

    config: ModelConfig
    size: int
    rank: int

    def __post_init__(self) -> None:
        check_size(self.config, self.size)

    @property
    def heads(self) -> range:
        return part(self.config.n_heads, self.size, self.rank)

    @property
    def kv_heads(self) -> range:
        K = self.config.n_kv_heads
        if K % self.size == 0:
            return part(K, self.size, self.rank)
        shared = self.rank * K // self.size  # several ranks hold the same one
        return range(shared, shared + 1)

    @property
    def vocabulary(self) -> range:
        return part(self.config.vocab_size, self.size, self.rank)

    @property
    def mlp(self) -> range:
        """Cut at multiples of 32 or 16 where possible, so that 4-bit groups stay whole."""
        n = self.config.d_ff
        unit = next((u for u in (32, 16) if n % u == 0 and n // u >= self.size), 1)
        units = part(n // unit, self.size, self.rank)
        return range(units.start * unit, units.stop * unit)

    @property
    def layer_config(self) -> ModelConfig:
        """The config of this rank's layers, with fewer heads and a narrower MLP."""
        return dataclasses.replace(
            self.config,
            n_heads=len(self.heads),
            n_kv_heads=len(self.kv_heads),
            d_ff=len(self.mlp),
        )

    def rows(self, matrix: str) -> list[range] | None:
        """This rank's rows of the matrix of that name; None: all of them."""
        c = self.config
        if matrix == "qkv":
            q, kv = self.heads, self.kv_heads
            # The whole matrix has H query heads, then K key heads, then K value heads.
            k_first, v_first = c.n_heads, c.n_heads + c.n_kv_heads
            heads = [q, *(range(f + kv.start, f + kv.stop) for f in (k_first, v_first))]
            return [range(h.start * c.d_head, h.stop * c.d_head) for h in heads]
        if matrix == "gate_up":
            up = range(c.d_ff + self.mlp.start, c.d_ff + self.mlp.stop)
            return [self.mlp, up]
        return [self.vocabulary] if matrix in ("embed", "head") else None

    def columns(self, matrix: str) -> range | None:
        """This rank's columns of the matrix of that name; None: all of them."""
        if matrix == "out":
            return range(
                self.heads.start * self.config.d_head, self.heads.stop * self.config.d_head
            )
        return self.mlp if matrix == "down" else None


def check_groups(config: ModelConfig, size: int, matrix: str, group_size: int) -> None:
    """ValueError if `size` ranks cut a group of 4-bit numbers of the matrices of that name.

    A group shares a scale, so all of it must be on one rank.
    """
    for rank in range(size):
        columns = Plan(config, size, rank).columns(matrix)
        if columns and (columns.start % group_size or columns.stop % group_size):
            raise ValueError(
                f"{matrix} has groups of {group_size} numbers, which {size} ranks would cut at "
                f"columns {columns.start} and {columns.stop}; take smaller groups, int8 or another "
                "number of ranks."
            )
