"""The load to measure an engine under: request lengths, arrivals, and sending them when due.

Source of the lengths: the Azure LLM inference trace 2023, conversations (Microsoft, CC BY 4.0;
Patel et al. 2024, Splitwise, section 3); percentiles taken from all its requests.

An open-loop load generator sends requests when they are due, whether or not earlier ones are
answered, as users do: only that shows a queue growing. No tensors.
Not here: sending requests over a network.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from typing import TYPE_CHECKING

from minillm.serving.request import Completion
from minillm.serving.virtual_time import VirtualEngine
from minillm.tools.checks import brief

if TYPE_CHECKING:
    from minillm.sampling import Sampling
    from minillm.serving.engine import Engine

# Tokens at the percentiles 0, 1, …, 99 of the trace's 19,366 conversations.
_PROMPT = (
    2, 29, 91, 161, 181, 181, 191, 197, 201, 203, 207, 212, 222, 242, 317, 372, 375, 378, 381,
    384, 387, 390, 392, 394, 395, 396, 398, 399, 400, 402, 403, 405, 406, 408, 411, 414, 419,
    424, 433, 456, 703, 863, 903, 946, 972, 984, 994, 1002, 1009, 1014, 1020, 1025, 1031, 1036,
    1041, 1045, 1050, 1055, 1060, 1065, 1071, 1076, 1081, 1086, 1092, 1097, 1102, 1109, 1116,
    1122, 1130, 1139, 1147, 1159, 1171, 1189, 1214, 1249, 1311, 1314, 1315, 1321, 1368, 1508,
    1690, 1876, 2032, 2221, 2401, 2584, 2734, 3291, 4073, 4076, 4079, 4083, 4086, 4090, 4098,
    4142,
)  # fmt: skip
_OUTPUT = (
    7, 16, 24, 32, 38, 41, 44, 47, 49, 52, 54, 57, 59, 62, 64, 67, 69, 71, 73, 75, 77, 79, 81,
    82, 84, 85, 86, 87, 89, 90, 91, 92, 93, 94, 95, 96, 97, 99, 100, 101, 103, 105, 107, 108,
    110, 113, 116, 118, 122, 125, 129, 133, 137, 141, 145, 151, 156, 161, 163, 169, 177, 182,
    190, 202, 216, 217, 237, 371, 375, 378, 384, 387, 390, 393, 394, 395, 396, 396, 397, 398,
    400, 402, 404, 407, 410, 411, 414, 415, 417, 420, 424, 428, 429, 433, 442, 451, 468, 509,
    540, 601,
)  # fmt: skip


def _cut(lengths: tuple[int, ...]) -> tuple[tuple[float, int], ...]:
    """(share of requests, tokens), with the longest hundredth cut off at the 99th percentile."""
    return (*((i / 100, n) for i, n in enumerate(lengths)), (1.0, lengths[-1]))


# Their means are 1146 and 210 tokens; those of the whole trace are 1155 and 211, and its longest
# prompt has 14,050 tokens, more than many models take.
AZURE_PROMPT, AZURE_OUTPUT = _cut(_PROMPT), _cut(_OUTPUT)


def draw_length(
    distribution: Sequence[tuple[float, int]], generator: random.Random, scale: float = 1.0
) -> int:
    """A random length with these percentiles, interpolated linearly, times `scale`; at least 1."""
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


def bursty_arrivals(rate: float, n: int, variation: float, seed: int = 0) -> list[float]:
    """`n` arrival times in seconds, `rate` a second on average, that come in bursts.

    variation: the coefficient of variation of the gaps, their standard deviation over their mean.
    The gaps are independent and have a gamma distribution, of shape 1 / variation²: 1 is Poisson,
    more is burstier, less is more even.
    """
    for name, value in (("rate", rate), ("variation", variation)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {brief(value)}; give a finite number above 0.")
    generator, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(n):
        now += generator.gammavariate(1 / variation**2, variation**2 / rate)
        arrivals.append(now)
    return arrivals


@dataclass(frozen=True)
class TimedRequest:
    """One request of a load test, due `at` seconds after its start."""

    at: float
    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: "Sampling | None" = None

    def __post_init__(self) -> None:
        if not isinstance(self.at, (int, float)) or not 0 <= self.at < math.inf:
            raise ValueError(
                f"at is {brief(self.at)}; give the seconds after the start, 0 or more."
            )


def azure_load(
    rate: float, n: int, vocab_size: int, *, scale: float = 1.0, seed: int = 0
) -> list[TimedRequest]:
    """`n` requests of random tokens, with lengths like those of Azure's conversations.

    Lengths are multiplied with `scale`; arrivals are `rate` a second on average.
    """
    generator = random.Random(seed)

    def tokens() -> list[int]:
        n_prompt = draw_length(AZURE_PROMPT, generator, scale)
        return [generator.randrange(vocab_size) for _ in range(n_prompt)]

    return [
        TimedRequest(at, tokens(), draw_length(AZURE_OUTPUT, generator, scale))
        for at in poisson_arrivals(rate, n, seed)
    ]


def serve(
    engine: "Engine | VirtualEngine",
    load: Sequence[TimedRequest],
    *,
    admit: "Callable[[Engine | VirtualEngine, TimedRequest], bool] | None" = None,
    after: Callable[[TimedRequest, Completion], TimedRequest | None] | None = None,
) -> list[Completion]:
    """Send each request when it is due and step the engine until all are over.

    Returns the completions in the order in which the requests ended. A request that falls due
    during a step is counted from when it was due, not from when the step was over.
    admit: asked before a request is sent; one that it turns away has no completion. after: called
    with each request and its completion; gives the request that follows, such as a chat's next
    turn, due no earlier than that completion, or None.
    """
    start, order = engine.clock.now(), count()  # equal times stay in the order of the list
    due = [(request.at, next(order), request) for request in load]
    heapify(due)
    sent: dict[int, TimedRequest] = {}
    completions: list[Completion] = []
    while due or engine.busy:
        while due and start + due[0][0] <= engine.clock.now():
            request = heappop(due)[2]
            if admit is None or admit(engine, request):
                arrival = start + request.at
                ids, n, sampling = request.prompt_ids, request.max_new_tokens, request.sampling
                sent[engine.submit(ids, n, sampling=sampling, arrival=arrival)] = request
        if engine.busy:
            ended = engine.step()
            completions += ended
            for completion in ended if after else ():
                if follower := after(sent[completion.request_id], completion):
                    heappush(due, (follower.at, next(order), follower))
        elif due:
            engine.clock.wait_until(start + due[0][0])
    return completions
