"""How long a step takes on several GPUs: arithmetic or memory, and what the ranks tell each other.

Sources: Pope et al. 2022, section 3.1, for the parts; for the latencies NCCL's own cost model,
src/tuning/cost_model.cc and ring.cc (2026; the ring's numbers are those of NCCL 2.20); bandwidths
at each link.
Cost: of an all-reduce of n bytes over p ranks in a ring, with 2 (p - 1) steps from neighbour to
neighbour:

    seconds = start + 2 (p - 1) hop + 2 n (p - 1) / (p bandwidth)

In decoding n is small, and what counts is how many steps there are; in a prefill it is the bytes.
Nothing here is measured: it is a prediction for machines that are described by their makers.
Not here: communication that overlaps with arithmetic; trees and switches that add up by themselves,
which NCCL takes where they are faster, so its times may be shorter.
"""

from dataclasses import dataclass
from typing import Any

from minillm.checks import check_whole
from minillm.config import ModelConfig
from minillm.costs import (
    decode_flops,
    dtype_bits,
    kv_cache_bytes,
    prefill_flops,
    weight_read_bytes,
)
from minillm.hardware import GB, Hardware, roofline_seconds
from minillm.parallel.plan import check_size

START = 6.6e-6
"""Seconds until the first byte of a collective is under way (NCCL, ring, protocol LL)."""


@dataclass(frozen=True)
class Link:
    """From one GPU to another: bytes/s one way, and seconds for a small message."""

    name: str
    bandwidth: float
    hop: float
    source: str


_HOPS = "hop from NCCL's table for the ring and LL"
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink-3", 300 * GB, 0.6e-6,
             f"NVIDIA A100 architecture whitepaper: 12 links of 25 GB/s a way; {_HOPS}"),
        Link("nvlink-4", 450 * GB, 0.6e-6,
             f"NVIDIA H100 architecture whitepaper, 2023: 18 links of 25 GB/s a way; {_HOPS}"),
        Link("pcie-5", 64 * GB, 1.0e-6,
             f"NVIDIA H100 architecture whitepaper, 2023: Gen5 x16, 64 GB/s a way; {_HOPS}"),
        Link("infiniband-ndr", 50 * GB, 2.7e-6,
             f"ConnectX-7: 400 Gb/s, one port a GPU in a DGX H100; {_HOPS}"),
        Link("ethernet-100", 12.5 * GB, 2.7e-6,
             f"100 Gb/s for each GPU; {_HOPS}, which is for InfiniBand: Ethernet's is longer"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, `per_node` of them on a machine. inside and between: names of `LINKS`."""

    hardware: Hardware
    inside: str = "nvlink-4"
    between: str = "infiniband-ndr"
    per_node: int = 8

    def __post_init__(self) -> None:
        check_whole("per_node", self.per_node)
        for name in (self.inside, self.between):
            if name not in LINKS:
                raise ValueError(f"There is no link {name!r}; choose one of {', '.join(LINKS)}.")

    def ring(self, n_ranks: int, n_bytes: float, rounds: int) -> "tuple[float, float]":
        """(seconds of waiting, seconds of transfer) of a collective of n bytes in all.

        rounds: how often a ring goes round: 2 for an all-reduce, 1 for the others.
        """
        if n_ranks == 1:
            return 0.0, 0.0
        nodes = -(-n_ranks // self.per_node)
        inside, between = LINKS[self.inside], LINKS[self.between]
        outer = rounds * (nodes - 1)
        hops = (rounds * (n_ranks - 1) - outer) * inside.hop + outer * between.hop
        # Each GPU of a node starts a ring of its own, so a node's ports work at the same time.
        ports = self.per_node * between.bandwidth
        bandwidth = inside.bandwidth if nodes == 1 else min(inside.bandwidth, ports)
        return START + hops, rounds * n_bytes * (n_ranks - 1) / n_ranks / bandwidth


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, in parts.

    compute: the roofline of a GPU's share; latency: until the first bytes of the messages are
    there; transfer: the rest of them.
    """

    compute: float
    latency: float
    transfer: float

    @property
    def total(self) -> float:
        return self.compute + self.latency + self.transfer


def decode_time(
    config: ModelConfig, cluster: Cluster, *, tp: int, pp: int = 1, batch_size: int,
    context_len: int, dtype: Any,
) -> StepTime:  # fmt: skip
    """From one token of each sequence to the next, with tp ranks in each of pp stages.

    A token goes through one stage after another, so more stages don't make it faster. They hold
    more, and work on as many other batches at the same time.
    """
    flops = batch_size * decode_flops(config, context_len)
    cache = kv_cache_bytes(config, batch_size, context_len, dtype)
    return _time(config, cluster, tp, pp, flops, cache, batch_size, batch_size, dtype)


def prefill_time(
    config: ModelConfig, cluster: Cluster, *, tp: int, pp: int = 1, n_tokens: int, dtype: Any
) -> StepTime:
    """One prompt of `n_tokens` in one pass; the rest as in `decode_time`."""
    flops = prefill_flops(config, n_tokens, last_logits_only=True)
    cache = kv_cache_bytes(config, 1, n_tokens, dtype)
    return _time(config, cluster, tp, pp, flops, cache, n_tokens, 1, dtype)


def _time(
    config: ModelConfig, cluster: Cluster, tp: int, pp: int, flops: float, cache: float,
    n_tokens: int, n_logits: int, dtype: Any,
) -> StepTime:  # fmt: skip
    check_size(config, tp)
    check_whole("pp", pp)
    weights = weight_read_bytes(config, dtype) / tp
    cache /= min(tp, config.n_kv_heads)  # ranks that share a head both have its keys
    compute = roofline_seconds(cluster.hardware, flops / tp, weights + cache, dtype)
    size = dtype_bits(dtype) / 8
    stream = n_tokens * config.d_model * size
    sums = 2 * config.n_layers + 1
    wait, transfer = (sums * s for s in cluster.ring(tp, stream, 2))
    logits = cluster.ring(tp, n_logits * config.vocab_size * size, 1)
    link = LINKS[cluster.inside if tp * pp <= cluster.per_node else cluster.between]
    wait += logits[0] + (pp - 1) * link.hop
    transfer += logits[1] + (pp - 1) * stream / tp / link.bandwidth
    return StepTime(compute, wait, transfer)
