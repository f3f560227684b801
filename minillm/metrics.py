"""What users feel and what operators pay for: latencies, throughput and goodput, and the load to measure them under.

Sources: the terms are those of vLLM's and MLPerf's serving benchmarks; goodput as in Zhong et al. 2024 (DistServe), section 2;
request lengths from the Azure LLM inference trace 2023, conversations (Patel et al. 2024, Splitwise, section 3).

    TTFT  time to first token: waiting in the queue, then the prefill, at whose end the first token is there
    TPOT  time per output token: the mean time between one token and the next
    latency = TTFT + TPOT · (tokens - 1)

An open-loop load generator sends requests when they are due, whether or not earlier ones are answered, as users do: only
that shows a queue growing. Time is real, or virtual: then a small model produces the tokens, and the clock moves on by
what a large model's step would take by the roofline.
Not here: sending requests over a network.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from minillm import costs
from minillm.config import ModelConfig
from minillm.engine import Clock, Completion, Engine
from minillm.hardware import Hardware, roofline_seconds
from minillm.sampling import Sampling


@dataclass(frozen=True)
class Objective:
    """What counts as good service: at most these seconds to the first token, and between two tokens on average."""

    ttft: float
    tpot: float

    def met_by(self, completion: Completion) -> bool:
        """Answers of one token have no TPOT and need only the TTFT; aborted ones are never good."""
        in_time = completion.ttft <= self.ttft and not completion.tpot > self.tpot
        return in_time and completion.finish_reason != "aborted"


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, between the two nearest values by their distance (as numpy does by default); NaN for none."""
    if not 0 <= p <= 100:
        raise ValueError(f"p is {p}; a percentile is from 0 to 100.")
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Summary:
    """A load test in numbers. Times in seconds, throughputs per second; `ttft`, `tpot`, `latency` are tuples of the mean and
    the 50th, 90th and 99th percentile."""

    completed: int
    aborted: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    ttft: tuple[float, float, float, float]
    tpot: tuple[float, float, float, float]
    latency: tuple[float, float, float, float]
    objective: Objective | None
    good: int

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def token_throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.duration

    @property
    def goodput(self) -> float:
        """Requests per second that met the objective."""
        return self.good / self.duration

    def __str__(self) -> str:
        """The table that serving benchmarks print."""
        rows = [
            ("Requests completed", f"{self.completed}"),
            ("Requests aborted", f"{self.aborted}"),
            ("Duration (s)", f"{self.duration:.2f}"),
            ("Prompt tokens", f"{self.prompt_tokens}"),
            ("Output tokens", f"{self.output_tokens}"),
            ("Request throughput (req/s)", f"{self.request_throughput:.2f}"),
            ("Output token throughput (tok/s)", f"{self.token_throughput:.2f}"),
            ("Total token throughput (tok/s)", f"{(self.prompt_tokens + self.output_tokens) / self.duration:.2f}"),
        ]
        if self.objective is not None:
            limits = f"TTFT {self.objective.ttft * 1e3:g} ms, TPOT {self.objective.tpot * 1e3:g} ms"
            rows.append(("Goodput (req/s)", f"{self.goodput:.2f}   {self.good} of {self.completed + self.aborted} within {limits}"))
        for name, values in (("TTFT", self.ttft), ("TPOT", self.tpot), ("Latency", self.latency)):
            rows += [(f"{what} {name} (ms)", f"{v * 1e3:.2f}") for what, v in zip(("Mean", "p50", "p90", "p99"), values, strict=True)]
        return "\n".join(f"{name:<34}{value}" for name, value in rows)


def summarize(completions: Sequence[Completion], objective: Objective | None = None) -> Summary:
    """Put completions in numbers. The duration is from the first arrival to the last answer."""
    if not completions:
        raise ValueError("There are no completions to summarize.")
    done = [c for c in completions if c.finish_reason != "aborted"]

    def four(values: list[float]) -> tuple[float, float, float, float]:
        values = [v for v in values if not math.isnan(v)]
        return (fmean(values) if values else math.nan, *(percentile(values, p) for p in (50, 90, 99)))

    start, end = min(c.arrival for c in completions), max(c.arrival + c.latency for c in completions)
    return Summary(
        len(done), len(completions) - len(done), end - start, sum(c.n_prompt for c in done), sum(len(c.tokens) for c in done),
        four([c.ttft for c in done]), four([c.tpot for c in done]), four([c.latency for c in done]),
        objective, sum(objective.met_by(c) for c in completions) if objective else 0,
    )  # fmt: skip


# The load

