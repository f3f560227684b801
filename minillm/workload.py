"""The load to measure an engine under: request lengths, arrivals, and sending them when due.

Source of the lengths: the Azure LLM inference trace 2023, conversations (Patel et al. 2024,
Splitwise, section 3).

An open-loop load generator sends requests when they are due, whether or not earlier ones are
answered, as users do: only that shows a queue growing.
Not here: sending requests over a network.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from minillm.checks import brief
from minillm.engine import Engine
from minillm.request import Completion
from minillm.sampling import Sampling

# (share of requests, tokens): the 50th, 90th and 99th percentiles of the trace. The shortest is
# taken as 1 token, and the longest hundredth is cut off.
AZURE_PROMPT = ((0.0, 1), (0.5, 1020), (0.9, 2735), (0.99, 4142), (1.0, 4142))
AZURE_OUTPUT = ((0.0, 1), (0.5, 129), (0.9, 424), (0.99, 601), (1.0, 601))


def draw_length(
    distribution: Sequence[tuple[float, int]], generator: random.Random, scale: float = 1.0
) -> int:
    """A length with the given percentiles, straight lines between them, times `scale`.

    At least 1 token.
    """
    u = generator.random()
    for (low, a), (high, b) in pairwise(distribution):
        if u <= high:
            return max(1, round((a + (b - a) * (u - low) / (high - low)) * scale))
    raise ValueError("The last percentile of the distribution must be 1.0.")


def poisson_arrivals(rate: float, n: int, seed: int = 0) -> list[float]:
    """`n` arrival times in seconds, independent of each other, `rate` a second on average.

    An infinite rate sends all at 0.
    """
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

    def __post_init__(self) -> None:
        if not isinstance(self.at, (int, float)) or not 0 <= self.at < math.inf:
            raise ValueError(
                f"at is {brief(self.at)}; give the seconds after the start, 0 or more."
            )


def azure_load(
    rate: float, n: int, vocab_size: int, *, scale: float = 1.0, seed: int = 0
) -> list[Load]:
    """`n` requests of random tokens, with lengths like those of Azure's conversations.

    Lengths are multiplied with `scale`; arrivals are `rate` a second on average.
    """
    generator = random.Random(seed)

    def tokens() -> list[int]:
        n_prompt = draw_length(AZURE_PROMPT, generator, scale)
        return [generator.randrange(vocab_size) for _ in range(n_prompt)]

    return [
        Load(at, tokens(), draw_length(AZURE_OUTPUT, generator, scale))
        for at in poisson_arrivals(rate, n, seed)
    ]


def serve(engine: Engine, load: Sequence[Load]) -> list[Completion]:
    """Send each request when it is due and step the engine until all are over.

    Returns the completions in the order in which the requests ended. A request that falls due
    during a step is counted from when it was due, not from when the step was over.
    """
    due, start = deque(sorted(load, key=lambda request: request.at)), engine.clock.now()
    completions: list[Completion] = []
    while due or engine.busy:
        while due and start + due[0].at <= engine.clock.now():
            request = due.popleft()
            engine.submit(
                request.prompt_ids,
                request.max_new_tokens,
                sampling=request.sampling,
                arrival=start + request.at,
            )
        if engine.busy:
            completions += engine.step()
        elif due:
            engine.clock.wait_until(start + due[0].at)
    return completions
