"""What an engine is told when it is made: its memory, its limits, its switches."""

from dataclasses import dataclass

from minillm.speculation.drafters import Drafter


@dataclass(frozen=True)
class EngineConfig:
    """How much memory and how many requests at once.

    n_blocks blocks of block_size tokens are the cache; they take
    `costs.kv_cache_bytes(config, 1, n_blocks * block_size, dtype)` bytes. With kv_dtype there are
    scales besides: 2 bytes in int8 and 4 in int4 for each token, layer, head, keys and values.
    max_seqs: requests running at once. max_waiting: requests that may wait besides, or None.
    max_batch_tokens: tokens computed in one step, prompts included. More gives more throughput,
    fewer a shorter pause for the requests that decode.
    policy "static" is the baseline: a batch starts when the last is over, and its answers come
    when its longest is done. cuda_graphs: replay decode steps on a GPU
    (`minillm.serving.cuda_graphs`). kv_dtype: None, "int8" or "int4"
    (`minillm.quantization.kv_cache`). drafter: guesses up to k tokens of each decoding request
    (`minillm.serving.proposals`); a model that drafts has a cache of its own, of as many blocks.
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
    drafter: Drafter | None = None
    k: int = 4
