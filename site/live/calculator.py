"""Will it fit, and how fast can it be? `minillm.card` for any model, chip, format and load."""

from html import escape

from live.controls import Choice, Slider, names
from live.svg import Line, box, chart, number, picture, seconds, text, tiles
from minillm.card import Card, card
from minillm.config import ModelConfig
from minillm.hardware import PRESETS, Hardware

MODELS = {
    "smollm2-135m": "SmolLM2-135M", "qwen3-0.6b": "Qwen3-0.6B", "llama-2-7b": "Llama-2-7B",
    "mistral-7b": "Mistral-7B", "llama-3-8b": "Llama-3-8B", "opt-13b": "OPT-13B",
    "llama-2-70b": "Llama-2-70B", "gpt3-175b": "GPT-3 175B",
}  # fmt: skip
CHIPS = names(PRESETS)
DTYPES = {"float32": "32 bits", "float16": "16 bits", "int8": "8 bits", "int4": "4 bits"}
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]

CONTROLS = (
    Choice("model", "model", MODELS, "llama-3-8b"),
    Choice("chip", "chip", CHIPS, "h100"),
    Choice("dtype", "numbers in", DTYPES, "float16"),
    Slider("batch", "sequences", BATCHES, 16),
    Slider("seq", "tokens in each", LENGTHS, 4096),
)


def draw(model: str, chip: str, dtype: str, batch: int, seq: int, width: int) -> str:
    """The bounds as tiles, the memory as a bar, and tokens per second over the batch."""
    config, hardware = ModelConfig.preset(model), Hardware.preset(chip)
    it = card(config, hardware, batch, seq, dtype)
    command = f"python -m minillm count {model} --batch {batch} --seq {seq} --dtype {dtype}"
    return "".join(
        (
            tiles(_tiles(it)),
            _memory(it, width),
            _sweep(it, width),
            f"<details><summary><code>{command} --gpu {chip}</code></summary>",
            f"<pre>{escape(str(it))}</pre></details>",
        )
    )


def _tiles(it: Card) -> list[tuple[str, str, str]]:
    billions = f"{number(it.n_parameters / 1e9)} G"
    if it.chips > 1:
        chips = f"the weights alone need {it.chips} chips"
        return [(billions, "parameters", ""), ("no", chips, "bad")]
    fits = ("yes", f"it fits; the largest batch is {it.largest_batch:,}", "good")
    if not it.fits:
        fits = ("no", f"at most {it.largest_batch:,} sequences fit beside the weights", "bad")
    limit = "memory" if it.memory_bound else "arithmetic"
    return [
        (billions, "parameters", ""),
        fits,
        (seconds(it.decode_seconds), f"a step at least; {limit} is the limit", ""),
        (number(it.tokens_per_second), "tokens per second at most", ""),
        (number(1 / it.decode_seconds), "for each user", ""),
        (seconds(it.prefill_seconds), f"to read a prompt of {it.seq:,}", ""),
    ]


def _memory(it: Card, width: int) -> str:
    """Weights and cache against the chip's memory, all in GB."""
    memory, weights, cache = (
        n / 1e9 for n in (it.hardware.memory_bytes, it.weight_bytes, it.cache_bytes)
    )
    scale = (width - 4) / max(memory, weights + cache)
    end = 2 + memory * scale
    parts = [
        box(2, 18, memory * scale, 26, "empty"),
        box(2, 18, weights * scale, 26, "blue", hint=f"weights: {number(weights)} GB"),
        box(2 + weights * scale, 18, cache * scale, 26, "green", hint=f"cache: {number(cache)} GB"),
        f'<path class="end" d="M{end:.1f} 12V52"/>',
        text(2, 12, f"weights {number(weights)} GB", "label blue"),
        text(min(2 + weights * scale, width - 110) if weights * scale > 130 else 140, 12,
             f"cache {number(cache)} GB", "label green"),
        text(max(end - 4, 110), 62, f"{it.hardware.name}: {memory:.0f} GB", "small", "end"),
    ]  # fmt: skip
    told = f"Memory: weights {number(weights)} GB, cache {number(cache)} GB of {memory:.0f} GB"
    return picture(width, 68, parts, told)


def _sweep(it: Card, width: int) -> str:
    """Tokens per second over the batch, as far as it fits."""
    each = [card(it.config, it.hardware, n, it.seq, it.dtype) for n in BATCHES]
    points = [(c.batch, c.tokens_per_second) for c in each]
    inside = [point for c, point in zip(each, points, strict=True) if c.fits]
    beyond = points[max(0, len(inside) - 1) :]
    lines = [Line("does not fit", "grey", beyond, dashed=True)] if len(beyond) > 1 else []
    if inside:
        lines.insert(0, Line("fits", "orange", inside))
    return chart(
        lines, width=width, log="xy", x_label="sequences in the batch",
        y_label="tokens per second, at most", dot=(it.batch, it.tokens_per_second),
    )  # fmt: skip
