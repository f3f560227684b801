"""What speculation gains, over α, k and c, by `minillm.speculation.formulas`."""

from live.controls import Slider
from live.svg import Line, chart, number, tiles
from minillm.speculation.formulas import speedup, tokens_per_pass

KS = list(range(1, 17))

CONTROLS = (
    Slider("alpha", "α: a guess stands", [*(i / 20 for i in range(20)), 0.98, 1.0],
           0.7),
    Slider("k", "k: guesses in a round", KS, 4),
    Slider("c", "c: a draft takes", [0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0],
           0.1, "pass"),
    Slider("v", "v: a check takes", [1.0, 1.1, 1.25, 1.5, 2.0, 3.0], 1.0, "passes"),
)  # fmt: skip


def draw(alpha: float, k: int, c: float, v: float, width: int) -> str:
    """The speed-up as a number, and its curve over k for this α and its neighbours."""
    best = max(KS, key=lambda n: speedup(alpha, n, c, v))
    gain = speedup(alpha, k, c, v)
    near = [(max(0.0, alpha - 0.15), "sky"), (alpha, "orange"), (min(1.0, alpha + 0.15), "green")]
    curves = [
        Line(f"α = {a:.2f}", colour, [(n, speedup(a, n, c, v)) for n in KS]) for a, colour in near
    ]
    return tiles(
        [
            (f"{number(gain)} ×", "as fast as plain decoding", "good" if gain > 1 else "bad"),
            (number(tokens_per_pass(alpha, k)), "tokens from each pass of the model", ""),
            (f"{best}", f"is the best k: {number(speedup(alpha, best, c, v))} ×", ""),
        ]
    ) + chart(curves, width=width, x_label="k, guesses in a round", y_label="times as fast",
              dot=(k, gain))  # fmt: skip
