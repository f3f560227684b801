"""The card of a published model: what it costs to serve, in about 20 lines. No tensors."""

from minillm import costs
from minillm.config import ModelConfig
from minillm.hardware import Hardware, roofline_seconds
from minillm.tools.checks import check_whole


def card(config: ModelConfig, hardware: Hardware, batch: int, seq: int, dtype: str) -> str:
    """What it costs to serve `batch` sequences of `seq` tokens on `hardware`, as text."""
    check_whole("--batch", batch)
    check_whole("--seq", seq)
    if seq > config.max_seq_len:
        raise ValueError(
            f"--seq is {seq}; {config.name} was trained for at most {config.max_seq_len} positions."
        )
    total, weights = costs.param_count(config), _weight_bytes(config, dtype)
    cache = costs.kv_cache_bytes(config, batch, seq, _cache_dtype(dtype))
    per_token = costs.kv_bytes_per_token(config, _cache_dtype(dtype))
    prompt_flops = costs.prefill_flops(config, seq, last_logits_only=True)
    token_flops = costs.decode_flops(config, seq)
    # Below the ridge point decode is limited by memory, not arithmetic.
    intensity = batch * token_flops / _step_bytes(config, batch, seq, dtype)
    ridge = hardware.ridge_point(_arithmetic(hardware, dtype))
    bits = f", {8 * weights / total:.2f} bits a parameter" if _quantized(dtype) else ""
    parts = [
        f"  {part:<14} {n:>18,}  {n / total:6.1%}"
        for part, n in costs.param_breakdown(config).items()
        if n  # a tied head and rotary positions have none
    ]
    lines = [
        f"{config.name}, {dtype}, {batch} × {seq} tokens, on {hardware.name}",
        "",
        f"parameters       {total:>18,}",
        *parts,
        f"weights          {weights / 1e9:>15.2f} GB  ({weights / 2**30:.2f} GiB{bits})",
        f"KV cache         {cache / 1e9:>15.2f} GB  ({per_token:,} bytes a token)",
        "",
        f"prefill          {prompt_flops / 1e12:>12.2f} TFLOP  for one prompt of {seq} tokens",
        f"decode           {token_flops / 1e9:>12.2f} GFLOP  for one token that sees {seq}",
        f"decode intensity {intensity:>12.1f} FLOP per byte  (ridge point {ridge:.0f})",
        "",
        *_bounds(config, hardware, batch, seq, dtype),
    ]
    return "\n".join(lines)


def _quantized(dtype: str) -> bool:
    return dtype in ("int8", "int4")


def _weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Weight bytes stored; int8 and int4 include their scales and an int8 head."""
    return (costs.quantized_bytes if _quantized(dtype) else costs.weight_bytes)(config, dtype)


def _read_bytes(config: ModelConfig, dtype: str) -> int:
    """Weight bytes read per pass; an untied embedding and a position table are skipped."""
    kept = _cache_dtype(dtype)
    unread = costs.weight_bytes(config, kept) - costs.weight_read_bytes(config, kept)
    return _weight_bytes(config, dtype) - unread


def _cache_dtype(dtype: str) -> str:
    """With weights in 8 or 4 bits the cache stays in 16."""
    return "bfloat16" if _quantized(dtype) else dtype


def _step_bytes(config: ModelConfig, batch: int, seq: int, dtype: str) -> int:
    """Bytes read per decode step: the weights, and each sequence's cache."""
    cache = costs.kv_cache_read_bytes(config, batch, seq, _cache_dtype(dtype))
    return _read_bytes(config, dtype) + cache


def _arithmetic(hardware: Hardware, dtype: str) -> str:
    """The dtype that products are computed in.

    Weights in fewer bits are dequantized to 16 before the product, whatever the chip supports.
    """
    if costs.dtype_bits(dtype) == 32:
        return "float32"
    return next(d for d in ("float16", "float32") if d in hardware.peak_flops)


def _bounds(config: ModelConfig, hardware: Hardware, batch: int, seq: int, dtype: str) -> list[str]:
    """Lower bounds on times and the largest batch, or how many chips the weights need."""
    memory, weights = hardware.memory_bytes, _weight_bytes(config, dtype)
    if weights > memory:
        n = -(-weights // memory)
        return [
            f"does not fit: the weights alone need {n} × {hardware.name} ({memory / 1e9:.0f} GB "
            "each)"
        ]
    # Roofline of one prompt, then of one decode step
    arithmetic = _arithmetic(hardware, dtype)
    prompt_flops = costs.prefill_flops(config, seq, last_logits_only=True)
    first = roofline_seconds(hardware, prompt_flops, _read_bytes(config, dtype), arithmetic)
    step_flops = batch * costs.decode_flops(config, seq)
    step_bytes = _step_bytes(config, batch, seq, dtype)
    step = roofline_seconds(hardware, step_flops, step_bytes, arithmetic)
    # The cache gets what the weights leave.
    one = max(1, costs.kv_cache_bytes(config, 1, seq, _cache_dtype(dtype)))
    largest = (memory - weights) // one
    lines = [
        f"prefill bound    {first * 1e3:>15.2f} ms  for one prompt",
        f"decode bound     {step * 1e3:>15.2f} ms  a step, {batch / step:,.0f} tokens/s",
        f"largest batch    {largest:>18,}  sequences of {seq} tokens in {memory / 1e9:.0f} GB",
    ]
    if batch > largest:
        lines.append(f"a batch of {batch} does not fit beside the weights")
    return lines
