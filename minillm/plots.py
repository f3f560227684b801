"""One figure style for all lessons, readable for colour-blind readers and in grey print.

Colours: Okabe and Ito 2008. Each series also has a marker and a dash pattern of its own, so that a
figure reads without colour; labels stand beside the lines. Figures are saved as PNG under
`figures/`, where the README and slides find them.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from minillm.folders import figures_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY = "#56B4E9", "#CC79A7", "#666666"
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def figure(
    columns: int = 1, *, width: float | None = None, height: float = 4.0
) -> "tuple[Figure, list[Axes]]":
    """A figure with `columns` panels side by side, in the house style.

    width, height: in inches; the width is 7.5 for one panel and 10.5 for more unless given.
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


def series(
    ax: "Axes",
    i: int,
    x: object,
    y: object,
    label: str,
    *,
    at: int = -1,
    dx: float = 6,
    dy: float = 0,
) -> None:
    """Line number `i` in its colour, marker and dashes, labelled beside point `at`.

    The label takes the place of a legend. dx, dy: offset of the label in points.
    """
    ax.plot(x, y, color=COLOURS[i], marker=MARKERS[i], linestyle=DASHES[i], label=label)
    ax.annotate(
        label,
        (x[at], y[at]),
        xytext=(dx, dy),
        textcoords="offset points",
        color=COLOURS[i],
        va="center",
        fontsize=9,
    )


def save(fig: "Figure", name: str) -> Path:
    """Save as `figures/NAME.png` and return the path.

    $MINILLM_FIGURES names another folder. Raises ValueError if the file has more than 100 kB.
    """
    folder = figures_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    if path.stat().st_size > 100_000:
        raise ValueError(
            f"{path.name} has {path.stat().st_size} bytes; make the figure simpler or smaller, "
            "the limit is 100000."
        )
    return path
