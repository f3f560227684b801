"""Draws figures/generation.gif: the default model generating, pass by pass, with real numbers.

Each pass reads all weights once. The first reads them for the whole prompt, every later one for a
single token; the cache gains a slot for each token. Clock and tokens are those of this machine.
"""

import time
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from minillm import costs, generate, load, prepack
from minillm.tools.folders import figures_folder
from minillm.tools.plots import BLUE, GREY, ORANGE

PROMPT, N_NEW = "A language model is", 14
SWEEP = 3  # frames in which the weights of one pass stream past
SLOTS = 18
MILLISECONDS = 160  # that a picture is shown


@dataclass(frozen=True)
class Frame:
    """What one picture shows."""

    n_new: int  # tokens written so far
    seconds: float
    n_bytes: float
    layers: range  # that are being read
    n_slots: int  # of the cache that are filled


def record() -> tuple[list[str], list[str], list[Frame], int]:
    """Generate once to warm up and once with the clock; returns prompt, answer, frames, layers."""
    model, tokenizer = load()
    if model.device.type == "cpu":
        model = prepack(model)  # as in the lessons
    ids = tokenizer.encode(PROMPT)
    generate(model, ids, N_NEW)
    times: list[float] = []
    start = time.perf_counter()
    new = generate(model, ids, N_NEW, on_token=lambda _: times.append(time.perf_counter() - start))
    config, frames, before, read = model.config, [], 0.0, 0.0
    for n, now in enumerate(times):
        context = len(ids) + n
        moved = costs.decode_bytes(config, 1, context, model.dtype)
        for i in range(1, SWEEP + 1):
            done = i == SWEEP
            layers = range(config.n_layers * (i - 1) // SWEEP, config.n_layers * i // SWEEP)
            frames.append(
                Frame(
                    n + done,
                    before + (now - before) * i / SWEEP,
                    read + moved * i / SWEEP,
                    layers,
                    context if done else max(0, context - 1) if n else 0,
                )
            )
        before, read = now, read + moved
    words = [[tokenizer.decode([i]) for i in part] for part in (ids, new)]
    return *words, frames, config.n_layers


def draw_text(ax: Axes, prompt: list[str], answer: list[str], n_new: int) -> None:
    """The prompt, and the answer as far as it goes, wrapped by hand."""
    column, line = 0, 0
    for i, word in enumerate([*prompt, *answer[:n_new]]):
        if column + len(word) > 63:
            column, line, word = 0, line + 1, word.lstrip()
        newest = i == len(prompt) + n_new - 1 and n_new > 0
        look = {"color": BLUE if i < len(prompt) else ORANGE, "weight": "bold"}
        where = (0.01 + 0.0154 * column, 0.75 - 0.42 * line)
        ax.text(*where, word, family="monospace", fontsize=11, **look)
        if newest:  # underlined
            start, length = column + len(word) - len(word.lstrip()), len(word.strip())
            ends = (0.01 + 0.0154 * start, 0.01 + 0.0154 * (start + length))
            ax.plot(ends, (where[1] - 0.1,) * 2, color=ORANGE, linewidth=2)
        column += len(word)


def draw(
    axes: list[Axes], frame: Frame, prompt: list[str], answer: list[str], n_layers: int
) -> None:
    """One picture: text, weights, cache, clock."""
    for ax in axes:
        ax.clear()
        ax.set(xlim=(0, 1), ylim=(0, 1))
        ax.axis("off")
    text, weights, cache, numbers = axes
    draw_text(text, prompt, answer, frame.n_new)
    weights.text(0, 0.9, "weights: every pass reads all of them", fontsize=10, color=GREY)
    for i in range(n_layers):
        read = i in frame.layers
        place = (i / n_layers, 0.1)
        face = GREY if read else "#E4E4E4"
        weights.add_patch(Rectangle(place, 0.75 / n_layers, 0.62, color=face, linewidth=0))
    cache.text(0, 0.95, "KV cache: a slot for each token (key and value)", fontsize=10, color=GREY)
    for i in range(SLOTS):
        colour = "#E4E4E4" if i >= frame.n_slots else BLUE if i < len(prompt) else ORANGE
        for row in (0.12, 0.5):
            cache.add_patch(
                Rectangle((i / SLOTS, row), 0.8 / SLOTS, 0.3, color=colour, linewidth=0)
            )
    gigabytes = frame.n_bytes / 1e9
    clock = f"{frame.seconds:5.2f} s    {gigabytes:5.2f} GB read    new tokens: {frame.n_new}"
    numbers.text(0, 0.3, clock, family="monospace", fontsize=12, weight="bold")


def main() -> None:
    """Record, draw, save; refuse a file that is too large for a README."""
    prompt, answer, frames, n_layers = record()
    heights = {"height_ratios": [1.1, 1, 1, 0.5]}
    fig, axes = plt.subplots(4, 1, figsize=(6.4, 3.4), dpi=100, gridspec_kw=heights)
    fig.subplots_adjust(left=0.04, right=0.98, top=0.97, bottom=0.03, hspace=0.12)
    pictures = []
    for frame in frames:
        draw(list(axes), frame, prompt, answer, n_layers)
        fig.canvas.draw()
        size = fig.canvas.get_width_height()
        pixels = bytes(fig.canvas.buffer_rgba())
        pictures.append(Image.frombytes("RGBA", size, pixels).convert("RGB"))
    palette = pictures[-1].quantize(32)  # the last picture has every colour
    pictures = [picture.quantize(palette=palette, dither=0) for picture in pictures]
    path = figures_folder() / "generation.gif"
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = [MILLISECONDS] * (len(pictures) - 1) + [3000]  # the last picture stands for a while
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=shown, loop=0, optimize=True
    )
    if path.stat().st_size > 300_000:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; the limit is 300000.")


if __name__ == "__main__":
    main()