# (share of requests, tokens): percentiles 50, 90 and 99 of the Azure LLM inference trace 2023, conversations. The shortest is
# taken as 1 token, and the longest hundredth is cut off.
AZURE_PROMPT = ((0.0, 1), (0.5, 1020), (0.9, 2735), (0.99, 4142), (1.0, 4142))
AZURE_OUTPUT = ((0.0, 1), (0.5, 129), (0.9, 424), (0.99, 601), (1.0, 601))


def draw_length(distribution: Sequence[tuple[float, int]], generator: random.Random, scale: float = 1.0) -> int:
    """A length with the given percentiles, straight lines between them, times `scale`; at least 1 token."""
    u = generator.random()
    for (low, a), (high, b) in pairwise(distribution):
        if u <= high:
            return max(1, round((a + (b - a) * (u - low) / (high - low)) * scale))
    raise ValueError("The last percentile of the distribution must be 1.0.")


def poisson_arrivals(rate: float, n: int, seed: int = 0) -> list[float]:
    """`n` arrival times in seconds, independent of each other, `rate` a second on average; an infinite rate sends all at 0."""
    if not rate > 0:
        raise ValueError(f"rate is {rate}; give a number of requests per second above 0.")
    generator, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(n):
        now += generator.expovariate(rate) if math.isfinite(rate) else 0.0
        arrivals.append(now)
    return arrivals


@dataclass(frozen=True)
class Load:
    """One request of a load test, due `at` seconds after its start."""

    at: float
    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling | None = None


def azure_load(rate: float, n: int, vocab_size: int, *, scale: float = 1.0, seed: int = 0) -> list[Load]:
    """`n` requests with random tokens and lengths like Azure's conversations, times `scale`, arriving at `rate` a second."""
    generator = random.Random(seed)
    return [
        Load(
            at,
            [generator.randrange(vocab_size) for _ in range(draw_length(AZURE_PROMPT, generator, scale))],
            draw_length(AZURE_OUTPUT, generator, scale),
        )
        for at in poisson_arrivals(rate, n, seed)
    ]


def serve(engine: Engine, load: Sequence[Load]) -> list[Completion]:
    """Send each request when it is due and step the engine until all are over; in the order in which they ended.

    A request that falls due during a step is counted from when it was due, not from when the step was over.
    """
    due, start = deque(sorted(load, key=lambda request: request.at)), engine.clock.now()
    completions: list[Completion] = []
    while due or engine.busy:
        while due and start + due[0].at <= engine.clock.now():
            request = due.popleft()
            engine.submit(request.prompt_ids, request.max_new_tokens, sampling=request.sampling, arrival=start + request.at)
        if engine.busy:
            completions += engine.step()
        elif due:
            engine.clock.wait_until(start + due[0].at)
    return completions


# Predictions


def step_seconds(config: ModelConfig, hardware: Hardware, prefilled: int, decoded: int, context: int, dtype: str) -> float:
    """Roofline time of a step with so many tokens, whose sequences have `context` tokens in their caches: the weights and
    those caches are read once; each token takes 2 FLOPs a matrix parameter. Attention scores, a small part, are not counted;
    the output matrix is, for every token, though of a prompt only the last needs it."""
    tokens = prefilled + decoded
    read = costs.weight_read_bytes(config, dtype) + costs.kv_cache_bytes(config, 1, context, dtype)
    return roofline_seconds(hardware, 2 * costs.matmul_params(config) * tokens, read, dtype)


class VirtualClock(Clock):
    """Time as it would pass for another model on other hardware: each step takes its `step_seconds`, nothing else does."""

    def __init__(self, config: ModelConfig, hardware: Hardware, dtype: str = "float16"):
        self._config, self._hardware, self._dtype = config, hardware, dtype
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def passed(self, prefilled: int, decoded: int, context: int) -> None:
        self._now += step_seconds(self._config, self._hardware, prefilled, decoded, context, self._dtype)


def saturation_rate(config: ModelConfig, hardware: Hardware, n_prompt: float, n_output: float, max_seqs: int, dtype: str) -> float:
    """Requests per second up to which no queue grows, for prompts and answers of these mean lengths: the safe end of the knee.

    With all `max_seqs` places taken, a decode step of step_seconds gives max_seqs tokens. One request costs its prefill and
    its share of n_output - 1 such steps; the rate is one over that. Prefill and decode are counted as if they took turns.
    Where chunks of prompts ride along in decode steps that wait for memory, the knee comes later (lesson 08 predicts it).
    """
    prefill = 2 * costs.matmul_params(config) * n_prompt / hardware.peak(dtype)
    step = step_seconds(config, hardware, 0, max_seqs, round(max_seqs * (n_prompt + n_output / 2)), dtype)
    return 1 / (prefill + (n_output - 1) * step / max_seqs)
