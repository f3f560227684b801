"""One figure style for all lessons, readable with colour blindness and in greyscale print.

Colours: Okabe and Ito 2008. Each series also has its own marker and dash pattern, so that a figure
reads without colour; labels are beside the lines. Some colours mean the same in every lesson:
prefill, decode, the cache, what waits, a peer. Predictions are dashed. Figures are saved under
`figures/`, where the README and slides find them: PNG, or GIF where something moves.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.tools.folders import figures_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from PIL.Image import Image

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY = "#56B4E9", "#CC79A7", "#666666"
PREFILL, DECODE, CACHE, WAITING, PEER = BLUE, ORANGE, GREEN, GREY, PURPLE
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def figure(
    columns: int = 1, *, width: float | None = None, height: float = 4.0
) -> "tuple[Figure, list[Axes]]":
    """A figure with `columns` panels side by side, in the house style.

    width, height: in inches; by default the width is 7.5 for one panel and 10.5 for more.
    """
    import matplotlib.pyplot as plt

    style = {
        "font.size": 10, "figure.dpi": 100, "legend.frameon": False,
        "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.6,
        "lines.linewidth": 1.8, "lines.markersize": 5,
    }  # fmt: skip
    plt.rcParams.update(style)
    usual = 7.5 if columns == 1 else 10.5
    fig, axes = plt.subplots(1, columns, figsize=(width or usual, height), squeeze=False)
    return fig, list(axes[0])


def series(ax: "Axes", i: int, x: object, y: object, label: str, *, dy: float = 0) -> None:
    """Draw line number `i` in its colour, marker and dashes, labelled at its last point.

    The label takes the place of a legend. dy: vertical offset of the label in points.
    """
    ax.plot(x, y, color=COLOURS[i], marker=MARKERS[i], linestyle=DASHES[i], label=label)
    ax.annotate(
        label,
        (x[-1], y[-1]),
        xytext=(6, dy),
        textcoords="offset points",
        color=COLOURS[i],
        va="center",
        fontsize=9,
    )


def named(
    ax: "Axes",
    x: object,
    y: object,
    name: str,
    colour: str,
    marker: str = "o",
    *,
    at: int = -1,
    dx: float = 6,
    dy: float = 0,
) -> None:
    """Draw a line with its name beside point number `at`, dx and dy points away from it."""
    ax.plot(x, y, color=colour, marker=marker)
    look = {"textcoords": "offset points", "color": colour, "va": "center", "fontsize": 9}
    ax.annotate(name, (x[at], y[at]), xytext=(dx, dy), **look)


def log_height(ax: "Axes", ticks: Sequence[float]) -> None:
    """A logarithmic vertical axis with these ticks as plain numbers, such as 1,000."""
    ax.set(yscale="log", yticks=ticks, yticklabels=[f"{tick:,g}" for tick in ticks])
    ax.minorticks_off()


def label_ends(ax: "Axes", x: float, ends: list[tuple[float, str, str]]) -> None:
    """Write names at `x`, where curves end; names that would overlap are moved apart.

    ends: (height, name, colour) of each curve. The axes should have their final limits. No name
    touches the lower edge.
    """
    ends = sorted(ends)
    # Heights in pixels, where the size of the text is known
    bottom, *pixels = (
        ax.transData.transform((x, height))[1]
        for height in (ax.get_ylim()[0], *(height for height, _, _ in ends))
    )
    apart = 11.5 / 72 * ax.figure.dpi  # a line of 9 points, and some space
    for _ in range(50):  # two neighbours that are too close share the push
        pixels[0] = max(pixels[0], bottom + apart / 2)
        for i in range(1, len(ends)):
            push = max(0.0, apart - (pixels[i] - pixels[i - 1])) / 2
            pixels[i - 1], pixels[i] = pixels[i - 1] - push, pixels[i] + push
    for y, (_, name, colour) in zip(pixels, ends, strict=True):
        height = ax.transData.inverted().transform((0, y))[1]
        ax.text(x, height, name, color=colour, va="center", fontsize=9)


def plain_ticks(axis: "Axis", low: float, high: float) -> None:
    """Ticks 1, 2, 5, 10, 20 … on a logarithmic axis; more on a short one, fewer on a long one."""
    tenths = tuple(i / 10 for i in range(10, 100))
    choices = ((1.5, tenths), (4, (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)), (20, (1, 2, 3, 5, 7)),
               (2000, (1, 2, 5)), (20_000, (1, 5)))  # fmt: skip
    steps = next((steps for most, steps in choices if high / low < most), (1,))
    ticks = [x for k in range(-3, 8) for m in steps if low <= (x := m * 10.0**k) <= high]
    axis.set_ticks(ticks, labels=[f"{x:,g}" if x < 1e4 else f"{x:,.0f}" for x in ticks])
    axis.set_ticks([], minor=True)


def gantt(
    ax: "Axes",
    timeline: Iterable[Any],
    moments: Sequence[float],
    ends: Mapping[int, float] | None = None,
) -> "list[Patch]":
    """A row for each request of an engine's timeline; returns the patches of a legend.

    They stand for: it waits, prefill, it decodes, it is done and keeps its place. Step number s
    lasts from moments[s] to moments[s + 1]. ends: when each answer was handed out, if that was
    later than its last step.
    """
    from matplotlib.patches import Patch

    outside, striped = "#DDDDDD", {"facecolor": "white", "edgecolor": RED, "linewidth": 0}
    bars: dict[int, list[tuple[float, float, str]]] = {}
    for s, step in enumerate(timeline):
        for i, _, decoding in step.work:
            bar = moments[s], moments[s + 1] - moments[s], DECODE if decoding else PREFILL
            bars.setdefault(i, []).append(bar)
    for i, steps in bars.items():
        last = steps[-1][0] + steps[-1][1]
        ax.barh(i, last, 0.82, color=outside)
        spans = [(start, duration) for start, duration, _ in steps]
        ax.broken_barh(spans, (i - 0.41, 0.82), color=[colour for *_, colour in steps])
        if ends is not None:
            ax.barh(i, ends[i] - last, 0.82, left=last, hatch="//////", **striped)
    kinds = [Patch(color=colour) for colour in (outside, PREFILL, DECODE)]
    return [*kinds, Patch(hatch="////", **striped)]


def save(fig: "Figure", name: str) -> Path:
    """Save as `figures/NAME.png`, show it in a notebook, and return the path.

    $MINILLM_FIGURES names another folder. The picture has twice the pixels of its size on the
    page, for sharp screens, and its titles as alternative text. Raises ValueError if the file is
    larger than 100 kB.
    """
    import matplotlib.pyplot as plt
    from PIL import Image

    path = _path(f"{name}.png")
    fig.tight_layout()
    fig.savefig(path, dpi=200)
    with Image.open(path) as picture:  # 128 colours are plenty, and a third of the bytes
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    if (ipython := sys.modules.get("IPython")) and ipython.get_ipython():
        from IPython import display

        words = [fig.get_suptitle(), *(ax.get_title(loc="left") for ax in fig.axes)]
        wide = round(100 * fig.get_figwidth())
        alt = ". ".join(word for word in words if word) or name
        display.display(display.Image(path, width=wide, alt=alt))
        plt.close(fig)  # or the notebook would show it again
    return _not_too_large(path, 100_000)


def animate(
    draw: "Callable[[Axes, int], None]",
    n_frames: int,
    name: str,
    *,
    width: float = 7.5,
    height: float = 2.6,
    seconds_each: float | Sequence[float] = 0.5,
) -> Path:
    """Save `figures/NAME.gif` of `n_frames` pictures and return the path.

    `draw(ax, i)` draws picture i on empty axes without a frame, from (0, 0) to (1, 1).
    `seconds_each`: how long a picture is shown, or one such time for each but the last. The last is
    shown for three seconds, so it should say something by itself. Raises ValueError if the file is
    larger than 300 kB.
    """
    import matplotlib.pyplot as plt

    fig, (ax,) = figure(width=width, height=height)
    ax.set_position((0.01, 0.01, 0.98, 0.98))
    pictures = []
    for i in range(n_frames):
        ax.clear()
        ax.set(xlim=(0, 1), ylim=(0, 1))
        ax.axis("off")
        draw(ax, i)
        pictures.append(_as_picture(fig))
    plt.close(fig)
    path = _path(f"{name}.gif")
    if isinstance(seconds_each, (int, float)):
        seconds_each = [seconds_each] * (n_frames - 1)
    shown = [round(1000 * seconds) for seconds in seconds_each] + [3000]  # milliseconds
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=shown, loop=0, optimize=True
    )
    return _not_too_large(path, 300_000)


def _as_picture(fig: "Figure") -> "Image":
    """The figure in 32 colours, which keeps an animation small."""
    from PIL import Image

    fig.canvas.draw()
    size, pixels = fig.canvas.get_width_height(), bytes(fig.canvas.buffer_rgba())
    return Image.frombytes("RGBA", size, pixels).convert("RGB").quantize(32)


def slider(draw: "Callable[..., Figure]", name: str, **ranges: object) -> None:
    """A figure with sliders in JupyterLab, and a plain figure where there is no browser.

    `draw(**values)` returns a figure; its defaults make the plain one, saved as `figures/NAME.png`.
    `ranges`: for each argument of `draw` what `ipywidgets.interact` takes, such as (1, 64) for a
    slider or a list for a menu.
    """
    if "JPY_SESSION_NAME" not in os.environ:  # set by Jupyter's server
        save(draw(), name)
        return
    import matplotlib.pyplot as plt
    from ipywidgets import interact

    @wraps(draw)  # so that the sliders start at its defaults
    def redraw(**values: object) -> None:
        draw(**values)
        plt.show()

    interact(redraw, **ranges)


def _path(name: str) -> Path:
    folder = figures_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def _not_too_large(path: Path, limit: int) -> Path:
    if (size := path.stat().st_size) > limit:
        raise ValueError(
            f"{path.name} has {size} bytes; make it simpler or smaller, the limit is {limit}."
        )
    return path
