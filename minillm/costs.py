"""Counting: parameters, FLOPs, bytes *stored* and bytes *read*.

Every other lesson predicts with these numbers. Cost formulas (L layers, C width, H and K query and
key/value heads, D head dimension, F feed-forward width, V vocabulary):

    parameters      L * (C*H*D + 2*C*K*D + H*D*C + 3*C*F + 2*C) + V*C (+ V*C untied) + C
    KV bytes/token  2 * L * K * D * bytes
    FLOPs/token     2 * (parameters in matrices) + 4 * L * H * D * context

Sources: Kaplan et al. 2020, section 2.1 (2 FLOPs per parameter and token); Pope et al. 2022,
section 2 (memory and compute of inference). A multiply-add counts as 2 FLOPs. Counted: every matrix
product, attention scores and the head. Not counted: norms, softmax, rotary positions, activations,
sampling (together about 1% or less). The scales that quantized formats store beside their integers
are counted by `quantized_bytes` alone.
Everything is exact integer arithmetic on a `ModelConfig`; no tensors.
"""

from typing import Any

from minillm.config import ModelConfig
from minillm.tools.checks import check_whole

# Bits per stored number.
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}
_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
}


def dtype_bits(dtype: Any) -> int:
    """Bits per number for a dtype name ("float16", "bf16", "int4", …) or a torch.dtype.

    Raises ValueError for a dtype that is not in the table.
    """
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _BITS:
        raise ValueError(f"dtype {dtype!r} is not known here; choose one of {', '.join(_BITS)}.")
    return _BITS[name]


# Parameters


