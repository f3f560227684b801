"""The accept rule, drawn a thousand times, by `minillm.speculation.formulas`."""

import random

from live.controls import Choice, Slider
from live.svg import box, legend, picture, text, tiles
from minillm.speculation.formulas import draw_one, overlap

N = 1000
WORDS = ("the", "a", "my", "this", "no")
TARGETS = {
    "peaked": (0.7, 0.15, 0.08, 0.05, 0.02),
    "middling": (0.4, 0.25, 0.2, 0.1, 0.05),
    "flat": (0.2, 0.2, 0.2, 0.2, 0.2),
}
DRAFTS = {
    "knows it": lambda p: p,
    "flatter": lambda p: tuple((x + 0.2) / 2 for x in p),
    "has it backwards": lambda p: p[::-1],
    "always says the same": lambda p: (0.0, 1.0, 0.0, 0.0, 0.0),
}

CONTROLS = (
    Choice("target", "the model is", {name: name for name in TARGETS}, "middling"),
    Choice("draft", "the drafter", {name: name for name in DRAFTS}, "has it backwards"),
    Slider("seed", "seed", list(range(12)), 0),
)


def draw(target: str, draft: str, seed: int, width: int) -> str:
    """p, q, and how often each token came out of N guesses; how many guesses stood."""
    p = TARGETS[target]
    q = DRAFTS[draft](p)
    stream = random.Random(seed)
    draws = [draw_one(p, q, stream) for _ in range(N)]
    stood = [guess for guess, _, kept in draws if kept]
    out = [token for _, token, _ in draws]
    return "".join(
        (
            tiles(
                [
                    (f"{len(stood)}", f"of {N:,} guesses stood", "good"),
                    (f"{overlap(p, q) * N:.0f}", "expected: the sum of min(p, q)", ""),
                    (f"{_distance(out, p):.1%}", "of the draws lie elsewhere than p says", ""),
                ]
            ),
            legend(
                [
                    ("orange", "q: the drafter"),
                    ("grey", "p: the model"),
                    ("green", "what came out: guesses that stood"),
                    ("blue", "what came out: drawn anew"),
                ]
            ),
            _bars(p, q, stood, out, width),
        )
    )


def _distance(out: list[int], p: tuple[float, ...]) -> float:
    """Half the sum of the differences: which share of the draws would have to move."""
    return sum(abs(out.count(i) / len(out) - p[i]) for i in range(len(p))) / 2


def _bars(
    p: tuple[float, ...], q: tuple[float, ...], stood: list[int], out: list[int], width: int
) -> str:
    """Three bars for each token, and numbers above them."""
    high, group, parts = 170, width / len(p), []
    tallest = max(*p, *q)
    wide = min(40.0, group / 4)
    for i, word in enumerate(WORDS):
        kept, x = stood.count(i) / N, i * group + group / 2 - 1.5 * wide
        new = out.count(i) / N - kept
        for j, stack in enumerate((((q[i], "orange"),), ((p[i], "grey"),),
                                   ((kept, "green"), (new, "blue")))):  # fmt: skip
            y = 20.0 + high
            for value, kind in stack:
                y -= high * value / tallest
                parts.append(box(x + j * wide, y, wide - 2, high * value / tallest, kind,
                                 hint=f"{word}: {value:.3f}"))  # fmt: skip
            total = sum(value for value, _ in stack)
            said = f"{total:.2f}" if width > 500 else f"{total:.2f}"[-3:]
            parts.append(text(x + (j + 0.5) * wide - 1, y - 4, said, "small", "middle"))
        parts.append(text(i * group + group / 2, high + 38, word, "", "middle"))
    told = "; ".join(f"{w}: p {a:.2f}, out {out.count(i) / N:.3f}"
                     for i, (w, a) in enumerate(zip(WORDS, p, strict=True)))  # fmt: skip
    return picture(width, high + 44, parts, told)
