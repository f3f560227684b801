"""A cluster: a decode step's time by `minillm.parallel.step_time`, a pipeline's idle share."""

from live.calculator import MODELS
from live.controls import Choice, Slider
from live.svg import box, legend, number, picture, shares, text, tiles
from minillm import costs
from minillm.config import ModelConfig
from minillm.hardware import Hardware
from minillm.parallel.plan import bubble_share, check_stages, fitting_sizes
from minillm.parallel.step_time import LINKS, Cluster, StepTime, decode_time

SIZES = (1, 2, 4, 8, 16, 32)
CHIPS = ("a100-80gb", "h100", "h200")
DTYPE = "float16"

CONTROLS = (
    Choice("model", "model", MODELS, "llama-2-70b"),
    Choice("chip", "chip", {name: name for name in CHIPS}, "h100"),
    Choice("inside", "link inside a machine", {name: name for name in LINKS}, "nvlink-4"),
    Choice("between", "between machines of 8", {name: name for name in LINKS}, "infiniband-ndr"),
    Slider("tp", "TP: ranks a layer", list(SIZES), 8),
    Slider("pp", "PP: stages", [1, 2, 4, 8, 16], 1),
    Slider("batch", "sequences", [1, 2, 4, 8, 16, 32, 64, 128, 256], 16),
    Slider("context", "tokens in each", [128, 512, 1024, 2048, 4096], 2048),
    Slider("micro", "micro-batches", [1, 2, 4, 8, 16, 32, 64], 8),
)
PARTS = (
    ("compute", "blue", "compute or memory"),
    ("latency", "red", "waiting for the first bytes"),
    ("transfer", "orange", "the rest of the messages"),
)


def draw(
    model: str, chip: str, inside: str, between: str, tp: int, pp: int, batch: int, context: int,
    micro: int, width: int,
) -> str:  # fmt: skip
    """Milliseconds a step over the number of ranks; the pipeline's schedule."""
    config, hardware = ModelConfig.preset(model), Hardware.preset(chip)
    cluster = Cluster(hardware, inside, between)
    check_stages(config.n_layers, pp)

    def time(size: int) -> StepTime:
        numbers = {"batch_size": batch, "context_len": context, "dtype": DTYPE}
        return decode_time(config, cluster, tp=size, pp=pp, **numbers)

    mine = time(tp)
    needed = costs.weight_bytes(config, DTYPE) + costs.kv_cache_bytes(config, batch, context, DTYPE)
    have = tp * pp * hardware.memory_bytes
    gb = f"{number(needed / 1e9)} GB of weights and cache, {have / 1e9:,.0f} GB in {tp * pp} chips"
    bars = [
        (f"TP {size}", [(getattr(t, part) * 1e3, colour, what) for part, colour, what in PARTS])
        for size, t in ((size, time(size)) for size in SIZES if size in fitting_sizes(config))
    ]
    return "".join(
        (
            tiles(
                [
                    (f"{number(mine.total * 1e3)} ms", f"a step at TP {tp}, PP {pp}", ""),
                    (number(batch / mine.total), "tokens per second, one batch at a time", ""),
                    (f"{1 - mine.compute / mine.total:.0%}", "of it is communication", ""),
                    ("yes" if needed <= have else "no", gb, "good" if needed <= have else "bad"),
                ]
            ),
            legend([(colour, what) for _, colour, what in PARTS]),
            shares(bars, width=width, title="Milliseconds a step"),
            _pipeline(pp, micro, width),
        )
    )


def _pipeline(R: int, m: int, width: int) -> str:
    """Who works on which micro-batch when; a stage without one is idle."""
    if R == 1:
        return '<p class="note">One stage has no bubble. Cut the layers (PP) to see one.</p>'
    steps, left = m + R - 1, 58
    wide, high, parts = (width - left) / steps, 20, []
    for stage in range(R):
        parts.append(text(0, 20 + stage * high + 13, f"stage {stage + 1}", "small"))
        for step in range(steps):
            here = 0 <= step - stage < m
            x, y = left + step * wide, 20 + stage * high
            hint = f"micro-batch {step - stage + 1}" if here else "idle"
            kind = ("blue", "sky")[(step - stage) % 2] if here else "idle"
            parts.append(box(x, y, wide - 1, high - 2, kind, hint=hint))
    said = f"{m} micro-batches through {R} stages: {bubble_share(R, m):.0%} idle"
    parts.append(text(0, 12, said, "small"))
    return picture(width, 24 + R * high, parts, said)
