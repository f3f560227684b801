"""Percentiles, summaries and loads by hand and against NumPy; the open loop; the knee."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import lively

from minillm import Engine, EngineConfig, Hardware, ModelConfig, Sampling, costs, generate
from minillm.serving.metrics import SLO, percentile, summarize
from minillm.serving.request import Completion
from minillm.serving.timeline import Clock
from minillm.serving.virtual_time import VirtualClock, saturation_rate, step_seconds
from minillm.serving.workload import (
    AZURE_OUTPUT,
    AZURE_PROMPT,
    TimedRequest,
    azure_load,
    draw_length,
    poisson_arrivals,
    serve,
)

LLAMA, A100 = ModelConfig.preset("llama-2-7b"), Hardware.preset("a100-80gb")
MODEL = lively(n_layers=1)


def completion(
    *times: float, arrival: float = 0.0, ended: float = 0.0, reason: str = "length"
) -> Completion:
    """With a token at each of `times`, seconds after the arrival."""
    tokens = [1] * len(times)
    return Completion(0, 10, tokens, reason, arrival, list(times), ended or times[-1])


# Percentiles


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_numpys(values, p):
    assert percentile(values, p) == pytest.approx(np.percentile(values, p), rel=1e-9, abs=1e-6)


def test_percentile_of_few():
    assert math.isnan(percentile([], 50)) and percentile([3.0], 99) == 3.0
    assert [percentile([4, 1, 2, 3], p) for p in (0, 50, 90, 100)] == [
        1,
        2.5,
        pytest.approx(3.7),
        4,
    ]
    for p in (-1, 100.5, math.nan):
        with pytest.raises(ValueError, match=r"p is .*; a percentile is from 0 to 100"):
            percentile([1.0], p)


# Summaries


def test_summary_by_hand():
    done = [
        completion(1.0, 1.1, 1.3, 1.35, 1.4, arrival=2.0),
        completion(2.0, 2.5, 3.0, arrival=4.0, reason="stop"),
        completion(3.0, arrival=5.0),
        completion(0.5, 11.0, arrival=1.0, reason="aborted"),
    ]
    s = summarize(done, SLO(ttft=2.5, tpot=0.2))
    assert (s.completed, s.aborted, s.duration) == (3, 1, 12.0 - 1.0)
    assert (s.prompt_tokens, s.output_tokens) == (30, 9)
    assert s.ttft == pytest.approx((2.0, 2.0, 2.8, 2.98))
    assert s.tpot == pytest.approx((0.3, 0.3, 0.46, 0.496))
    # Of the pauses 0.05, 0.05, 0.1, 0.2, 0.5, 0.5; the aborted request's does not count.
    assert s.inter_token == pytest.approx((1.4 / 6, 0.15, 0.5, 0.5))
    assert s.longest_pause == 0.5
    assert s.latency == pytest.approx((7.4 / 3, 3.0, 3.0, 3.0))
    assert s.good == 1 and s.goodput == 1 / 11
    assert (s.request_throughput, s.token_throughput) == (3 / 11, 9 / 11)
    table = str(s)
    for line in (
        "Requests completed                3\n",
        "Goodput (req/s)                   0.09   1 of 4 within TTFT 2500 ms",
        "p99 TTFT (ms)                     2980.00",
        "p50 ITL (ms)                      150.00",
        "Longest ITL (ms)                  500.00",
        "Total token throughput (tok/s)    3.55",
    ):
        assert line in table
    assert "Goodput" not in str(summarize(done)) and summarize(done).good == 0


def test_what_is_not_a_number_is_left_out():
    s = summarize([completion(ended=2.0), completion(1.0)])
    assert s.ttft == (1.0, 1.0, 1.0, 1.0) and s.latency[0] == 1.5
    assert all(math.isnan(x) for x in (*s.tpot, *s.inter_token, s.longest_pause))
    assert "nan" in str(s)
    s = summarize([completion(1.0, 2.0, reason="aborted")])
    assert s.completed == 0 and s.request_throughput == 0
    assert all(math.isnan(x) for x in (*s.latency, *s.inter_token))
    with pytest.raises(ValueError, match="There are no completions to summarize"):
        summarize([])


@pytest.mark.parametrize(
    ("done", "good"),
    [
        (completion(1.0, 1.1, 1.2), True),
        (completion(1.0001, 1.1, 1.2), False),
        (completion(1.0, 1.05, 1.2002), False),
        (completion(1.0, 1.2, 1.2), True),  # the mean counts
        (completion(1.0), True),
        (completion(ended=2.0), False),
        (completion(1.0, 1.1, reason="aborted"), False),
        (completion(1.0, 1.1, reason="stop"), True),
        (completion(1.0, 1.1, ended=99.0), True),
    ],
)
def test_objective(done, good):
    assert SLO(ttft=1.0, tpot=0.1 + 1e-9).met_by(done) is good


# Loads


def test_poisson_arrivals():
    arrivals = poisson_arrivals(4.0, 20_000, seed=3)
    gaps = np.diff([0.0, *arrivals])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03) and gaps.std() == pytest.approx(
        1 / 4, rel=0.03
    )
    assert np.exp(-1) == pytest.approx((gaps > 1 / 4).mean(), abs=0.01)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    per_second = np.bincount(np.array(arrivals).astype(int))[:-1]
    assert per_second.var() == pytest.approx(per_second.mean(), rel=0.06)


def test_arrivals_follow_their_seed_and_scale_with_the_rate():
    assert (
        poisson_arrivals(2.0, 9, seed=1)
        == poisson_arrivals(2.0, 9, seed=1)
        != poisson_arrivals(2.0, 9, seed=2)
    )
    assert poisson_arrivals(2.0, 9) == pytest.approx([2 * at for at in poisson_arrivals(4.0, 9)])
    assert poisson_arrivals(math.inf, 3) == [0.0, 0.0, 0.0] and poisson_arrivals(1.0, 0) == []
    for rate in (0, -1.0, math.nan):
        with pytest.raises(
            ValueError, match=r"rate is .*; give a number of requests per second above 0"
        ):
            poisson_arrivals(rate, 3)


@pytest.mark.parametrize(
    ("distribution", "published"),
    [(AZURE_PROMPT, (1020, 2735, 4142)), (AZURE_OUTPUT, (129, 424, 601))],
)
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_lengths_have_the_published_percentiles(distribution, published, scale):
    g = random.Random(0)
    lengths = [draw_length(distribution, g, scale) for _ in range(20_000)]
    assert [percentile(lengths, p) for p in (50, 90, 99)] == pytest.approx(
        [n * scale for n in published], rel=0.03, abs=1.0
    )
    assert min(lengths) >= 1 and max(lengths) <= round(published[-1] * scale)
    assert all(type(n) is int for n in lengths)


def test_a_distribution_must_end():
    with pytest.raises(ValueError, match="The last percentile of the distribution must be 1"):
        draw_length([(0.0, 1), (1e-9, 2)], random.Random(0))


def test_azure_load():
    load = azure_load(3.0, 400, 97, scale=0.05, seed=5)
    assert [request.at for request in load] == poisson_arrivals(3.0, 400, 5)
    assert {token for request in load for token in request.prompt_ids} == set(range(97))
    assert np.mean([len(request.prompt_ids) for request in load]) == pytest.approx(
        0.05 * 1146, rel=0.1
    )  # ∫ of the straight lines
    assert (
        azure_load(3.0, 5, 97, seed=1)
        == azure_load(3.0, 5, 97, seed=1)
        != azure_load(3.0, 5, 97, seed=2)
    )


# The open loop


class Tick(Clock):
    """Each step takes a second, however much is in it."""

    def __init__(self) -> None:
        self.time, self.waits = 50.0, []

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.waits.append(moment)
        self.time = max(self.time, moment)

    def passed(self, prefilled: int, decoded: int, context: int) -> None:
        self.time += 1


def test_arrivals_count_from_when_they_are_due():
    """Due during a step: it waits for the step's end, and that counts.

    Nothing to do: the clock moves on to the next.
    """
    clock = Tick()
    engine = Engine(MODEL, EngineConfig(n_blocks=20, prefix_caching=False), clock=clock)
    load = [
        TimedRequest(10.0, [9, 8, 7], 2),
        TimedRequest(0.0, [1, 2, 3], 4),
        TimedRequest(1.25, [4, 5], 2, Sampling(1.0, seed=3)),
        TimedRequest(20.0, [6], 1),
    ]
    done = serve(engine, load)
    rows = [(c.arrival - 50, c.ttft, c.tpot, c.latency, len(c.tokens)) for c in done]
    assert rows[:3] == [
        (0.0, 1.0, 1.0, 4.0, 4),
        (1.25, 1.75, 1.0, 2.75, 2),
        (10.0, 1.0, 1.0, 2.0, 2),
    ]
    assert rows[3][:2] == (20.0, 1.0) and math.isnan(rows[3][2]) and rows[3][3:] == (1.0, 1)
    assert clock.waits == [60.0, 70.0] and clock.time == 71.0
    assert done[0].tokens == generate(MODEL, [1, 2, 3], 4)
    assert done[1].tokens == generate(MODEL, [4, 5], 2, sampling=Sampling(1.0, seed=3))
    assert not engine.busy


def test_serving_nothing():
    assert serve(Engine(MODEL, EngineConfig(n_blocks=2)), []) == []


def test_the_real_clock_waits():
    clock = Clock()
    moment = clock.now() + 0.02
    clock.wait_until(moment)
    assert clock.now() >= moment
    clock.wait_until(moment)  # the past is no reason to wait
    done = serve(
        Engine(MODEL, EngineConfig(n_blocks=20)),
        [TimedRequest(0.0, [1, 2], 2), TimedRequest(0.02, [3], 2)],
    )
    assert done[1].arrival - done[0].arrival == pytest.approx(0.02, abs=1e-9)


# Predictions


def test_step_seconds_by_hand():
    """Llama-2-7B on an A100: 6.6 billion parameters are read, 13.2 GB; as many FLOPs a token."""
    matrices = 6_738_415_616 - 32_000 * 4096 - 65 * 4096  # all but the embedding and the norms
    read = 2 * (matrices + 65 * 4096)
    assert step_seconds(LLAMA, A100, 0, 1, 0, "float16") == pytest.approx(read / 2039e9)
    assert step_seconds(LLAMA, A100, 0, 8, 8000, "float16") == pytest.approx(
        (read + 8000 * 524_288) / 2039e9
    )
    assert step_seconds(LLAMA, A100, 1000, 24, 1024, "float16") == pytest.approx(
        2 * matrices * 1024 / 312e12
    )
    assert costs.matmul_params(LLAMA) == matrices


def test_virtual_time_is_the_sum_of_the_steps():
    clock = VirtualClock(LLAMA, A100)
    engine = Engine(MODEL, EngineConfig(n_blocks=40, max_batch_tokens=64), clock=clock)
    serve(engine, [TimedRequest(0.0, [1] * 50, 5), TimedRequest(0.001, [2] * 60, 9)])
    steps = engine.stats.timeline
    assert clock.now() == pytest.approx(
        sum(step_seconds(LLAMA, A100, s.prefilled, s.decoded, s.context, "float16") for s in steps)
    )
    assert all(
        s.end - s.start
        == pytest.approx(step_seconds(LLAMA, A100, s.prefilled, s.decoded, s.context, "float16"))
        for s in steps
    )
    clock.wait_until(1.0)
    clock.wait_until(0.5)
    assert clock.now() == 1.0


N_PROMPT, N_OUTPUT, MAX_SEQS = 32, 16, 8
RATE = saturation_rate(LLAMA, A100, N_PROMPT, N_OUTPUT, MAX_SEQS, "float16")


def simulated(rate: float, n: int) -> list[Completion]:
    """`n` requests of those mean lengths, half to one and a half times as long, in virtual time."""
    g = random.Random(1)
    load = [
        TimedRequest(
            at,
            [g.randrange(97) for _ in range(g.randint(N_PROMPT // 2, N_PROMPT * 3 // 2))],
            g.randint(N_OUTPUT // 2, N_OUTPUT * 3 // 2),
        )
        for at in poisson_arrivals(rate, n)
    ]
    config = EngineConfig(
        n_blocks=400, max_seqs=MAX_SEQS, max_batch_tokens=128, prefix_caching=False
    )
    return serve(Engine(MODEL, config, clock=VirtualClock(LLAMA, A100)), load)


def test_saturation_rate_by_hand():
    step = step_seconds(LLAMA, A100, 0, 8, 8 * 40, "float16")
    assert pytest.approx(32 * 2 * costs.matmul_params(LLAMA) / 312e12 + 15 * step / 8) == 1 / RATE
    assert saturation_rate(LLAMA, A100, 32, 16, 16, "float16") > 1.5 * RATE
    assert saturation_rate(LLAMA, A100, 600, 16, 8, "float16") < RATE


def test_saturation_rate_is_what_a_full_engine_does():
    done = simulated(math.inf, 120)
    assert summarize(done).request_throughput == pytest.approx(RATE, rel=0.2)


def test_the_knee_is_where_it_was_predicted():
    """A quarter below the rate the last wait no longer than the first; a third above they do."""

    def waits(factor: float) -> tuple[float, float]:
        done = sorted(simulated(factor * RATE, 200), key=lambda c: c.arrival)
        return tuple(summarize(part).ttft[0] for part in (done[10:40], done[-30:]))

    service = 1 / RATE * MAX_SEQS  # about what one request takes
    early, late = waits(0.75)
    assert max(early, late) < service
    early, late = waits(1.33)
    assert late > 2 * early and late > 2 * service
