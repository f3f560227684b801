"""The engine's configuration: its memory, its limits, its switches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.speculation.drafters import Drafter


@dataclass(frozen=True)
class EngineConfig:
    """How much memory an engine has, and how many requests run at once.

    n_blocks blocks of block_size tokens are the cache; they take
    `costs.kv_cache_bytes(config, 1, n_blocks * block_size, dtype)` bytes. kv_dtype "int8" or "int4"
    (`minillm.quantization.kv_cache`) adds scales: 2 or 4 bytes for each token, layer and head, for
    keys and for values.
    max_seqs: requests running at once. max_waiting: requests that may wait while all places are
    taken, or None for no limit.
    max_batch_tokens: tokens computed in one step, prompts included. A larger value gives more
    throughput, a smaller one shorter pauses for requests that decode.
    policy "static" is the baseline: a batch starts when the last one is over, and its answers come
    when its longest is done. cuda_graphs: replay decode steps on a GPU
    (`minillm.serving.cuda_graphs`). drafter: proposes up to k draft tokens for each decoding
    request (`minillm.serving.proposals`); a model that drafts has a cache of its own, with as many
    blocks.
    """

    n_blocks: int
    block_size: int = 16
    max_seqs: int = 64
    max_batch_tokens: int = 512
    policy: str = "continuous"
    prefix_caching: bool = True
    chunked_prefill: bool = True
    max_waiting: int | None = None
    kv_dtype: str | None = None
    cuda_graphs: bool = False
    backend: str = "auto"
    drafter: "Drafter | None" = None
    k: int = 4
