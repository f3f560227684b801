"""The cost of an answer in dollars, under a promise, from the bounds of `minillm.card`."""

from dataclasses import dataclass

from live.calculator import CHIPS, DTYPES, MODELS
from live.controls import Choice, Slider
from live.svg import Line, chart, number, tiles
from minillm.card import Card, card
from minillm.config import ModelConfig
from minillm.hardware import Hardware

BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]

CONTROLS = (
    Choice("model", "model", MODELS, "llama-3-8b"),
    Choice("chip", "chip", CHIPS, "h100"),
    Choice("dtype", "numbers in", DTYPES, "float16"),
    Slider("dollars", "an hour of the chip", [0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0],
           2.5, "$"),
    Slider("promise", "promise: a token every", [5, 10, 15, 20, 30, 50, 100, 200], 20, "ms"),
    Slider("prompt", "prompt", [64, 128, 256, 512, 1024, 2048, 4096], 1024, "tokens"),
    Slider("answer", "answer", [16, 64, 128, 256, 512, 1024], 256, "tokens"),
)  # fmt: skip


@dataclass(frozen=True)
class Price:
    """One batch size: seconds from token to token for a user, and dollars for an answer."""

    batch: int
    token_seconds: float
    dollars: float
    fits: bool


def price(it: Card, reading: float, answer: int, dollars: float) -> Price:
    """What an answer costs where the chip reads one prompt for it and decodes a batch at a time.

    it: a card for sequences as long as they are in the middle of an answer. reading: seconds for a
    prompt. Between two of a user's tokens there is a step, and the prompts that are read meanwhile:
    each place takes a new one every `answer` tokens. dollars: of the chip, an hour.
    """
    per_token = it.decode_seconds + it.batch * reading / answer
    return Price(it.batch, per_token, dollars / 3600 * per_token * answer / it.batch, it.fits)


def draw(
    model: str, chip: str, dtype: str, dollars: float, promise: float, prompt: int, answer: int,
    width: int,
) -> str:  # fmt: skip
    """Dollars over the batch, and the largest batch that keeps the promise."""
    config, hardware = ModelConfig.preset(model), Hardware.preset(chip)
    length, reading = prompt + answer // 2, card(config, hardware, 1, prompt, dtype).prefill_seconds
    cards = [card(config, hardware, n, length, dtype) for n in BATCHES]
    each = [price(it, reading, answer, dollars) for it in cards]
    fitting = [p for p in each if p.fits]
    kept = [p for p in fitting if p.token_seconds * 1e3 <= promise]
    if not fitting:
        raise ValueError(f"{model} with one such request does not fit on one {chip}.")
    if not kept:
        alone = fitting[0].token_seconds * 1e3
        first = [("none", f"even alone a token takes {number(alone)} ms at least", "bad")]
    else:
        best = kept[-1]
        first = [
            (f"${number(best.dollars * 1000)}", "for a thousand answers, at least", "good"),
            (f"${number(best.dollars / answer * 1e6)}", "for a million tokens of answers", ""),
            (f"{best.batch}", "users at a time keep the promise", ""),
            (f"{number(best.token_seconds * 1e3)} ms", "from token to token", ""),
        ]
    lines = [
        Line("fits", "orange", [(p.token_seconds * 1e3, p.dollars * 1000) for p in fitting]),
        Line("keeps the promise", "green", [(p.token_seconds * 1e3, p.dollars * 1000)
                                            for p in kept]),
    ]  # fmt: skip
    return tiles(first) + chart(
        [line for line in lines if line.points], width=width, log="xy",
        x_label="ms from token to token, for a user", y_label="$ for a thousand answers",
        mark=(promise, f"promise: {promise:g} ms"),
    )  # fmt: skip
