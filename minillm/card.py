"""The card of a published model: what it costs to serve, in about 20 numbers. No tensors.

`card` counts them, and `str` of what it returns is the text that the command line prints.
"""

from dataclasses import dataclass

from minillm import costs
from minillm.config import ModelConfig
from minillm.hardware import Hardware, roofline_seconds
from minillm.tools.checks import check_whole


@dataclass(frozen=True)
class Card:
    """What it costs to serve `batch` sequences of `seq` tokens. Bytes, FLOPs and seconds.

    Times are lower bounds, by the roofline, and say what would be if everything fitted; `fits`
    and `largest_batch` say whether it does.
    """

    config: ModelConfig
    hardware: Hardware
    batch: int
    seq: int
    dtype: str
    parameters: dict[str, int]  # by part
    weight_bytes: int
    cache_bytes: int
    cache_bytes_per_token: int
    prefill_flops: int  # of one prompt
    decode_flops: int  # of one token
    intensity: float  # FLOPs per byte of a decode step
    ridge_point: float  # FLOPs per byte above which arithmetic is the limit
    prefill_seconds: float  # at least, for one prompt
    decode_seconds: float  # at least, for a step of the whole batch
    largest_batch: int  # sequences of `seq` tokens that fit beside the weights

    @property
    def n_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def chips(self) -> int:
        """How many such chips the weights alone need."""
        return -(-self.weight_bytes // self.hardware.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether weights and cache fit into one chip's memory."""
        return self.chips == 1 and self.batch <= self.largest_batch

    @property
    def tokens_per_second(self) -> float:
        """At most, of the whole batch."""
        return self.batch / self.decode_seconds

    @property
    def memory_bound(self) -> bool:
        """Whether reading, not arithmetic, is what a decode step waits for."""
        return self.intensity < self.ridge_point

    def __str__(self) -> str:
        total, weights, cache = self.n_parameters, self.weight_bytes, self.cache_bytes
        bits = f", {8 * weights / total:.2f} bits a parameter" if _quantized(self.dtype) else ""
        parts = [
            f"  {part:<14} {n:>18,}  {n / total:6.1%}"
            for part, n in self.parameters.items()
            if n  # a tied head and rotary positions have none
        ]
        prefill, decode, seq = self.prefill_flops / 1e12, self.decode_flops / 1e9, self.seq
        lines = [
            f"{self.config.name}, {self.dtype}, {self.batch} × {seq} tokens, "
            f"on {self.hardware.name}",
            "",
            f"parameters       {total:>18,}",
            *parts,
            f"weights          {weights / 1e9:>15.2f} GB  ({weights / 2**30:.2f} GiB{bits})",
            f"KV cache         {cache / 1e9:>15.2f} GB  "
            f"({self.cache_bytes_per_token:,} bytes a token)",
            "",
            f"prefill          {prefill:>12.2f} TFLOP  for one prompt of {seq} tokens",
            f"decode           {decode:>12.2f} GFLOP  for one token that sees {seq}",
            f"decode intensity {self.intensity:>12.1f} FLOP per byte  "
            f"(ridge point {self.ridge_point:.0f})",
            "",
            *self._bounds(),
        ]
        return "\n".join(lines)

    def _bounds(self) -> list[str]:
        """Lower bounds on times and the largest batch, or how many chips the weights need."""
        gb = self.hardware.memory_bytes / 1e9
        if self.chips > 1:
            return [
                f"does not fit: the weights alone need {self.chips} × {self.hardware.name} "
                f"({gb:.0f} GB each)"
            ]
        first, step, rate = self.prefill_seconds, self.decode_seconds, self.tokens_per_second
        lines = [
            f"prefill bound    {first * 1e3:>15.2f} ms  for one prompt",
            f"decode bound     {step * 1e3:>15.2f} ms  a step, {rate:,.0f} tokens/s",
            f"largest batch    {self.largest_batch:>18,}  sequences of {self.seq} tokens "
            f"in {gb:.0f} GB",
        ]
        if self.batch > self.largest_batch:
            lines.append(f"a batch of {self.batch} does not fit beside the weights")
        return lines


def card(config: ModelConfig, hardware: Hardware, batch: int, seq: int, dtype: str) -> Card:
    """What it costs to serve `batch` sequences of `seq` tokens on `hardware`.

    Raises ValueError for a batch or a length below 1, and for more tokens than positions.
    """
    check_whole("--batch", batch)
    check_whole("--seq", seq)
    if seq > config.max_seq_len:
        raise ValueError(
            f"--seq is {seq}; {config.name} was trained for at most {config.max_seq_len} positions."
        )
    arithmetic, kept = _arithmetic(hardware, dtype), _cache_dtype(dtype)
    weights, read = _weight_bytes(config, dtype), _read_bytes(config, dtype)
    prompt_flops = costs.prefill_flops(config, seq, last_logits_only=True)
    # A decode step: each sequence's token, the weights once, each sequence's cache.
    step_flops = batch * costs.decode_flops(config, seq)
    step_bytes = read + costs.kv_cache_read_bytes(config, batch, seq, kept)
    # The cache gets what the weights leave.
    one = max(1, costs.kv_cache_bytes(config, 1, seq, kept))
    return Card(
        config=config,
        hardware=hardware,
        batch=batch,
        seq=seq,
        dtype=dtype,
        parameters=costs.param_breakdown(config),
        weight_bytes=weights,
        cache_bytes=costs.kv_cache_bytes(config, batch, seq, kept),
        cache_bytes_per_token=costs.kv_bytes_per_token(config, kept),
        prefill_flops=prompt_flops,
        decode_flops=costs.decode_flops(config, seq),
        intensity=step_flops / step_bytes,
        ridge_point=hardware.ridge_point(arithmetic),
        prefill_seconds=roofline_seconds(hardware, prompt_flops, read, arithmetic),
        decode_seconds=roofline_seconds(hardware, step_flops, step_bytes, arithmetic),
        largest_batch=max(0, hardware.memory_bytes - weights) // one,
    )


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


def _arithmetic(hardware: Hardware, dtype: str) -> str:
    """The dtype that products are computed in.

    Weights in fewer bits are dequantized to 16 before the product, whatever the chip supports.
    """
    if costs.dtype_bits(dtype) == 32:
        return "float32"
    return next(d for d in ("float16", "float32") if d in hardware.peak_flops)
