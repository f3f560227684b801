"""Virtual time: a small model produces the tokens, and the clock moves as for a large one.

Each step takes what the roofline says that a large model's step takes on other hardware, so a
load test of a 70B model on eight GPUs runs on a laptop.
Not here: attention scores, launches, the time between steps.
"""

from minillm import costs
from minillm.config import ModelConfig
from minillm.hardware import Hardware, roofline_seconds
from minillm.timeline import Clock


def step_seconds(
    config: ModelConfig, hardware: Hardware, prefilled: int, decoded: int, context: int, dtype: str
) -> float:
    """Roofline time of a step with so many tokens, and `context` tokens in its caches.

    The weights and those caches are read once; each token takes 2 FLOPs a matrix parameter.
    Attention scores, a small part, are not counted; the output matrix is, for every token, though
    of a prompt only the last needs it.
    """
    read = costs.weight_read_bytes(config, dtype) + costs.kv_cache_bytes(config, 1, context, dtype)
    flops = 2 * costs.matmul_params(config) * (prefilled + decoded)
    return roofline_seconds(hardware, flops, read, dtype)


class VirtualClock(Clock):
    """Time as it would pass for another model on other hardware: only steps take time."""

    def __init__(self, config: ModelConfig, hardware: Hardware, dtype: str = "float16"):
        self._config, self._hardware, self._dtype = config, hardware, dtype
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def passed(self, prefilled: int, decoded: int, context: int) -> None:
        numbers = prefilled, decoded, context
        self._now += step_seconds(self._config, self._hardware, *numbers, self._dtype)


def saturation_rate(
    config: ModelConfig,
    hardware: Hardware,
    n_prompt: float,
    n_output: float,
    max_seqs: int,
    dtype: str,
) -> float:
    """Requests per second up to which no queue grows, for mean lengths of prompts and answers.

    It is the safe end of the knee. With all `max_seqs` places taken, a decode step of
    `step_seconds` gives max_seqs tokens. One request costs its prefill and its share of
    n_output - 1 such steps; the rate is one over that. Prefill and decode are counted as if they
    took turns. Where chunks of prompts ride along in decode steps that wait for memory, the knee
    comes later (lesson 08 predicts it).
    """
    prefill = 2 * costs.matmul_params(config) * n_prompt / hardware.peak(dtype)
    context = round(max_seqs * (n_prompt + n_output / 2))
    step = step_seconds(config, hardware, 0, max_seqs, context, dtype)
    return 1 / (prefill + (n_output - 1) * step / max_seqs)
