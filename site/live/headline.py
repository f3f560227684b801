"""One user, one chip: the largest number of tokens per second that there can be."""

from live.calculator import CHIPS, MODELS
from live.controls import Choice
from live.svg import number
from minillm.card import card
from minillm.config import ModelConfig
from minillm.hardware import Hardware

CONTROLS = (
    Choice("model", "a model", MODELS, "llama-3-8b"),
    Choice("chip", "on one", CHIPS, "h100"),
)


def draw(model: str, chip: str, width: int) -> str:
    """The number, and where it comes from."""
    config, hardware = ModelConfig.preset(model), Hardware.preset(chip)
    dtype = "float16" if "float16" in hardware.peak_flops else "float32"
    it = card(config, hardware, 1, 128, dtype)
    if not it.fits:
        return (
            f'<p class="headline"><b>{it.chips} chips</b> are needed for the weights alone: '
            f"{number(it.weight_bytes / 1e9)} GB</p>"
        )
    return (
        f'<p class="headline"><b>{number(it.tokens_per_second)}</b> tokens a second, at the very '
        f"most: each one reads {number(it.weight_bytes / 1e9)} GB of weights, and this chip reads "
        f"{hardware.bandwidth / 1e9:,.0f} GB a second</p>"
    )
