"""Charts and bars as SVG, drawn by hand: lines, labels beside them, ticks at round numbers.

Colours are classes (`blue`, `orange`, …), so that a page gives them what suits light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 40
"""Margins of a chart, in pixels."""


@dataclass(frozen=True)
class Line:
    """A series of (x, y) points. label: stands at its end."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def number(value: float) -> str:
    """Three digits that count: 0.0123, 4.56, 78.9, 1,234."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(6, max(0, digits))}f}"


def tick(value: float) -> str:
    """A round number as it is written at an axis."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"


def seconds(value: float) -> str:
    """A time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size or unit == "ms":
            return f"{number(value / size)} {unit}"
    return ""


def picture(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """An SVG image. title: what a reader who does not see it is told."""
    return (
        f'<svg class="drawn" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text. kind: its class; anchor: which end of it stands at x."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, kind: str, more: str = "", hint: str = ""
) -> str:
    """A rectangle. more: further attributes; hint: what a pointer above it is told."""
    told = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" '
        f'class="{kind}"{more}>{told}</rect>'
    )


def chart(
    lines: Sequence[Line],
    *,
    width: int,
    x_label: str,
    y_label: str,
    height: int = 230,
    log: str = "",
    mark: tuple[float, str] | None = None,
    dot: tuple[float, float] | None = None,
    least: float | None = None,
) -> str:
    """Lines over common axes. log: "x", "y", "xy" or neither; mark: a vertical line with a text;
    dot: where the reader stands; least: where a linear y begins, 0 unless given.
    """
    xs = [x for line in lines for x, _ in line.points] + ([mark[0]] if mark else [])
    ys = [y for line in lines for _, y in line.points if math.isfinite(y)]
    if not xs or not ys:
        return ""
    low = min(ys) if "y" in log else (0.0 if least is None else least)
    x_axis = _Axis(min(xs), max(xs), "x" in log, LEFT, width - RIGHT)
    y_axis = _Axis(low, max(ys), "y" in log, height - BOTTOM, TOP)
    parts = [text(4, 14, y_label, "small")]
    parts.append(text(width - RIGHT, height - 6, x_label, "small", "end"))
    for value in y_axis.ticks(4):
        y = y_axis.at(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        parts.append(text(LEFT - 6, y + 4, tick(value), "small", "end"))
    for value in x_axis.ticks(6):
        parts.append(text(x_axis.at(value), height - BOTTOM + 16, tick(value), "small", "middle"))
    if mark:
        x = x_axis.at(mark[0])
        parts.append(f'<path class="mark" d="M{x:.1f} {TOP}V{height - BOTTOM}"/>')
        end = x > width * 0.6
        parts.append(text(x + (-5 if end else 5), TOP + 2, mark[1], "small", "end" if end else ""))
    ends: list[float] = []
    for line in lines:
        at = [(x_axis.at(x), y_axis.at(y)) for x, y in line.points if math.isfinite(y)]
        if not at:
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        dash = " dashed" if line.dashed else ""
        parts.append(f'<path class="line {line.colour}{dash}" d="M{path}"/>')
        if len(at) < 24:
            parts += [f'<circle class="{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                      for x, y in at]  # fmt: skip
        y = at[-1][1] - 8
        while any(abs(y - other) < 14 for other in ends):
            y += 15  # labels do not cover each other
        ends.append(y)
        parts.append(text(at[-1][0], max(y, 12), line.label, f"label {line.colour}", "end"))
    if dot:
        x, y = x_axis.at(dot[0]), y_axis.at(dot[1])
        parts.append(f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    told = ", ".join(f"{line.label}: {number(line.points[-1][1])}" for line in lines if line.points)
    return picture(width, height, parts, f"{y_label} over {x_label}. At the end {told}.")


class _Axis:
    """Numbers from low to high on the pixels from start to end."""

    def __init__(self, low: float, high: float, log: bool, start: float, end: float):
        self.log, self.start, self.end = log, start, end
        high = high if high > low else low + (abs(low) or 1.0)
        self.low, self.high = low, high if log else low + (high - low) * 1.02

    def at(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, n: int) -> list[float]:
        """Round numbers, about n of them."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**p for p in powers for s in steps]
                found = [v for v in found if self.low * 0.999 <= v <= self.high * 1.001]
                if len(found) <= n + 2:
                    break
            return found if len(found) > 1 else [self.low, self.high]
        rough = (self.high - self.low) / n
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def shares(
    rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]],
    *,
    width: int,
    title: str,
    total: float | None = None,
) -> str:
    """A bar for each row (name, its parts), a part being (value, colour, what it is).

    total: the value that fills the width; the largest row's unless given.
    """
    left = 12 + max(len(name) for name, _ in rows) * 7
    longest = total or max(sum(value for value, _, _ in parts) for _, parts in rows)
    room = width - left - RIGHT
    drawn = []
    for i, (name, parts) in enumerate(rows):
        x, y = left, i * 26.0
        drawn.append(text(left - 8, y + 15, name, "small", "end"))
        for value, colour, what in parts:
            long = room * value / longest
            drawn.append(box(x, y, long, 20, colour, hint=f"{what}: {number(value)}"))
            x += long
    told = "; ".join(
        f"{name}: " + ", ".join(f"{what} {number(value)}" for value, _, what in parts)
        for name, parts in rows
    )
    return picture(width, 26.0 * len(rows), drawn, f"{title}. {told}")


def tiles(values: Sequence[tuple[str, str, str]]) -> str:
    """Large numbers in a row: (number, what it is, a class such as "good" or "bad")."""
    cells = "".join(
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what, kind in values
    )
    return f'<div class="tiles">{cells}</div>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(colour, what it stands for), in a line."""
    return (
        '<p class="legend">'
        + "".join(
            f'<span><i class="{colour}"></i>{escape(what)}</span>' for colour, what in entries
        )
        + "</p>"
    )
