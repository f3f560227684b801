"""Predicted time of a step on several GPUs: compute or memory, and communication.

Sources: Pope et al. 2022, section 3.1, for the parts; NCCL's own cost model for the messages,
src/tuning/cost_model.cc and ring.cc (2026; the latencies are those of NCCL 2.20); bandwidths: see
each link.
Cost: an all-reduce of n bytes over R ranks in a ring, with 2 (R - 1) hops from neighbour to
neighbour, takes

    seconds = start + 2 (R - 1) hop + 2 n (R - 1) / (R bandwidth)

When a few tokens are decoded, n is small and the number of hops counts; otherwise the bytes do.
Nothing here is measured. The predictions use the peaks from data sheets, so they are rather too
short.
Not here: communication that overlaps with compute; trees and in-switch reduction, which NCCL uses
where they are faster; the cap on the bandwidth of LL, and the factor of 1.4 for Simple between
machines; sending logits and tokens back to the first stage of a pipeline.
"""

from dataclasses import dataclass
from typing import Any

from minillm.config import ModelConfig
from minillm.costs import (
    attention_flops,
    dtype_bits,
    kv_cache_bytes,
    matmul_params,
    weight_read_bytes,
)
from minillm.hardware import GB, Hardware, roofline_seconds
from minillm.parallel.plan import check_size
from minillm.tools.checks import check_whole

MICROSECOND = 1e-6
PROTOCOLS = {"LL": (6.6, 0.5, 1.0), "LL128": (14.0, 0.92, 1.0), "Simple": (8.4, 1.0, 3.0)}
"""NCCL's protocols: µs until the first byte is sent, the share of the link's bandwidth that is left
for the data, and the least µs of a hop once several machines take part."""


@dataclass(frozen=True)
class Link:
    """One GPU to another: bytes/s one way, and µs of a hop under each of `PROTOCOLS`."""

    name: str
    bandwidth: float
    hops: tuple[float, float, float]
    source: str