def param_breakdown(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; the values sum to `param_count`.

    A tied head counts once, under "embedding".
    """
    c, h, k, d, f = config.d_model, config.n_heads, config.n_kv_heads, config.d_head, config.d_ff
    attention = c * h * d + 2 * c * k * d + h * d * c  # W_q, W_k and W_v, W_o
    attention += (h + 2 * k) * d * config.qkv_bias + c * config.attn_out_bias
    mlp = (3 if config.mlp == "swiglu" else 2) * c * f  # gate, up, down: or up, down
    mlp += (c + f) * config.mlp_bias
    per_norm = c * (2 if config.norm == "layernorm" else 1)  # scale, and for LayerNorm a shift
    norms = config.n_layers * 2 * per_norm + per_norm  # two a layer, one at the end
    norms += config.n_layers * 2 * d * config.qk_norm
    return {
        "embedding": config.vocab_size * c,
        "positions": config.n_position_rows * c,
        "attention": config.n_layers * attention,
        "mlp": config.n_layers * mlp,
        "norms": norms,
        "head": 0 if config.tie_embeddings else config.vocab_size * c,
    }


def param_count(config: ModelConfig) -> int:
    """Number of distinct parameters (tied matrices once)."""
    return sum(param_breakdown(config).values())


def matmul_params(config: ModelConfig) -> int:
    """Parameters that one token is multiplied with: the layers' matrices, and the head.

    The head's matrix counts even when it is tied to the embedding: sharing saves memory, not work.
    """
    c = config.d_model
    heads = 2 * config.n_heads + 2 * config.n_kv_heads
    per_layer = c * heads * config.d_head + (3 if config.mlp == "swiglu" else 2) * c * config.d_ff
    return config.n_layers * per_layer + config.vocab_size * c


# Bytes


def _bytes(n_numbers: int, dtype: Any) -> int:
    """Bytes of `n_numbers`, rounded up to whole bytes in integer arithmetic."""
    return -(-n_numbers * dtype_bits(dtype) // 8)


def weight_bytes(config: ModelConfig, dtype: Any) -> int:
    """Bytes that hold all parameters in `dtype` (rounded up to whole bytes)."""
    return _bytes(param_count(config), dtype)


def quantized_bytes(config: ModelConfig, dtype: str, group_size: int = 32) -> int:
    """Bytes that a model takes as `minillm.quantize` stores it in "int8" or "int4".

    int8: one byte per number, and a 16-bit scale per row. int4: half a byte per number, and a
    16-bit scale and zero per group. The head is int8 in both, and a tied embedding is looked up
    from it. Norms, biases and an untied embedding keep 16 bits.
    Raises ValueError for another dtype, and for groups that do not divide a matrix's columns.
    """
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in ("int8", "int4"):
        raise ValueError(f"dtype is {dtype!r}; choose int8 or int4.")
    check_whole("group_size", group_size)
    c = config
    heads, vocabulary = c.n_heads * c.d_head, c.vocab_size * c.d_model
    up = (2 if c.mlp == "swiglu" else 1) * c.d_ff  # gate and up in one matrix, or up alone
    qkv = heads + 2 * c.n_kv_heads * c.d_head
    # (rows, columns) of a layer's matrices: qkv, out, up, down
    shapes = ((qkv, c.d_model), (c.d_model, heads), (up, c.d_model), (c.d_model, c.d_ff))
    layer = 0
    for rows, columns in shapes:
        if dtype == "int8":
            layer += rows * columns + 2 * rows  # one scale per row
        elif columns % group_size == 0:
            # scale and zero per group
            layer += rows * columns // 2 + 4 * rows * (columns // group_size)
        else:
            raise ValueError(
                f"{c.name} has a matrix of {columns} columns, which groups of {group_size} do not "
                "divide; choose a smaller group_size."
            )
    in_matrices = c.n_layers * sum(rows * columns for rows, columns in shapes) + vocabulary
    head = vocabulary + 2 * c.vocab_size
    # What is in no matrix keeps 16 bits.
    return c.n_layers * layer + head + 2 * (param_count(config) - in_matrices)


def weight_read_bytes(config: ModelConfig, dtype: Any) -> int:
    """Bytes of weights that one forward pass has to read, whatever the batch.

    All of them, except an untied input embedding: only the tokens' rows of it are fetched. Those
    rows are neglected here, as are the rows of a learned position table.
    """
    unread = config.n_position_rows * config.d_model
    unread += 0 if config.tie_embeddings else config.vocab_size * config.d_model
    return _bytes(param_count(config) - unread, dtype)


def kv_cache_bytes(config: ModelConfig, batch_size: int, seq_len: int, dtype: Any) -> int:
    """Bytes *stored* by a KV cache of batch_size * seq_len tokens.

    2 * L * K * D numbers for each token; the 2 is for keys and values.
    """
    check_whole("batch_size", batch_size, least=0)
    check_whole("seq_len", seq_len, least=0)
    per_token = 2 * config.n_layers * config.n_kv_heads * config.d_head
    return _bytes(batch_size * seq_len * per_token, dtype)


def kv_cache_read_bytes(config: ModelConfig, batch_size: int, context_len: int, dtype: Any) -> int:
    """Bytes *read* from the cache by a decode step with `context_len` tokens cached per sequence.

    Equal to the bytes stored: the cache is written once and read again for each new token.
    """
    return kv_cache_bytes(config, batch_size, context_len, dtype)


def decode_bytes(config: ModelConfig, batch_size: int, context_len: int, dtype: Any) -> int:
    """Bytes read per decode step: all weights once, and every sequence's cache."""
    cache = kv_cache_read_bytes(config, batch_size, context_len, dtype)
    return weight_read_bytes(config, dtype) + cache


def kv_bytes_per_token(config: ModelConfig, dtype: Any) -> int:
    """Bytes that one token adds to the cache."""
    return kv_cache_bytes(config, 1, 1, dtype)


def max_batch_size(config: ModelConfig, seq_len: int, memory_bytes: int, dtype: Any) -> int:
    """Largest batch of `seq_len`-token sequences whose cache fits beside the weights, or 0.

    Activations and the framework's own memory are not counted: a few percent of a serving GPU.
    """
    check_whole("seq_len", seq_len, least=0)
    check_whole("memory_bytes", memory_bytes, least=0)
    per_sequence = max(1, kv_cache_bytes(config, 1, seq_len, dtype))
    return max(0, memory_bytes - weight_bytes(config, dtype)) // per_sequence


def attention_bytes(
    n_queries: int, n_keys: int, d_head: int, dtype: Any, *, block: int | None = None
) -> int:
    """Bytes that one head's attention, without a causal mask, moves between HBM and SRAM.

    HBM is a GPU's main memory, SRAM is on the chip. N = T = S in the orders of growth.
    block None: plain attention. Q, K and V are read and O is written, N·d numbers each; the T × S
    scores are written, read by the softmax, written as weights and read again: Θ(N·d + N²).
    block: FlashAttention with that many queries per tile. Each tile of queries reads all keys and
    values once, and one float32 log-sum-exp is written for each query. With SRAM for M numbers a
    tile has Θ(M/d) rows, so Θ(N²·d²/M) (Dao et al. 2022, theorem 2).
    """
    check_whole("n_queries", n_queries, least=0)
    check_whole("n_keys", n_keys, least=0)
    check_whole("d_head", d_head, least=0)
    ends = 2 * n_queries * d_head  # Q in, O out
    if block is None:
        return _bytes(ends + 2 * n_keys * d_head + 4 * n_queries * n_keys, dtype)
    check_whole("block", block)
    tiles = -(-n_queries // block)
    return _bytes(ends + tiles * 2 * n_keys * d_head, dtype) + 4 * n_queries


# FLOPs


def attention_flops(config: ModelConfig, n_pairs: int) -> int:
    """FLOPs of QKᵀ and of PV over all layers: 2 * 2 * D per head for each (query, key) pair."""
    return 4 * config.n_layers * config.n_heads * config.d_head * n_pairs


def decode_flops(config: ModelConfig, context_len: int) -> int:
    """FLOPs, including the head's, for one new token that attends to `context_len` tokens.

    The token itself is one of them.
    """
    check_whole("context_len", context_len, least=0)
    return 2 * matmul_params(config) + attention_flops(config, context_len)


def prefill_flops(config: ModelConfig, n_tokens: int, *, last_logits_only: bool = False) -> int:
    """FLOPs for a prompt of `n_tokens` in one pass, causal: token i attends to i tokens.

    Equal to the sum of `decode_flops(config, i)` for i = 1 … n_tokens. `last_logits_only` applies
    the head to the last token only, which is all that generation needs.
    """
    check_whole("n_tokens", n_tokens, least=0)
    n_pairs = n_tokens * (n_tokens + 1) // 2
    flops = 2 * matmul_params(config) * n_tokens + attention_flops(config, n_pairs)
    if last_logits_only:
        flops -= 2 * config.vocab_size * config.d_model * max(0, n_tokens - 1)
    return flops
