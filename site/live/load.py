"""How many users can one chip serve? A load test in virtual time, rate by rate."""

from collections.abc import Iterator
from functools import lru_cache
from html import escape
from itertools import pairwise

from live.calculator import CHIPS, DTYPES, MODELS
from live.controls import Choice, Slider
from live.svg import Line, chart, number
from minillm.card import card
from minillm.config import ModelConfig
from minillm.hardware import Hardware
from minillm.serving.metrics import SLO, Summary, summarize
from minillm.serving.virtual_time import VirtualEngine, saturation_rate
from minillm.serving.workload import AZURE_OUTPUT, AZURE_PROMPT, azure_load, serve

N_REQUESTS, BUDGET = 80, 512
SHARES = (0.2, 0.5, 0.8, 1.0, 1.2, 1.5, 1.9, 2.5)
"""The rates, as shares of the predicted knee."""

CONTROLS = (
    Choice("model", "model", MODELS, "llama-3-8b"),
    Choice("chip", "chip", CHIPS, "h100"),
    Slider("places", "places", [4, 8, 16, 32, 64], 16),
    Slider("ttft", "promise: first token", [100, 200, 300, 500, 1000, 2000], 500, "ms"),
    Slider("tpot", "promise: each token", [10, 15, 20, 30, 50, 100], 30, "ms"),
)


def mean(lengths: tuple[tuple[float, int], ...]) -> float:
    """The mean of a distribution given by its percentiles, straight lines between them."""
    return sum((b - a) * (m + n) / 2 for (a, m), (b, n) in pairwise(lengths))


def knee(config: ModelConfig, hardware: Hardware, places: int, dtype: str) -> float:
    """Requests a second up to which no queue grows, for the mean lengths of the trace."""
    lengths = mean(AZURE_PROMPT), mean(AZURE_OUTPUT)
    return saturation_rate(config, hardware, *lengths, places, dtype)


@lru_cache(maxsize=200)
def tested(model: str, chip: str, places: int, rate: float, slo: SLO, dtype: str) -> Summary:
    """The summary of one load of `N_REQUESTS` requests."""
    config, hardware = ModelConfig.preset(model), Hardware.preset(chip)
    engine = VirtualEngine(config, hardware, dtype, max_seqs=places, max_batch_tokens=BUDGET)
    load = azure_load(rate, N_REQUESTS, 1, seed=0)
    return summarize(serve(engine, load), slo)


def draw(model: str, chip: str, places: int, ttft: float, tpot: float, width: int) -> Iterator[str]:
    """Goodput and time to the first token over the rate; a picture after each rate."""
    config, hardware = ModelConfig.preset(model), Hardware.preset(chip)
    dtype = "float16" if "float16" in hardware.peak_flops else "float32"
    it = card(config, hardware, 1, min(4096, config.max_seq_len), dtype)
    if config.max_seq_len < 4096 + 1024 and config.positions == "learned":
        raise ValueError(f"{model} was trained for {config.max_seq_len} positions, too few for "
                         "this trace's prompts.")  # fmt: skip
    if not it.largest_batch:
        raise ValueError(
            f"{model} in {DTYPES[dtype]} does not fit on one {chip}: it needs {it.chips} of them."
        )
    slo, at = SLO(ttft / 1e3, tpot / 1e3), knee(config, hardware, places, dtype)
    done: list[tuple[float, Summary]] = []
    for share in SHARES:
        rate = at * share
        done.append((rate, tested(model, chip, places, rate, slo, dtype)))
        yield _picture(done, at, width)


def _picture(done: list[tuple[float, Summary]], at: float, width: int) -> str:
    rates = [rate for rate, _ in done]
    sums = [summary for _, summary in done]
    good = chart(
        [
            Line("answered", "grey", list(zip(rates, (s.request_throughput for s in sums),
                                              strict=True)), dashed=True),
            Line("goodput", "green", list(zip(rates, (s.goodput for s in sums), strict=True))),
        ],
        width=width, x_label="requests sent a second", y_label="requests a second",
        mark=(at, f"knee predicted: {number(at)}"), log="x", height=210,
    )  # fmt: skip
    first = chart(
        [
            Line("half of the users", "blue", [(r, s.ttft[1] * 1e3) for r, s in done]),
            Line("99 of 100", "red", [(r, s.ttft[3] * 1e3) for r, s in done]),
        ],
        width=width, x_label="requests sent a second", y_label="ms to the first token",
        log="xy", height=210,
    )  # fmt: skip
    last = escape(str(sums[-1]))
    return (
        f'{good}{first}<p class="note">{len(done)} of {len(SHARES)} rates, {N_REQUESTS} requests '
        "each, lengths as in Azure's trace of 2023.</p><details><summary>the table that serving "
        f"benchmarks print, for {number(rates[-1])} requests a second</summary><pre>{last}</pre>"
        "</details>"
    )