NVLINK, PCI, NET = (0.6, 1.9, 3.4), (1.0, 2.5, 5.7), (2.7, 4.0, 14.0)
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink-3", 300 * GB, NVLINK,
             "NVIDIA A100 architecture whitepaper: 12 links of 25 GB/s each way"),
        Link("nvlink-4", 450 * GB, NVLINK,
             "NVIDIA H100 architecture whitepaper, 2023: 18 links of 25 GB/s each way"),
        Link("pcie-5", 64 * GB, PCI,
             "NVIDIA H100 architecture whitepaper, 2023: Gen5 x16, 64 GB/s each way"),
        Link("infiniband-ndr", 50 * GB, NET, "ConnectX-7: 400 Gb/s, a port per GPU in a DGX H100"),
        Link("ethernet-100", 12.5 * GB, NET,
             "100 Gb/s per GPU; hops as for InfiniBand, though Ethernet's are longer"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, `per_node` in each machine. inside, between: names in `LINKS`."""

    hardware: Hardware
    inside: str = "nvlink-4"
    between: str = "infiniband-ndr"
    per_node: int = 8

    def __post_init__(self) -> None:
        check_whole("per_node", self.per_node)
        for name in (self.inside, self.between):
            if name not in LINKS:
                raise ValueError(f"There is no link {name!r}; choose one of {', '.join(LINKS)}.")

    def ring(self, n_ranks: int, n_bytes: float, rounds: int) -> tuple[float, float]:
        """(seconds of latency, seconds of transfer) of a collective on n_bytes in all.

        rounds: trips around the ring: 2 for an all-reduce, 1 for the others. The fastest protocol
        is used.
        """
        if n_ranks == 1:
            return 0.0, 0.0
        nodes = -(-n_ranks // self.per_node)
        inside, between = LINKS[self.inside], LINKS[self.between]
        outer = rounds * (nodes - 1)  # hops between machines
        inner = rounds * (n_ranks - 1) - outer  # hops inside them
        # Each GPU of a node starts its own ring, so all ports of a node work at the same time.
        ports = self.per_node * between.bandwidth
        bandwidth = inside.bandwidth if nodes == 1 else min(inside.bandwidth, ports)
        sent = rounds * n_bytes * (n_ranks - 1) / n_ranks  # n (R - 1) / R a round
        ways = []
        for i, (start, share, least) in enumerate(PROTOCOLS.values()):
            hop = inside.hops[i] if nodes == 1 else max(inside.hops[i], least)
            latency = start + inner * hop + outer * between.hops[i]
            ways.append((latency * MICROSECOND, sent / (share * bandwidth)))
        return min(ways, key=sum)

    def send(self, n_bytes: float, n_ranks: int, n_stages: int) -> tuple[float, float]:
        """The same for n_bytes sent through all stages of a pipeline, each of `n_ranks` ranks."""
        outer = min(n_stages, -(-n_ranks * n_stages // self.per_node)) - 1
        borders = ((LINKS[self.inside], n_stages - 1 - outer), (LINKS[self.between], outer))
        start = PROTOCOLS["LL"][0]
        latency = sum(n * (start + link.hops[0]) * MICROSECOND for link, n in borders)
        return latency, sum(n * n_bytes / link.bandwidth for link, n in borders)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, in parts.

    compute: the roofline of one GPU's share; latency: until the first bytes of the messages
    arrive; transfer: the rest of the messages.
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
    """Time from one token of each sequence to the next, with tp ranks in each of pp stages.

    A token passes through the stages one after another, so more stages don't make it faster. They
    hold a larger model, and each can work on another batch at the same time.
    """
    cache = kv_cache_bytes(config, batch_size, context_len, dtype)
    pairs = batch_size * context_len
    return _time(config, cluster, tp, pp, pairs, cache, batch_size, batch_size, dtype)


def prefill_time(
    config: ModelConfig, cluster: Cluster, *, tp: int, pp: int = 1, n_tokens: int, dtype: Any
) -> StepTime:
    """Time of a prompt of `n_tokens` in one pass; other arguments as in `decode_time`."""
    cache = kv_cache_bytes(config, 1, n_tokens, dtype)
    pairs = n_tokens * (n_tokens + 1) // 2
    return _time(config, cluster, tp, pp, pairs, cache, n_tokens, 1, dtype)


def _time(
    config: ModelConfig, cluster: Cluster, tp: int, pp: int, n_pairs: int, cache: float,
    n_tokens: int, n_logits: int, dtype: Any,
) -> StepTime:  # fmt: skip
    """n_pairs: (query, key) pairs. cache: bytes that attention reads or writes."""
    check_size(config, tp)
    check_whole("pp", pp)
    head = config.vocab_size * config.d_model
    products = 2 * (n_tokens * (matmul_params(config) - head) + n_logits * head)
    weights = weight_read_bytes(config, dtype)
    cache /= min(tp, config.n_kv_heads)  # ranks that share a head each store its keys
    # The two follow each other: the products' arithmetic cannot hide behind attention's reads.
    compute = roofline_seconds(cluster.hardware, products / tp, weights / tp, dtype)
    pairs = attention_flops(config, n_pairs)
    compute += roofline_seconds(cluster.hardware, pairs / tp, cache, dtype)
    size = dtype_bits(dtype) / 8
    stream = n_tokens * config.d_model * size  # bytes of the residual stream
    # Two sums a layer and one after the embedding; the logits are gathered; stages send the stream.
    latency, transfer = (
        (2 * config.n_layers + 1) * summed + logits + sent
        for summed, logits, sent in zip(
            cluster.ring(tp, stream, 2),
            cluster.ring(tp, n_logits * config.vocab_size * size, 1),
            cluster.send(stream, tp, pp),
            strict=True,
        )
    )
    return StepTime(compute, latency, transfer)
