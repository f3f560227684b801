"""What users feel and what operators pay for: latencies, throughput and goodput. No tensors.

Sources: the terms are those of vLLM's and MLPerf's serving benchmarks; goodput as in Zhong et al.
2024 (DistServe), section 2.

    TTFT  time to first token: waiting in the queue, then the prefill
    ITL   inter-token latency: the time from each token to the next
    TPOT  time per output token: the mean of these over one answer
    latency = TTFT + TPOT · (tokens - 1)

Not here: the load to measure them under (`minillm.serving.workload`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from minillm.serving.request import Completion


@dataclass(frozen=True)
class SLO:
    """A service-level objective: at most so many seconds of TTFT, and of TPOT."""

    ttft: float
    tpot: float

    def met_by(self, completion: Completion) -> bool:
        """Answers of one token have no TPOT and need only the TTFT; aborted ones are never good."""
        in_time = completion.ttft <= self.ttft and not completion.tpot > self.tpot
        return in_time and completion.finish_reason != "aborted"


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, between the two nearest values by their distance; NaN for none.

    The same as numpy's default.
    """
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
    """A load test in numbers. Times in seconds, throughputs per second.

    `ttft`, `tpot`, `inter_token` and `latency` are the mean and the 50th, 90th and 99th
    percentile; `inter_token` is over all pairs of all answers, the others have one value an
    answer. `longest_pause` is the largest time between two tokens of an answer.
    """

    completed: int
    aborted: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    ttft: tuple[float, float, float, float]
    tpot: tuple[float, float, float, float]
    inter_token: tuple[float, float, float, float]
    longest_pause: float
    latency: tuple[float, float, float, float]
    slo: SLO | None
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
        """Requests per second that met the SLO."""
        return self.good / self.duration

    def __str__(self) -> str:
        """The table that serving benchmarks print."""
        all_tokens = self.prompt_tokens + self.output_tokens
        rows = [
            ("Requests completed", f"{self.completed}"),
            ("Requests aborted", f"{self.aborted}"),
            ("Duration (s)", f"{self.duration:.2f}"),
            ("Prompt tokens", f"{self.prompt_tokens}"),
            ("Output tokens", f"{self.output_tokens}"),
            ("Request throughput (req/s)", f"{self.request_throughput:.2f}"),
            ("Output token throughput (tok/s)", f"{self.token_throughput:.2f}"),
            ("Total token throughput (tok/s)", f"{all_tokens / self.duration:.2f}"),
        ]
        if self.slo is not None:
            limits = f"TTFT {self.slo.ttft * 1e3:g} ms, TPOT {self.slo.tpot * 1e3:g} ms"
            share = f"{self.good} of {self.completed + self.aborted} within {limits}"
            rows.append(("Goodput (req/s)", f"{self.goodput:.2f}   {share}"))
        for name, values in (
            ("TTFT", self.ttft),
            ("TPOT", self.tpot),
            ("ITL", self.inter_token),
            ("Latency", self.latency),
        ):
            for what, value in zip(("Mean", "p50", "p90", "p99"), values, strict=True):
                rows.append((f"{what} {name} (ms)", f"{value * 1e3:.2f}"))
            if name == "ITL":
                rows.append(("Longest ITL (ms)", f"{self.longest_pause * 1e3:.2f}"))
        return "\n".join(f"{name:<34}{value}" for name, value in rows)


def summarize(completions: Sequence[Completion], slo: SLO | None = None) -> Summary:
    """Summarize completions. The duration is from the first arrival to the last answer."""
    if not completions:
        raise ValueError("There are no completions to summarize.")
    done = [c for c in completions if c.finish_reason != "aborted"]
    start = min(c.arrival for c in completions)
    end = max(c.arrival + c.latency for c in completions)
    pauses = [pause for c in done for pause in c.inter_token]

    def four(values: list[float]) -> tuple[float, float, float, float]:
        values = [v for v in values if not math.isnan(v)]
        mean = fmean(values) if values else math.nan
        return (mean, *(percentile(values, p) for p in (50, 90, 99)))

    return Summary(
        completed=len(done),
        aborted=len(completions) - len(done),
        duration=end - start,
        prompt_tokens=sum(c.n_prompt for c in done),
        output_tokens=sum(len(c.tokens) for c in done),
        ttft=four([c.ttft for c in done]),
        tpot=four([c.tpot for c in done]),
        inter_token=four(pauses),
        longest_pause=max(pauses, default=math.nan),
        latency=four([c.latency for c in done]),
        slo=slo,
        good=sum(slo.met_by(c) for c in completions) if slo else 0,
    )
